"""What no client means: each request is refused with its field, what was expected and what to do, and does no harm."""

import json
import logging
from contextlib import ExitStack
from socket import create_connection, create_server

import httpx
import pytest
from typer.testing import CliRunner

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.cli import app
from invariant_rag.errors import InvalidChoice, UnusableFile
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.server import InProcess, Settings, telemetry
from invariant_rag.server.serving import reserve
from invariant_rag.server.settings import read_keys
from invariant_rag.server.telemetry import JsonLines
from tests.server.conftest import CHAT, QUESTION, bearer, body, client_of, exchanged, form, required, wait_until

TEXT, JUDGE, RANK = "/v1/completions", "/v1/judge", "/v2/rerank"


@pytest.fixture(scope="module")
def http(embedded, monot5):
    engine = InProcess(embedded, "small", caches={"": KeyValueCache()})
    with client_of(engine, Settings(max_new_tokens=3000, timeout=30, body_timeout=1), monot5) as client:
        yield client


def chat(**more):
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, **more}


def asked_for(schema):
    return chat(response_format=form(schema))


def tool(name="f", parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


def said(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


TWICE = required(a={"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True})
BOUNDARY = required(a={"type": "string", "pattern": r"\bb"})
SLOTS = {"type": "documents", "documents": [{"text": "a"}], "slots": [{"before": "[1] ", "colour": 1}]}
LONG_SLOT = {**SLOTS, "slots": [{"before": "word " * 60_000}]}
SAME_ID = [{"id": "1", "text": "a"}, {"id": "1", "text": "b"}]
OBJECT = {"type": "json_object"}
NAMED = {"type": "function", "function": {"name": "g"}}
MANY = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [""] * 9_999})}}
LAST_SEED = (1 << 64) - 1
CASES = {
    "unknown": (CHAT, chat(colour=1), 400, "colour", "colour: unknown field"),
    "unknown, of a document": (CHAT, chat(documents=[{"text": "a", "Url": 1}]), 400, "documents[0].Url", "unknown"),
    "unknown, of options": (CHAT, chat(invariant={"methode": "x"}), 400, "invariant.methode", "unknown field"),
    "unknown, of a slot": (CHAT, said(SLOTS), 400, "messages[0].content[0].slots[0].colour", "unknown"),
    "no object": (CHAT, [1], 400, None, "expected a JSON object"),
    "a document that is none": (CHAT, chat(documents=[[1]]), 400, "documents[0]", "expected a text or a JSON object"),
    "a number for a text": (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, None, "a text or a JSON array"),
    "a text for messages": (CHAT, chat(messages="a"), 400, "messages", "expected a JSON array"),
    "no text": (CHAT, chat(documents=[{"title": "a"}]), 400, "documents[0]", "expected either text or data"),
    "metadata": (CHAT, chat(documents=[{"text": "a", "metadata": {"a": [1]}}]), 400, None, "metadata"),
    "truth for a number": (CHAT, chat(temperature=True), 400, "temperature", "expected a valid number"),
    "n": (CHAT, chat(n=9), 400, "n", "n: expected at most 8, got 9"),
    "max_tokens": (CHAT, chat(max_tokens=3001), 400, "max_tokens", "at most 3000"),
    "penalty": (CHAT, chat(frequency_penalty=3.0), 400, "frequency_penalty", "less than or equal to 2"),
    "bias": (CHAT, chat(logit_bias={"1000000": 5}), 400, "logit_bias", "expected token ids from 0 to"),
    "negative bias": (CHAT, chat(logit_bias={"-1": 5}), 400, "logit_bias", "expected token ids from 0 to"),
    "top": (CHAT, chat(top_logprobs=5), 400, "top_logprobs", "with logprobs only"),
    "stop": (CHAT, chat(stop=["x" * 1001]), 400, "stop", "stop: expected texts of at most 1000"),
    "seed": (CHAT, chat(seed=1 << 64), 400, "seed", f"{-(1 << 63)} to {LAST_SEED}"),
    "seeds": (CHAT, chat(seed=LAST_SEED, n=2), 400, "seed", f"at most {LAST_SEED - 1} with n=2"),
    "method": (CHAT, chat(invariant={"method": "x"}), 400, "invariant.method", "invariant.method: expected one of"),
    "ordering": (CHAT, chat(invariant={"ordering": "monot5"}), 400, "invariant.ordering", "expected one of"),
    "no messages": (CHAT, chat(messages=[]), 400, "messages", "at least 1 item"),
    "a picture": (CHAT, said({"type": "image_url"}), 400, "messages[0].content[0]", "Input tag"),
    "nobody asks": (CHAT, body(messages=[{"role": "system", "content": "a"}]), 400, "documents", "a user message"),
    "object and stop": (CHAT, chat(response_format=OBJECT, stop="a"), 400, "response_format", "without stop and"),
    "schema and stop": (CHAT, chat(response_format=form({}), stop="a"), 400, "response_format", "without stop and"),
    "no schema": (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format", "expected json_schema"),
    "wrong schema": (CHAT, asked_for({"type": 3}), 400, "response_format", "JSON schema"),
    "elsewhere": (CHAT, asked_for(required(a={"$ref": "b.json#/a"})), 400, "response_format", "nothing is fetched"),
    "a long schema": (CHAT, asked_for({"enum": ["a" * 70_000]}), 400, "response_format", "65,536 bytes"),
    "xgrammar": (CHAT, asked_for(BOUNDARY), 400, "response_format", "ord boundary"),
    "keyword": (CHAT, asked_for(TWICE), 400, "response_format", "uniqueItems"),
    "parameters": (CHAT, chat(tools=[tool(parameters={"type": 3})]), 400, "tools", "JSON schema"),
    "arguments": (CHAT, chat(tools=[tool("f", TWICE)], tool_choice="required", max_tokens=80), 422, "tools", "non-uni"),
    "no function": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function", "Field required"),
    "unknown, of a tool": (CHAT, chat(tools=[tool(colour=1)]), 400, "tools[0].function.colour", "unknown field"),
    "tools": (CHAT, chat(tools=[tool(), tool()]), 400, "tools", "distinct names"),
    "many tools": (CHAT, chat(tools=[tool(str(n)) for n in range(129)]), 400, "tools", "at most 128 tools"),
    "long tools": (CHAT, chat(tools=[tool(description="a" * 70_000)]), 400, "tools", "65,536 bytes"),
    "no tools": (CHAT, chat(tool_choice="required"), 400, "tool_choice", "expected tools to choose from"),
    "no tool of that name": (CHAT, chat(tool_choice=NAMED), 400, "tool_choice", "expected tools to choose from"),
    "tool_choice": (CHAT, chat(tools=[tool()], tool_choice=NAMED), 400, "tool_choice", "unknown tool_choice 'g'"),
    "variable": (CHAT, chat(chat_template_kwargs={"colour": 1}), 400, "chat_template_kwargs", "colour"),
    "own variable": (CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs", "messages"),
    "length": (CHAT, chat(documents=["word " * 1500], max_tokens=2999), 400, None, "context"),
    "window": (CHAT, chat(documents=["word " * 9000]), 400, "messages", "context window"),
    "window of a text": (TEXT, {"prompt": "word " * 9000}, 400, "prompt", "context window"),
    "a long title": (CHAT, chat(documents=[{"text": "a", "title": "word " * 60_000}]), 413, "messages", "characters"),
    "a long slot": (CHAT, said(LONG_SLOT), 413, "messages", "characters"),
    "many documents": (CHAT, chat(documents=["a"] * 1001), 400, "documents", "at most 1000 items"),
    "many values": (CHAT, chat(chat_template_kwargs={"a": [""] * 100_001}), 413, None, "100,000 values"),
    "many arguments": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [MANY]}]), 413, None, "10,000 values"),
    "score": (CHAT, chat(documents=["a"], invariant={"ordering": "score"}), 400, "documents", "expects a score"),
    "ids": (CHAT, chat(documents=SAME_ID), 400, "documents", "'1'"),
    "ids of a completion": (TEXT, {"prompt": "a", "documents": SAME_ID}, 400, "documents", "'1'"),
    "model": (CHAT, chat(model="large"), 404, "model", "small"),
    "reranker": (RANK, {"model": "large", "query": "q", "documents": ["a"]}, 404, "model", "monot5"),
    "nothing to rank": ("/v1/rerank", {"query": "q", "documents": None}, 400, "documents", "a JSON array"),
    "documents beside a text": ("/tokenize", {"prompt": "a", "documents": ["b"]}, 400, None, "documents"),
    **{
        f"prompt {number}": (TEXT, {"prompt": prompt}, 400, None, "")
        for number, prompt in enumerate(([], "", [[1], ["a"]], [-1], [10**9], {}, None))
    },
    **{
        f"judge and {value}": (JUDGE, {"answers": ["a"], "invariant": {name: value}}, 400, f"invariant.{name}", told)
        for name, value, told in (("ordering", "given", "'given'"), ("overflow", "drop_last", "'error'"))
    },
    "criteria": (JUDGE, {"answers": ["a"], "criteria": {}}, 400, "criteria", "criteria"),
    "no criteria of options": (JUDGE, {"question": "?", "options": ["a"], "criteria": {}}, 400, None, "neither"),
    "answers": (JUDGE, {"answers": [str(n) for n in range(27)]}, 400, "answers", "1 to 26"),
    "no answers": (JUDGE, {"answers": []}, 400, "answers", "at least 1 item"),
    "answers and options": (JUDGE, {"answers": ["a"], "options": ["b"]}, 400, None, "either answers or options"),
    "options alone": (JUDGE, {"options": ["a"]}, 400, None, "a question with options"),
    "length of nothing": (JUDGE, {"answers": ["a"], "max_tokens": 4}, 400, "max_tokens", "with explain"),
    "by": (JUDGE, {"answers": ["a"], "by": "length"}, 400, "by", "'letters'"),
}
PYTHON = ("max_new_tokens", "stop_strings", "--", "Segment(", "Judge(", "pydantic", "/project/", "template_kwargs:")


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_field_and_what_to_do_over_http(name, http, caplog):
    path, sent, status, param, expected = CASES[name]
    with caplog.at_level(logging.INFO):
        response = http.post(path, json=sent, headers=bearer("key-of-ada"))
        wait_until(lambda: "request" in caplog.messages)
    logged = "".join(JsonLines().format(each) for each in caplog.records if each.name != "httpx")
    for secret in ("key-of-ada", QUESTION, "word word", "a" * 99):
        assert secret not in response.text + logged, secret
    error = response.json()["error"]
    assert response.status_code == status, error
    assert param in (None, error["param"]), error
    assert expected in error["message"]
    assert error["hint"]
    assert len(error["message"]) < 1000
    shown = (error["message"] + error["hint"]).replace("chat_template_kwargs:", "")
    assert not [each for each in PYTHON if each in shown], error
    if path == CHAT and status == 400 and isinstance(sent, dict):
        assert http.post(path, json={**sent, "stream": True}).json()["error"] == error


