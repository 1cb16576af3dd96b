"""Requests over HTTP: every order gives the answer of the library; what no client means is refused with what to do."""

import json
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from socket import create_server

import pytest
from typer.testing import CliRunner

import invariant_rag
from invariant_rag import InvariantModel, Judge, KeyValueCache, Prompt, Segment, __version__
from invariant_rag.cli import app
from invariant_rag.errors import InvalidChoice, UnusableFile
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import Candidate, CrossEncoder
from invariant_rag.segments import document_rendering
from invariant_rag.server import InProcess, Settings, telemetry
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.serving import reserve
from invariant_rag.server.settings import EngineConfig, read_keys
from invariant_rag.server.telemetry import JsonLines
from tests.generation.test_batching import batch_sizes
from tests.server.conftest import CHAT, FLAGS, QUESTION, ask, body, client_of, form, required, stable, wait_until

ORDERS = list(permutations(FLAGS[:3]))
COLOUR, TOWN = required(colour={"enum": ["white", "green"]}), required(town={"enum": ["Ostra", "Brenn"]})
FUNCTION = {"name": "search", "description": "Search the atlas.", "parameters": TOWN}
SEARCH = {"type": "function", "function": FUNCTION}
ASKED = [{"role": "user", "content": QUESTION}]


def test_every_order_gives_the_reply_of_the_library_and_a_stream_ends_with_its_usage(client, embedded):
    asked = {"response_format": form(COLOUR, strict=True)}
    (found,) = {ask(client, list(order), **asked).choices[0].message.content for order in ORDERS}
    assert json.loads(found)["colour"] in {"white", "green"}
    replies = [stable(ask(client, list(order), logprobs=True)) for order in ORDERS]
    assert all(reply == replies[0] for reply in replies)
    expected = embedded.generate(embedded.chat_prompt(QUESTION, FLAGS[:3]), max_new_tokens=256)
    assert replies[0]["choices"][0]["message"]["content"] == expected.text == "white"
    assert {"invariant": True, "sets": [3]}.items() <= replies[0]["invariant"].items()
    twice, once = ask(client, [*FLAGS, FLAGS[0]]), ask(client, FLAGS)
    assert twice.invariant["sets"] == [5]
    assert twice.invariant["set_key"] != once.invariant["set_key"]
    chunks = list(ask(client, FLAGS, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (chunks[0].choices[0].delta.role, said, len({chunk.id for chunk in chunks})) == ("assistant", "white", 1)
    tokens = once.usage.prompt_tokens + once.usage.completion_tokens
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens, once.usage.total_tokens) == ([], tokens, tokens)


def test_documents_of_every_shape_are_read_alike_and_cited_with_their_set_which_may_number_its_own_anew(client):
    texts = [{"id": str(number), "title": "Atlas", "text": text} for number, text in enumerate(FLAGS)]
    data = [{"id": str(number), "data": {"title": "Atlas", "snippet": text}} for number, text in enumerate(FLAGS)]
    plain, cohere = ask(client, texts), ask(client, data)
    assert stable(plain) == stable(cohere)
    assert sorted(plain.invariant["order"]) == list("0123")
    (choice,) = ask(client, [{"id": "doc", "text": FLAGS[0]}, *FLAGS[1:]]).choices
    source = {"type": "document", "id": "doc", "set": 0, "document": {"id": "doc", "text": FLAGS[0]}}
    cited = {"start": 0, "end": 5, "text": "white", "sources": [source], "type": "TEXT_CONTENT"}
    assert choice.message.citations == [cited]
    mills, flags = ([{"id": str(place), "text": each[place]} for place in (0, 1)] for each in (FLAGS[2:], FLAGS))
    mill = [{"type": "documents", "documents": mills}, {"type": "text", "text": "What does the mill grind?"}]
    messages = [{"role": "user", "content": mill}, {"role": "assistant", "content": "barley"}, *ASKED]
    (choice,) = ask(client, flags, messages=messages).choices
    sources = [source for each in choice.message.citations for source in each["sources"]]
    assert [(each["set"], each["id"], each["document"]["text"]) for each in sources] == [(1, "0", FLAGS[0])]


def test_what_parse_returned_is_taken_back_and_not_read(client, http):
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    called = {"tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
    reply = client.chat.completions.parse(model="small", messages=ASKED, tools=tools, **called)
    plain, said = (reply.choices[0].message.to_dict() for _ in range(2))
    (parsed,) = (call["function"].pop("parsed_arguments") for call in plain["tool_calls"])
    assert parsed["town"] in {"Ostra", "Brenn"}
    assert "parsed_arguments" in str(said)
    sent = [{"messages": [*ASKED, each, *ASKED]} for each in (said | {"parsed": {"colour": "white"}}, plain)]
    tokens = [http.post("/tokenize", json=each).json()["tokens"] for each in sent]
    assert tokens[0] == tokens[1]


def test_documents_pasted_into_text_are_reported(client):
    pasted = "\n".join(f"Document {number}: {text}" for number, text in enumerate(FLAGS, 1))
    reply = ask(client, [], f"{pasted}\n\n{QUESTION}")
    assert not reply.invariant["invariant"]
    assert "segments" in reply.invariant["warnings"][0]
    beside = ask(client, FLAGS[:2], f"{pasted}\n\n{QUESTION}").invariant
    assert (beside["sets"], beside["invariant"], len(beside["warnings"])) == ([2], False, 1)


def test_tokens_are_made_likelier_and_what_was_said_before_unlikelier(http):
    def said(**more):
        sent = {"prompt": QUESTION, "max_tokens": 12, **more}
        return http.post("/v1/completions", json=sent).json()["choices"][0]["text"]

    (token,) = http.post("/tokenize", json={"prompt": " barley"}).json()["tokens"][-1:]
    repeated = said(logit_bias={str(token): 100.0})
    assert repeated.split() == repeated.split()[:1] * 12
    nearly = {"logit_bias": {str(token): 12.0}}  # a little more, and it is said
    assert "barley" not in said(**nearly)
    for penalty in ("frequency_penalty", "presence_penalty"):
        assert "barley" in said(**nearly, **{penalty: 2.0}), penalty


def test_null_means_the_default_and_some_fields_are_ignored(http):
    talk, nulls = {"messages": ASKED, "max_tokens": 4}, dict.fromkeys(("n", "stream", "documents", "invariant"))
    for path, sent, more in (
        (CHAT, talk, {**nulls, "tools": None}),
        (CHAT, talk, {"prompt_cache_key": "a", "safety_identifier": "b", "logit_bias": {}}),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 4}, nulls),
        ("/tokenize", {"messages": ASKED}, {"documents": None, "tools": None}),
        ("/v1/judge", {"answers": ["a", "b"]}, {"invariant": None}),
    ):
        replies = [http.post(path, json=each) for each in (sent, sent | more)]
        assert [each.status_code for each in replies] == [200, 200], more
        plain, given = (each.json() | dict.fromkeys(("id", "created", "usage")) for each in replies)
        assert plain == given, more


