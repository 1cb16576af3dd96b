"""A real vLLM server: answers over HTTP, clear errors, restarts, kills and many clients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariant_rag import InvariantModel, Prompt
from invariant_rag.generation.kv_cache_files import read_entry, to_bytes

from tests.documents import documents, question
from tests.servers import Server
from tests.test_in_process import SUPPORTED, assert_same
from vllm_invariant_rag import Prefilled, PrefillWorker, UnsupportedServer, VLLMBackend, VLLMError
from vllm_invariant_rag.middleware import FACTS_PATH

LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}


def prompt_of(lm: InvariantModel, seed: int, count: int = 6) -> Prompt:
    segments = documents(count, seed)
    return lm.chat_prompt(question(segments), segments)


def prefill(worker: PrefillWorker, lm: InvariantModel, prompt: Prompt) -> Prefilled:
    return worker.prefill(lm, lm.prepare_to_generate(prompt, 16))


def body_of(prefilled: Prefilled, **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": list(prefilled.token_ids),
        "cache_salt": prefilled.cache_salt,
        "kv_transfer_params": prefilled.kv_transfer_params,
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    return {name: value for name, value in body.items() if value is not None}


@pytest.mark.parametrize("method", SUPPORTED)
def test_every_supported_method_gives_the_tokens_of_generate(
    method: str, lm: InvariantModel, on_server: VLLMBackend
) -> None:
    chosen, prompt = lm.with_method(method, ordering="lexical"), prompt_of(lm, 300)
    answer = on_server.with_method(method, ordering="lexical").generate(prompt, **LENGTH)
    assert_same(answer, chosen.generate(prompt, **LENGTH))


def test_the_address_alone_is_enough(server: Server, lm: InvariantModel) -> None:
    backend, prompt = VLLMBackend(url=server.url + "/v1"), prompt_of(lm, 301)
    assert (backend.method.name, backend.ordering.name, backend.context_window) == ("rotor", "lexical", 2048)
    assert_same(backend.generate(prompt, **LENGTH), lm.generate(prompt, **LENGTH))


def test_all_orders_give_one_answer_and_streams_give_its_text(lm: InvariantModel, on_server: VLLMBackend) -> None:
    segments = documents(4, seed=302)
    prompts = [lm.chat_prompt(question(segments), list(order)) for order in permutations(segments)]
    answers = on_server.generate(prompts, **LENGTH)
    assert {answer.token_ids for answer in answers} == {lm.generate(prompts[0], **LENGTH).token_ids}
    stream = on_server.stream(prompts[7], **LENGTH)
    assert "".join(stream) == answers[0].text
    assert stream.generation is not None
    assert_same(stream.generation, answers[7])


def test_a_closed_stream_ends_its_request(server: Server, lm: InvariantModel, on_server: VLLMBackend) -> None:
    stream = on_server.stream(prompt_of(lm, 303), max_new_tokens=1500, min_new_tokens=1500)
    next(stream)
    stream.close()
    for _ in range(100):
        running = [
            line for line in httpx.get(server.url + "/metrics").text.splitlines() if "num_requests_running{" in line
        ]
        if running and float(running[0].split()[-1]) == 0:
            return
        time.sleep(0.1)
    pytest.fail("the request still runs")


def test_scores_are_those_of_score(lm: InvariantModel, on_server: VLLMBackend) -> None:
    prompt, candidates = prompt_of(lm, 304), ["red and white", "blue"]
    assert on_server.score(prompt, candidates) == pytest.approx(lm.score(prompt, candidates), abs=1e-3)


def test_every_refusal_is_a_clear_error_of_that_request(server: Server, lm: InvariantModel, folder: Path) -> None:
    worker, prompt = PrefillWorker(lm, folder), prompt_of(lm, 305)
    good = prefill(worker, lm, prompt)
    other = prefill(worker, lm, prompt_of(lm, 306))
    native = InvariantModel.from_pretrained("native", ordering="lexical")
    foreign = prefill(PrefillWorker(native, folder), native, prompt)
    moved = {"invariant_rag": {**other.kv_transfer_params["invariant_rag"], "tokens": 10}}  # type: ignore[index]
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "cache_salt", body_of(replace(good, cache_salt="mine"))),
        (400, "got none", body_of(replace(good, kv_transfer_params=None))),
        (400, "cache_salt", body_of(replace(good, cache_salt=other.cache_salt))),
        (400, "cache_salt", body_of(replace(good, kv_transfer_params=moved))),
        (400, "cache_salt", body_of(foreign)),
        (400, "expected an object", body_of(replace(good, kv_transfer_params={"invariant_rag": 3}))),
        (400, "prompt_logprobs", body_of(good, prompt_logprobs=1)),
        (400, "token ids", body_of(good, prompt="text")),
        (400, "use_beam_search", body_of(good, use_beam_search=True, n=2)),
        (400, "truncate_prompt_tokens", body_of(good, truncate_prompt_tokens=50)),
    ]
    deep: Any = {}
    for _ in range(500):
        deep = {"deeper": deep}
    cases.append((400, "nested", body_of(replace(good, kv_transfer_params=deep))))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(server.post, [body for *_, body in cases]))
        plain = list(pool.map(server.post, [body_of(good), body_of(other)]))
    for (status, words, _), answer in zip(cases, answers, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (status, "RequestRefused", status), answer.text
        assert words in error["message"]
    expected = [lm.generate(prompt_of(lm, seed), max_new_tokens=8).token_ids for seed in (305, 306)]
    assert [tuple(each.json()["choices"][0]["token_ids"]) for each in plain] == expected


def test_missing_and_torn_files_are_clear_errors_also_in_streams(
    server: Server, lm: InvariantModel, folder: Path, on_server: VLLMBackend
) -> None:
    worker, prompt = PrefillWorker(lm, folder), prompt_of(lm, 307)
    before = set(folder.glob("*.kv"))
    lost = prefill(worker, lm, prompt)
    (path,) = set(folder.glob("*.kv")) - before
    path.write_bytes(path.read_bytes()[:-1000])
    for stream in (False, True):
        answer = server.post(body_of(lost, stream=stream))
        content = answer.text.removeprefix("data: ").split("\n\n")[0]
        error = json.loads(content)["error"]
        assert (error["type"], error["code"]) == ("EntryUnusable", 424), answer.text
        assert answer.status_code == (200 if stream else 424)
    stream_answer = on_server.stream(prompt, **LENGTH)
    assert "".join(stream_answer) == lm.generate(prompt, **LENGTH).text


@pytest.mark.parametrize("size", [32, 128])
def test_an_entry_with_heads_of_another_size_is_never_read_and_is_written_anew(
    size: int, server: Server, lm: InvariantModel, folder: Path
) -> None:
    prompt, before = prompt_of(lm, 320 + size), set(folder.glob("*.kv"))
    prefilled = prefill(PrefillWorker(lm, folder), lm, prompt)
    (path,) = set(folder.glob("*.kv")) - before
    wrong = [tuple(each.repeat(1, 1, 2)[..., :size] for each in pair) for pair in read_entry(path)]
    path.write_bytes(to_bytes(wrong, path.stem))
    answer = server.post(body_of(prefilled))
    assert (answer.status_code, answer.json()["error"]["type"]) == (424, "EntryUnusable")
    healed = VLLMBackend(lm, url=server.url).generate(prompt, **LENGTH)
    assert_same(healed, lm.generate(prompt, **LENGTH))


def test_a_chat_request_takes_the_token_ids_of_a_prefilled_prompt(
    server: Server, lm: InvariantModel, folder: Path
) -> None:
    prompt = prompt_of(lm, 308)
    ready = prefill(PrefillWorker(lm, folder), lm, prompt)
    body = {
        "messages": [{"role": "user", "content": "(the token ids count)"}],
        "cache_salt": ready.cache_salt,
        "kv_transfer_params": {**(ready.kv_transfer_params or {}), "prompt_token_ids": list(ready.token_ids)},
        "max_tokens": 16,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = server.post(body, "/v1/chat/completions")
    assert tuple(answer.json()["choices"][0]["token_ids"]) == lm.generate(prompt, max_new_tokens=16).token_ids
    refused = server.post({**body, "cache_salt": "mine"}, "/v1/chat/completions")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "RequestRefused")


def test_two_hundred_requests_of_sixteen_clients(lm: InvariantModel, on_server: VLLMBackend) -> None:
    """Ten sets in random orders, by three methods, plain prompts among them."""
    methods = ["rotor", "isolated", "sequential"]
    prompts = [prompt_of(lm, 310 + number, count) for number, count in enumerate((0, 1, 2, 3, 5, 6, 8, 10, 15, 20))]
    models = {name: lm.with_method(name, ordering="lexical") for name in methods}
    expected = {
        (method, number): models[method].generate(prompt, max_new_tokens=12).token_ids
        for method in methods
        for number, prompt in enumerate(prompts)
    }

    def ask(request: int) -> tuple[bool, str]:
        method, number = methods[request % 3], request % 10
        segments = documents((0, 1, 2, 3, 5, 6, 8, 10, 15, 20)[number], 310 + number)
        order = segments[request % 7 :] + segments[: request % 7]
        prompt = lm.chat_prompt(question(segments), order) if segments else prompts[number]
        answer = on_server.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        return answer.token_ids == expected[method, number], f"{method} {number}"

    with ThreadPoolExecutor(16) as clients:
        results = list(clients.map(ask, range(200)))
    assert len(results) == 200
    assert [about for same, about in results if not same] == []


def test_tenants_answer_alike_and_share_no_prefix_cache(server: Server, lm: InvariantModel) -> None:
    prompt = prompt_of(lm, 330, count=12)
    for tenant in ("one", "two"):
        backend = VLLMBackend(lm, url=server.url, tenant=tenant)
        first, again = (backend.generate(prompt, **LENGTH) for _ in range(2))
        assert first.usage.cached_tokens == 0 < again.usage.cached_tokens
        assert_same(first, lm.generate(prompt, **LENGTH))


def test_a_killed_prefill_worker_leaves_nothing_that_harms(
    server: Server, lm: InvariantModel, folder: Path, on_server: VLLMBackend
) -> None:
    script = (
        "import sys\n"
        "from invariant_rag import InvariantModel\n"
        "from vllm_invariant_rag import PrefillWorker\n"
        "sys.path.insert(0, '.')\n"
        "from tests.documents import documents\n"
        "lm = InvariantModel.from_pretrained(ordering='lexical')\n"
        "worker = PrefillWorker(lm, sys.argv[1])\n"
        "for seed in range(10**6):\n"
        "    prompt = lm.chat_prompt('What is told?', documents(30, 340 + seed))\n"
        "    worker.prefill(lm, lm.prepare_to_generate(prompt, 16))\n"
        "    print(seed, flush=True)\n"
    )
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 3:
        pass
    process.kill()
    process.wait()
    for seed in range(6):
        prompt = lm.chat_prompt("What is told?", documents(30, 340 + seed))
        answer = on_server.generate(prompt, **LENGTH)
        assert_same(answer, lm.generate(prompt, **LENGTH))
        assert answer.usage.cached_tokens > 0 or seed > 3, "what the killed worker finished is found"


def test_the_server_tells_what_it_serves(server: Server, folder: Path) -> None:
    facts = httpx.get(server.url + FACTS_PATH).json()
    assert (facts["folder"], facts["dtype"], facts["max_model_len"]) == (str(folder), "float32", 2048)


def test_wrong_addresses_are_typed_errors(server: Server, lm: InvariantModel) -> None:
    with pytest.raises(VLLMError, match="expected an answer"):
        VLLMBackend(lm, url="http://127.0.0.1:9")
    with pytest.raises(UnsupportedServer, match="tells what it serves"):
        VLLMBackend(lm, url=server.url + "/v2")


def test_a_server_that_restarts_finds_the_sets_again(
    server: Server, lm: InvariantModel, on_server: VLLMBackend
) -> None:
    """The last test with this server: it takes as long as a start."""
    prompt = prompt_of(lm, 350)
    first = on_server.generate(prompt, **LENGTH)
    server.stop()
    with pytest.raises(VLLMError, match="expected an answer"):
        on_server.generate(prompt, **LENGTH)
    server.start()
    again = on_server.generate(prompt, **LENGTH)
    assert again.usage.cached_tokens > 0
    assert_same(again, first)