NESTED = [json.dumps(chat(metadata={"a": 0})).replace("0}", '{"a":' * n + "1" + "}" * n + "}") for n in (150, 5000)]
NO_NUMBERS = [json.dumps(chat()).replace("40", each) for each in ("NaN", "-Infinity", "9" * 5000)]


def test_what_is_no_json_and_what_is_no_route_is_refused_and_of_many_errors_ten_are_listed(http):
    for content, kind, told in (
        *((each, "application/json", "nested") for each in NESTED),
        *((each, "application/json", "expected a body of JSON") for each in (*NO_NUMBERS, b"\xff")),
        (json.dumps(chat()), "text/plain", "content-type"),
    ):
        response = http.post(CHAT, content=content, headers={"content-type": kind})
        assert (response.status_code, told in response.json()["error"]["message"]) == (400, True), content[:200]
    for method, path, status in (("GET", CHAT, 405), ("POST", "/v1/none", 404)):
        response = http.request(method, path)
        assert (response.status_code, "/openapi.json" in response.json()["error"]["hint"]) == (status, True)
    assert CHAT in http.get("/openapi.json").json()["paths"]
    message = http.post(CHAT, json=chat(**{f"field{each}": each for each in range(1000)})).json()["error"]["message"]
    assert (message.count("unknown field"), message.endswith("; and 990 more")) == (10, True)