@pytest.mark.parametrize("cached", [False, True])
def test_one_chat_takes_few_calls(cached, embedded):
    """Functions of the package that are called for two tokens behind three documents. Never raised."""
    package, calls = str(Path(invariant_rag.__file__).parent), Counter()
    number = 0

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[number] += 1

    threading.setprofile(record)  # for threads that begin from now on
    try:
        with client_of(InProcess(embedded, caches={"": KeyValueCache()} if cached else None)) as http:
            for number in range(25):  # the first one begins threads
                documents = [f"{text} {number}." for text in FLAGS[:3]]
                assert http.post(CHAT, json=body(documents=documents, max_tokens=2)).status_code == 200
    finally:
        threading.setprofile(None)
    assert min(calls[number] for number in range(1, 25)) <= (430 if cached else 350)  # a busy machine adds some


def test_completions_are_those_of_the_library_and_prompts_are_tokenized_as_they_are_read(client, http, embedded):
    def complete(prompt, **more):
        return client.completions.create(model="small", prompt=prompt, max_tokens=6, **more)

    expected = embedded.generate(Prompt("", FLAGS, f"\n{QUESTION}", rendering=document_rendering), max_new_tokens=6)
    one, other = (complete(QUESTION, extra_body={"documents": each}) for each in (FLAGS, FLAGS[::-1]))
    assert (one.choices[0].text, stable(one)) == (expected.text, stable(other))
    prompts = ["The flag of", "The mill of"]
    expected = [embedded.generate(Prompt(text), max_new_tokens=6).text for text in prompts for _ in range(2)]
    assert [(each.index, each.text) for each in complete(prompts, n=2).choices] == list(enumerate(expected))
    chunks = [chunk.choices[0] for chunk in complete(prompts, n=2, stream=True)]
    assert ["".join(each.text for each in chunks if each.index == index) for index in range(4)] == expected
    tokens = http.post("/tokenize", json={"prompt": prompts[0]}).json()["tokens"]
    assert tokens == list(embedded.prepare(Prompt(prompts[0])).input_ids)
    text, ids = (complete(each, logprobs=1).choices[0] for each in (prompts[0], tokens))
    assert "".join(ids.logprobs.tokens) == text.text == ids.text
    assert [list(top) for top in ids.logprobs.top_logprobs] == [[each] for each in ids.logprobs.tokens]
    expected = embedded.prepare(embedded.chat_prompt(QUESTION, map(Segment, FLAGS))).input_ids
    assert http.post("/tokenize", json=body(documents=FLAGS[::-1])).json()["tokens"] == list(expected)


