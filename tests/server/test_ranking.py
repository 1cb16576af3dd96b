"""Rerank and judge."""

from __future__ import annotations

import time
from itertools import permutations

import httpx
import pytest

from invariant_rag import InvariantModel, Judge, KeyValueCache
from invariant_rag.errors import ContextOverflow
from invariant_rag.orderings import Candidate, CrossEncoder, MonoT5
from invariant_rag.segments import Segment
from tests.server.conftest import FLAGS, QUESTION


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_the_ordering_ranks_them(path: str, http: httpx.Client, monot5: MonoT5) -> None:
    expected = monot5.rank([Candidate(Segment(text), (), text) for text in FLAGS], QUESTION)
    scores = set()
    for order in permutations(range(len(FLAGS))):
        documents = [FLAGS[index] for index in order]
        results = http.post(path, json={"query": QUESTION, "documents": documents}).json()["results"]
        assert [order[each["index"]] for each in results] == expected
        scores.add(tuple(each["relevance_score"] for each in results))
    (found,) = scores
    assert list(found) == sorted(found, reverse=True)
    assert all(0 <= score <= 1 for score in found)


def test_no_more_of_a_text_is_tokenized_than_the_reranker_reads(monot5: MonoT5) -> None:
    texts = [f"{each} {'The ferry leaves at noon. ' * 1000}" for each in "ab"]
    candidates = [Candidate(Segment(text), (), text) for text in texts]
    longer = [Candidate(Segment(text), (), text + "The mill grinds. " * 200_000) for text in texts]
    start = time.process_time()
    assert monot5.sort_keys(longer, QUESTION) == monot5.sort_keys(candidates, QUESTION)
    assert time.process_time() - start < 5
    with pytest.raises(ContextOverflow, match="query"):
        monot5.sort_keys(candidates, QUESTION * 100_000)


def test_only_the_best_documents_come_back_with_their_texts_if_wanted(http: httpx.Client) -> None:
    body = {"model": "monot5", "query": QUESTION, "documents": [{"text": text} for text in FLAGS], "top_n": 2}
    plain, with_texts = (http.post("/v1/rerank", json=body | more).json() for more in ({}, {"return_documents": True}))
    assert len(plain["results"]) == 2
    assert [each["document"]["text"] for each in with_texts["results"]] == [
        FLAGS[each["index"]] for each in plain["results"]
    ]
    assert all("document" not in each for each in plain["results"])
    assert plain["meta"]["api_version"]["version"] == "1"


def test_a_logit_of_a_cross_encoder_is_a_probability() -> None:
    probability = CrossEncoder(type("Model", (), {"predict": print})()).probability
    assert [probability(each) for each in (-1e4, 0.0, 1e4)] == [0.0, 0.5, 1.0]


def test_a_verdict_is_that_of_the_library_in_every_order(http: httpx.Client, embedded: InvariantModel) -> None:
    answers = ["It is white.", "It is green and has a mill.", "Nobody knows."]
    expected = Judge(embedded.with_cache(KeyValueCache())).rank(QUESTION, answers)
    for order in permutations(range(3)):
        body = {"question": QUESTION, "answers": [answers[index] for index in order]}
        verdict = http.post("/v1/judge", json=body).json()
        assert [order[index] for index in verdict["ranking"]] == list(expected.ranking)
        assert verdict["probabilities"] == [expected.probabilities[index] for index in order]
        assert order[verdict["winner"]] == expected.winner
    chosen = http.post("/v1/judge", json={"question": QUESTION, "options": ["white", "green"], "explain": True}).json()
    assert chosen["best"] == list(Judge(embedded).choose(QUESTION, ["white", "green"]).best)
    assert chosen["explanation"]


def test_criteria_and_a_right_answer_are_those_of_the_library(http: httpx.Client, embedded: InvariantModel) -> None:
    answers, criteria = ["It is white.", "It is green and has a mill."], {"brevity": "short", "mills": "names a mill"}
    lm = embedded.with_cache(KeyValueCache())
    probabilities = {tuple(Judge(lm).rank(QUESTION, answers).probabilities)}
    for wanted, reference in ((criteria, None), ("brevity", None), (criteria, "It is white.")):
        expected = Judge(lm, criteria=wanted).rank(QUESTION, answers, reference=reference)
        sent = {"question": QUESTION, "answers": answers, "criteria": wanted, "reference": reference}
        assert http.post("/v1/judge", json=sent).json()["probabilities"] == list(expected.probabilities)
        probabilities.add(tuple(expected.probabilities))
    assert len(probabilities) == 4
