"""Completions, tokenization, information, ranking, judging, and answers that load does not change."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from invariant_rag import InvariantModel, Judge, KeyValueCache, Prompt, Segment, __version__
from invariant_rag.errors import ContextOverflow
from invariant_rag.methods import METHODS
from invariant_rag.orderings import Candidate, CrossEncoder, MonoT5
from invariant_rag.segments import document_rendering
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.settings import EngineConfig
from tests.generation.test_batching import batch_sizes
from tests.server.conftest import CHAT, FLAGS, QUESTION, body, client_of, content_of

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "server.md"


def test_a_completion_is_that_of_the_library(client: openai.OpenAI, embedded: InvariantModel) -> None:
    prompt = f"Question: {QUESTION} Answer:"
    given: Any = [{"documents": documents} for documents in (FLAGS, FLAGS[::-1])]
    asked: Any = {"model": "small", "prompt": prompt, "max_tokens": 12}
    replies = [client.completions.create(**asked, extra_body=each) for each in given]
    expected = Prompt("", FLAGS, f"\n{prompt}", rendering=document_rendering)
    assert replies[0].choices[0].text == embedded.generate(expected, max_new_tokens=12).text
    assert content_of(replies[0]) == content_of(replies[1])
    placed = []
    for order in (FLAGS, FLAGS[::-1]):
        documents = [{"type": "document", "document": {"text": text}} for text in order]
        parts = [{"type": "text", "text": "Read:\n"}, *documents, {"type": "text", "text": f"\n{QUESTION}"}]
        placed.append(client.completions.create(**asked, extra_body={"prompt": parts}))
    assert content_of(placed[0]) == content_of(placed[1])
    assert placed[0].invariant["sets"] == [4]


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, embedded: InvariantModel) -> None:
    prompts = ["The flag of", "The mill of"]
    asked: Any = {"model": "small", "prompt": prompts, "max_tokens": 6, "n": 2}
    reply = client.completions.create(**asked)
    expected = [embedded.generate(Prompt(text), max_new_tokens=6).text for text in prompts for _ in range(2)]
    assert [(choice.index, choice.text) for choice in reply.choices] == list(enumerate(expected))
    texts = ["", "", "", ""]
    for chunk in client.completions.create(stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_text_and_a_conversation_are_tokenized_as_they_are_read(
    http: httpx.Client, client: openai.OpenAI, embedded: InvariantModel
) -> None:
    tokens = http.post("/tokenize", json={"prompt": "The flag of"}).json()["tokens"]
    assert tokens == list(embedded.prepare(Prompt("The flag of")).input_ids)
    given = ("The flag of", tokens)
    text, ids = (client.completions.create(model="small", prompt=each, max_tokens=6, logprobs=1) for each in given)
    assert "".join(ids.choices[0].logprobs.tokens) == text.choices[0].text == ids.choices[0].text
    expected = embedded.prepare(embedded.chat_prompt(QUESTION, map(Segment, FLAGS))).input_ids
    assert http.post("/tokenize", json=body(documents=FLAGS[::-1])).json()["tokens"] == list(expected)


def test_the_server_tells_what_it_is(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("small").id == "small"
    assert "rotor" in model.invariant["methods"]
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    page = http.get("/metrics").text
    assert 'invariant_rag_requests_total{route="/v1/models",status="200"}' in page
    assert "invariant_rag_cache_hits_total" in page


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({"prompt": ["The flag", "The mill grinds", "The ferry leaves at"]}, 3),
        ({"prompt": ["The flag", "The mill"], "n": 3, "temperature": 1.0, "seed": 1}, 6),
        ({"prompt": "The flag", "n": 8, "temperature": 1.0, "seed": 1}, 8),
    ],
)
def test_all_answers_to_a_request_are_one_batch(asked: dict[str, Any], rows: int, embedded: InvariantModel) -> None:
    for stream in (False, True):
        with client_of(InProcess(embedded, "small")) as http, batch_sizes(embedded.model) as sizes:
            sent = {**asked, "max_tokens": 8, "logit_bias": {"1": 0.1}, "stream": stream}
            assert http.post("/v1/completions", json=sent).status_code == 200
        assert set(sizes) == {rows}


def test_every_method_that_is_listed_answers(http: httpx.Client) -> None:
    assert set(METHODS) == set(http.get("/v1/models").json()["data"][0]["invariant"]["methods"])
    for method in METHODS:
        sent = [body(max_tokens=2, documents=each, invariant={"method": method}) for each in (FLAGS, FLAGS[::-1])]
        found = {http.post(CHAT, json=each).json()["choices"][0]["message"]["content"] for each in sent}
        assert len(found) == 1, method


def test_scores_of_a_retriever_order_documents(http: httpx.Client) -> None:
    documents = [{"id": str(score), "text": text, "score": score} for score, text in enumerate(FLAGS)]
    for sign in (1, -1):
        wanted = [{**each, "score": sign * each["score"]} for each in (documents[2:] + documents[:2])]
        reply = http.post(CHAT, json=body(max_tokens=2, documents=wanted, invariant={"ordering": "score"})).json()
        assert reply["invariant"]["order"] == ["0", "1", "2", "3"][::sign]


def test_under_load_deterministic_answers_are_bit_equal_to_those_of_single_requests() -> None:
    engine = build_engine(EngineConfig(dtype="bfloat16", deterministic=True), Settings())
    with client_of(engine) as http, ThreadPoolExecutor(12) as threads:

        def logprobs(count: int) -> list[float]:
            sent = body(documents=FLAGS[: count % 4 + 1], logprobs=True)
            tokens = http.post(CHAT, json=sent).json()["choices"][0]["logprobs"]["content"]
            return [each["logprob"] for each in tokens]

        alone = [logprobs(count) for count in range(4)]
        assert list(threads.map(logprobs, range(12))) == alone * 3


def test_the_tutorial_s_code_gets_an_answer_with_citations(base_url: str) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("http://localhost:8000", base_url).replace("Qwen/Qwen2.5-7B-Instruct", "small")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert "red and white" in namespace["reply"].choices[0].message.content
    assert len(namespace["reply"].invariant["order"]) == 2


@pytest.mark.parametrize("version", ["1", "2"])
def test_documents_are_ranked_as_the_ordering_ranks_them(version: str, http: httpx.Client, monot5: MonoT5) -> None:
    path, expected = (
        f"/v{version}/rerank",
        monot5.rank([Candidate(Segment(text), (), text) for text in FLAGS], QUESTION),
    )
    scores = set()
    for order in permutations(range(len(FLAGS))):
        documents = [FLAGS[index] for index in order]
        results = http.post(path, json={"query": QUESTION, "documents": documents}).json()["results"]
        assert [order[each["index"]] for each in results] == expected
        scores.add(tuple(each["relevance_score"] for each in results))
    (found,) = scores
    assert sorted(found, reverse=True) == list(found)
    assert all(0 <= score <= 1 for score in found)
    sent = {"model": "monot5", "query": QUESTION, "documents": [{"text": text} for text in FLAGS], "top_n": 2}
    reply = http.post(path, json=sent | {"return_documents": True}).json()
    assert [each["document"]["text"] for each in reply["results"]] == [FLAGS[index] for index in expected[:2]]
    assert reply["meta"]["api_version"]["version"] == version
    assert all("document" not in each for each in http.post(path, json=sent).json()["results"])


def test_no_more_of_a_text_is_tokenized_than_the_reranker_reads(monot5: MonoT5) -> None:
    texts = [f"{each} {'The ferry leaves at noon. ' * 1000}" for each in "ab"]
    candidates = [Candidate(Segment(text), (), text) for text in texts]
    longer = [Candidate(Segment(text), (), text + "The mill grinds. " * 200_000) for text in texts]
    start = time.process_time()
    assert monot5.sort_keys(longer, QUESTION) == monot5.sort_keys(candidates, QUESTION)
    assert time.process_time() - start < 5
    with pytest.raises(ContextOverflow, match="query"):
        monot5.sort_keys(candidates, QUESTION * 100_000)
    probability = CrossEncoder(type("Model", (), {"predict": print})()).probability
    assert [probability(each) for each in (-1e4, 0.0, 1e4)] == [0.0, 0.5, 1.0]


def test_a_verdict_is_that_of_the_library_in_every_order(http: httpx.Client, embedded: InvariantModel) -> None:
    answers, lm = ["It is white.", "It is green and has a mill.", "Nobody knows."], embedded.with_cache(KeyValueCache())
    expected = Judge(lm).rank(QUESTION, answers)
    for order in permutations(range(3)):
        sent = {"question": QUESTION, "answers": [answers[index] for index in order]}
        verdict = http.post("/v1/judge", json=sent).json()
        assert [order[index] for index in verdict["ranking"]] == list(expected.ranking)
        assert verdict["probabilities"] == [expected.probabilities[index] for index in order]
        assert order[verdict["winner"]] == expected.winner
    chosen = http.post("/v1/judge", json={"question": QUESTION, "options": ["white", "green"], "explain": True}).json()
    assert chosen["best"] == list(Judge(embedded).choose(QUESTION, ["white", "green"]).best)
    assert chosen["explanation"]
    criteria, found = {"brevity": "short", "mills": "names a mill"}, set()
    for wanted, reference in ((criteria, None), ("brevity", None), (criteria, "It is white.")):
        own = Judge(lm, criteria=wanted).rank(QUESTION, answers[:2], reference=reference)
        sent = {"question": QUESTION, "answers": answers[:2], "criteria": wanted, "reference": reference}
        assert http.post("/v1/judge", json=sent).json()["probabilities"] == list(own.probabilities)
        found.add(tuple(own.probabilities))
    assert len(found) == 3