def test_the_server_tells_what_it_is_and_every_method_that_it_lists_answers(client, http):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("small").id == "small"
    assert set(model.invariant["methods"]) == set(METHODS)
    for method in METHODS:
        reply = http.post(CHAT, json=body(max_tokens=1, invariant={"method": method})).json()
        assert reply["invariant"]["method"] == method
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    page = http.get("/metrics").text
    assert 'invariant_rag_requests_total{route="/v1/models",status="200"}' in page
    assert "invariant_rag_cache_hits_total" in page


def test_all_answers_to_a_request_are_one_batch(embedded):
    for asked, rows in (
        ({"prompt": ["The flag", "The mill grinds", "The ferry leaves at"]}, 3),
        ({"prompt": ["The flag", "The mill"], "n": 3, "temperature": 1.0, "seed": 1}, 6),
        ({"prompt": "The flag", "n": 8, "temperature": 1.0, "seed": 1}, 8),
    ):
        for stream in (False, True):
            with client_of(InProcess(embedded, "small")) as http, batch_sizes(embedded.model) as sizes:
                sent = {**asked, "max_tokens": 8, "logit_bias": {"1": 0.1}, "stream": stream}
                assert http.post("/v1/completions", json=sent).status_code == 200
            assert set(sizes) == {rows}, sent


def test_under_load_deterministic_answers_are_bit_equal_to_those_of_single_requests():
    def logprobs(count):
        reply = http.post(CHAT, json=body(documents=FLAGS[: count % 4 + 1], logprobs=True)).json()
        return [each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]]

    engine = build_engine(EngineConfig(dtype="bfloat16", deterministic=True), Settings())
    with client_of(engine) as http, ThreadPoolExecutor(12) as threads:
        alone = [logprobs(count) for count in range(4)]
        assert list(threads.map(logprobs, range(12))) == alone * 3


@pytest.mark.parametrize("version", ["1", "2"])
def test_documents_are_ranked_as_the_ordering_ranks_them(version, http, monot5):
    path, scores = f"/v{version}/rerank", set()
    expected = monot5.rank([Candidate(Segment(text), (), text) for text in FLAGS], QUESTION)
    for order in permutations(range(len(FLAGS))):
        documents = [FLAGS[index] for index in order]
        results = http.post(path, json={"query": QUESTION, "documents": documents}).json()["results"]
        assert [order[each["index"]] for each in results] == expected
        scores.add(tuple(each["relevance_score"] for each in results))
    (found,) = scores
    assert [1, *found, 0] == sorted([1, *found, 0], reverse=True)
    sent = {"model": "monot5", "query": QUESTION, "documents": [{"text": text} for text in FLAGS], "top_n": 2}
    reply = http.post(path, json=sent | {"return_documents": True}).json()
    assert [each["document"]["text"] for each in reply["results"]] == [FLAGS[index] for index in expected[:2]]
    assert reply["meta"]["api_version"]["version"] == version
    assert all("document" not in each for each in http.post(path, json=sent).json()["results"])


