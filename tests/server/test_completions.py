"""Completions, tokenization, information, and answers that load does not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from invariant_rag import InvariantModel, Prompt, Segment, __version__
from invariant_rag.methods import METHODS
from invariant_rag.segments import document_rendering
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.settings import EngineConfig
from tests.generation.test_batching import batch_sizes
from tests.server.conftest import CHAT, FLAGS, QUESTION, body, client_of, content_of


def test_a_completion_is_that_of_the_library(client: openai.OpenAI, embedded: InvariantModel) -> None:
    prompt = f"Question: {QUESTION} Answer:"
    replies = [
        client.completions.create(model="small", prompt=prompt, max_tokens=12, extra_body={"documents": documents})
        for documents in (FLAGS, FLAGS[::-1])
    ]
    expected = Prompt("", FLAGS, f"\n{prompt}", rendering=document_rendering)
    assert replies[0].choices[0].text == embedded.generate(expected, max_new_tokens=12).text
    assert content_of(replies[0]) == content_of(replies[1])


def test_documents_stand_where_the_prompt_has_them(client: openai.OpenAI) -> None:
    def parts(texts: list[str]) -> list[dict[str, object]]:
        documents = [{"type": "document", "document": {"text": text}} for text in texts]
        return [{"type": "text", "text": "Read:\n"}, *documents, {"type": "text", "text": f"\n{QUESTION}"}]

    bodies = [{"prompt": parts(order), "max_tokens": 8} for order in (FLAGS, FLAGS[::-1])]
    found = [client.completions.create(model="small", prompt="", extra_body=body) for body in bodies]
    assert content_of(found[0]) == content_of(found[1])
    assert found[0].invariant["sets"] == [4]


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, embedded: InvariantModel) -> None:
    prompts = ["The flag of", "The mill of"]
    reply = client.completions.create(model="small", prompt=prompts, max_tokens=6, n=2)
    expected = [embedded.generate(Prompt(text), max_new_tokens=6).text for text in prompts for _ in range(2)]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="small", prompt=prompts, max_tokens=6, n=2, stream=True):
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
    assert model.id == "small"
    assert "rotor" in model.invariant["methods"]
    assert client.models.retrieve("small").id == "small"
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    page = http.get("/metrics").text
    assert 'invariant_rag_requests_total{route="/v1/models",status="200"}' in page
    assert "invariant_rag_cache_hits_total" in page
    assert http.get("/v2/nothing").json()["error"]["code"] == "not_found"
    assert http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({"prompt": ["The flag", "The mill grinds", "The ferry leaves at"]}, 3),
        ({"prompt": ["The flag", "The mill"], "n": 3, "temperature": 1.0, "seed": 1}, 6),
        ({"prompt": "The flag", "n": 8, "temperature": 1.0, "seed": 1}, 8),
    ],
)
def test_all_answers_to_a_request_are_one_batch(
    asked: dict[str, Any], rows: int, stream: bool, embedded: InvariantModel
) -> None:
    with client_of(InProcess(embedded, "small")) as http, batch_sizes(embedded.model) as sizes:
        sent = {**asked, "max_tokens": 8, "logit_bias": {"1": 0.1}, "stream": stream}
        assert http.post("/v1/completions", json=sent).status_code == 200
    assert set(sizes) == {rows}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_that_is_listed_answers(method: str, http: httpx.Client) -> None:
    assert method in http.get("/v1/models").json()["data"][0]["invariant"]["methods"]
    replies = [
        http.post(CHAT, json=body(max_tokens=2, documents=each, invariant={"method": method})).json()
        for each in (FLAGS, FLAGS[::-1])
    ]
    assert replies[0]["choices"][0]["message"]["content"] == replies[1]["choices"][0]["message"]["content"]


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