def test_strict_false_leaves_the_check_to_the_caller(http):
    lax = chat(tools=[tool("f", TWICE, strict=False)], tool_choice="required", max_tokens=80)
    call = http.post(CHAT, json=lax).json()["choices"][0]["message"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": [1, 1]}


@pytest.mark.parametrize("kind", [ZeroDivisionError, UnusableFile])
def test_a_fault_is_logged_once_and_its_answer_has_the_id_of_the_request(kind, embedded, caplog):
    def failing(*_):
        raise kind("secret")

    engine = InProcess(embedded)
    engine.answer_all = failing
    with client_of(engine) as http, caplog.at_level(logging.INFO):
        responses = [http.post(CHAT, json=body(stream=stream)) for stream in (False, True)]
        wait_until(lambda: caplog.messages.count("request") >= 2)  # as it ends
    for response in responses:
        assert (response.status_code, "secret" in response.text) == (500, False)
        fields = [getattr(each, "fields", {}) for each in caplog.records]
        mine = [each for each in fields if each.get("request_id") == response.headers["x-request-id"]]
        assert [each["error"] for each in mine] == [kind.__name__] * 2
    assert sum(each.exc_info is not None for each in caplog.records) == 2
    assert "secret" not in "".join(map(JsonLines().format, caplog.records))


RANKING = b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\n"
TWO_LENGTHS = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


def test_what_is_hardly_http_or_has_two_lengths_is_refused_once_and_in_the_shape_of_all_errors(http):
    hidden = TWO_LENGTHS + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    for sent, status in (
        (b"\x00" * 100, 400),
        (b"GARBAGE\r\n\r\n", 400),
        (RANKING + b"Content-Length: 9999999999\r\n\r\n{}", 413),
        (RANKING + b"Content-Length: -1\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET /v1/models/%00%ff%2e%2e HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\tb\r\nConnection: close\r\n\r\n", 404),
        *((start + hidden, 400) for start in (b"POST /v1/rerank", b"GET /health", b"OPTIONS /v1/models")),
    ):
        head, _, content = exchanged(http, sent).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), sent[:99]
        assert json.loads(content)["error"]["type"] == "invalid_request_error"  # and no second answer behind it
        assert http.get("/health").status_code == 200