def test_no_more_of_a_text_is_tokenized_than_the_reranker_reads(monot5):
    texts = [f"{each} {'The ferry leaves at noon. ' * 1000}" for each in "ab"]
    candidates = [Candidate(Segment(text), (), text) for text in texts]
    longer = [Candidate(Segment(text), (), text + "The mill grinds. " * 200_000) for text in texts]
    start = time.process_time()
    assert monot5.sort_keys(longer, QUESTION) == monot5.sort_keys(candidates, QUESTION)
    assert time.process_time() - start < 5
    probability = CrossEncoder(type("Model", (), {"predict": print})()).probability
    assert [probability(each) for each in (-1e4, 0.0, 1e4)] == [0.0, 0.5, 1.0]


def test_a_verdict_is_that_of_the_library_in_every_order(http, embedded):
    answers, lm = ["It is white.", "It is green and has a mill.", "Nobody knows."], embedded.with_cache(KeyValueCache())
    named, found = {"brevity": "short", "mills": "names a mill"}, set()
    for criteria, reference in ((None, None), ("brevity", None), (named, None), (named, answers[0])):
        given = {} if criteria is None else {"criteria": criteria}
        expected = Judge(lm, **given).rank(QUESTION, answers, reference=reference)
        found.add(tuple(expected.probabilities))
        for order in permutations(range(3)):
            listed = [answers[index] for index in order]
            sent = {"question": QUESTION, "answers": listed, "reference": reference, **given}
            verdict = http.post("/v1/judge", json=sent).json()
            assert [order[index] for index in verdict["ranking"]] == list(expected.ranking)
            assert verdict["probabilities"] == [expected.probabilities[index] for index in order]
            assert order[verdict["winner"]] == expected.winner
    assert len(found) == 4
    chosen = http.post("/v1/judge", json={"question": QUESTION, "options": ["white", "green"], "explain": True}).json()
    assert chosen["best"] == list(Judge(embedded).choose(QUESTION, ["white", "green"]).best)
    assert chosen["explanation"]


# --- what no client means ---

TEXT, JUDGE, RANK = "/v1/completions", "/v1/judge", "/v2/rerank"


def chat(**more):
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, **more}


def tool(name="f", parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


def said(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


TWICE = required(a={"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True})
BOUNDARY, ELSEWHERE = required(a={"type": "string", "pattern": r"\bb"}), required(a={"$ref": "b.json#/a"})
SLOTS = {"type": "documents", "documents": [{"text": "a"}], "slots": [{"before": "[1] ", "colour": 1}]}
LONG_SLOT = {**SLOTS, "slots": [{"before": "word " * 60_000}]}
SAME_ID = [{"id": "1", "text": "a"}, {"id": "1", "text": "b"}]
OBJECT, MANY_BYTES = {"type": "json_object"}, {"enum": ["a" * 70_000]}
NAMED = {"type": "function", "function": {"name": "g"}}
MANY = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [""] * 9_999})}}
LAST_SEED = (1 << 64) - 1
GIVEN, DROPPING = {"ordering": "given"}, {"overflow": "drop_last"}
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
    "max_tokens": (CHAT, chat(max_tokens=4097), 400, "max_tokens", "at most 4096"),
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
    "wrong schema": (CHAT, chat(response_format=form({"type": 3})), 400, "response_format", "JSON schema"),
    "elsewhere": (CHAT, chat(response_format=form(ELSEWHERE)), 400, "response_format", "nothing is fetched"),
    "a long schema": (CHAT, chat(response_format=form(MANY_BYTES)), 400, "response_format", "65,536 bytes"),
    "xgrammar": (CHAT, chat(response_format=form(BOUNDARY)), 400, "response_format", "ord boundary"),
    "keyword": (CHAT, chat(response_format=form(TWICE)), 400, "response_format", "uniqueItems"),
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
    "judge, as given": (JUDGE, {"answers": ["a"], "invariant": GIVEN}, 400, "invariant.ordering", "'given'"),
    "judge, cut": (JUDGE, {"answers": ["a"], "invariant": DROPPING}, 400, "invariant.overflow", "'error'"),
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
        response = http.post(path, json=sent, headers={"Authorization": "Bearer key-of-ada"})
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
