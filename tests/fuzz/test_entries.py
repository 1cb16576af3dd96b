"""Public entries: every order of segments and of files gives the same bits, and no request makes a server fail."""

import httpx
import pytest

from invariant_rag import RAG, InvariantModel, KeyValueCache, Segment
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.rag import BM25Retriever
from invariant_rag.server import InProcess, Settings
from tests.server.conftest import serving
from tests.server.hostile import check_refusal

ALPHABET = "ab \n.#山é\ud800\ue200\ue201[]<|>{}0\x00"
ORDERINGS = ("lexical", "lexical-reversed", "frequency", "score")


def text(source):
    return "".join(source.choices(ALPHABET, k=source.choice((0, 1, 3, 30))))


def segments(source):
    def segment():
        title = text(source) if source.random() < 0.5 else None
        return Segment(text(source), title, {"k": text(source)}, source.choice((0, -1.5)))

    listed = [segment() for _ in range(source.randrange(6))]
    return listed + source.choices(listed, k=source.randrange(3)) if listed else listed


@pytest.mark.rounds(150)
def test_every_order_of_the_segments_gives_the_same_answer(rounds, model):
    methods = [name for name, each in METHODS.items() if each.invariant]
    for source in rounds():
        lm = model.with_method(source.choice(methods), ordering=source.choice(ORDERINGS))
        question, listed = text(source), segments(source)
        shuffled = source.sample(listed, len(listed))
        one, other = (lm.logits(lm.chat_prompt(question, each)) for each in (listed, shuffled))
        assert one.equal(other)


@pytest.mark.rounds(80)
def test_every_order_of_the_corpus_gives_the_same_answer(rounds, model):
    for source in rounds():
        question, listed, k = text(source), segments(source), source.randint(1, 9)
        shuffled = source.sample(listed, len(listed))
        answers = [RAG(model, BM25Retriever(each), k).ask(question, max_new_tokens=2) for each in (listed, shuffled)]
        assert answers[0].text == answers[1].text
        assert [each.segment for each in answers[0].citations] == [each.segment for each in answers[1].citations]


@pytest.fixture(scope="module")
def server():
    engine = InProcess(InvariantModel.from_pretrained(), "small", caches={"": KeyValueCache()})
    settings = Settings(max_new_tokens=32, timeout=30)
    with serving(engine, settings, MonoT5(EMBEDDED["monot5"])) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def test_no_request_makes_the_server_fail(server, rounds):
    for source in rounds():
        check_refusal(source.randrange(1 << 32), server)