def test_clients_that_leave_in_the_middle_of_a_request_do_no_harm(http):
    content = json.dumps(body(max_tokens=8)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    for sent in (head[:20], head, head + content[:10], head + content):
        with create_connection((http.base_url.host, http.base_url.port)) as raw:
            raw.sendall(sent)
    assert http.post(CHAT, json=body(max_tokens=8)).status_code == 200


@pytest.mark.parametrize("is_proxy", [False, True])
def test_idle_connections_lock_nobody_out(is_proxy, embedded):
    settings = Settings(max_connections=8, trusted_proxies=frozenset({"127.0.0.1"} if is_proxy else ()))
    with client_of(InProcess(embedded), settings) as http, ExitStack() as stack:
        address = http.base_url.host, http.base_url.port
        idle = [stack.enter_context(create_connection(address)) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(http.base_url.join("/health"), timeout=10).status_code == 200
        idle[0].settimeout(1 if is_proxy else 10)
        if is_proxy:  # whose connections are those of many
            with pytest.raises(TimeoutError):
                idle[0].recv(1)
        else:
            assert idle[0].recv(1) == b""  # the oldest one is closed


BEHIND = "far --upstream http://127.0.0.1:9/v1"
WRONG_STARTS = [
    *((f"--timeout {each}", "timeout") for each in ("nan", "inf", "0")),
    *((f"--max-body-mb {each}", "max-body-mb") for each in ("nan", "inf")),
    *((f"--allow-method {each}", "expected allowed methods of") for each in ("rotr", "vote")),
    ("--keys no/file", "cannot read"),
    ("--reranker .", "expected monot5, cross-encoder or a checkpoint of MonoT5"),
    (f"--reranker {EMBEDDED['generator']}", "of the family llama"),
    *((f"--cache-folder {each}", "cache_folder: expected a folder") for each in (__file__, f"{__file__}/cache")),
    (f"--cache-folder {'a' * 300}", "is no path of a file: File name too long"),
    ("--trusted-proxy proxy.example", "expected addresses such as 10.0.0.2"),
    ("--votes 3", "expected no votes with a model in this process"),
    ("far --upstream localhost:8000", "upstream: expected an address with http:// or https://"),
    ("--upstream http://127.0.0.1:9/v1", "model: expected the name of one"),
    (f"{BEHIND} --vllm http://127.0.0.1:9", "expected vllm or upstream, got both"),
    (f"{BEHIND} --method rotor", "method: expected canonical, sequential, vote"),
    (f"{BEHIND} --ordering given", "expected an ordering by content"),
    (f"{BEHIND} --dtype float32", "expected no dtype with upstream"),
    (f"{BEHIND} --deterministic", "expected no deterministic with upstream"),
    (f"{BEHIND} --cache-gb 2", "expected no cache_gb with upstream"),
    (f"{BEHIND} --max-prompt-tokens 10", "expected no max_prompt_tokens with upstream"),
    (f"{BEHIND} --allow-method rotor", "expected allowed methods of canonical, sequential, vote"),
]


def test_what_is_wrong_at_the_start_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    for owner, late in ((telemetry, "configure_logging"), (InvariantModel, "from_pretrained")):
        monkeypatch.setattr(owner, late, lambda *_, **__: pytest.fail("refused too late"))
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidChoice, match=f"cannot listen at 127.0.0.1:{port}"):
            reserve("127.0.0.1", port)
        for options, told in ((f"--port {port}", "cannot listen"), *WRONG_STARTS):
            done = CliRunner().invoke(app, ["serve", "--port", "0", *options.split()])
            assert (done.exit_code, told in " ".join(done.stderr.split())) == (2, True), (options, done.stderr)
    monkeypatch.setenv("INVARIANT_RAG_API_KEY", "key-0")
    file = tmp_path / "keys"
    file.write_text("# comment\nada key-1\n\nada key-2\nivo key-3\n")
    assert read_keys(file) == {"key-0": "default", "key-1": "ada", "key-2": "ada", "key-3": "ivo"}
    for wrong in ("ada\n", "ada key-1 key-2\n", "ada key-1\nivo key-1\n"):
        file.write_text(wrong)
        with pytest.raises(InvalidChoice, match="line"):
            read_keys(file)
