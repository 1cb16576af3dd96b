"""Claims about the orderings that ask a model."""

import pickle
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import permutations
from threading import Event

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoTokenizer, BertModel, T5ForConditionalGeneration

from invariant_rag.cancellation import cancellable
from invariant_rag.errors import ContextOverflow, InvariantRAGError, TokenizerRequired, UnsupportedModel
from invariant_rag.orderings import Candidate, CrossEncoder, Embedding, MonoT5, Relevance
from invariant_rag.segments import Segment
from tests.comparing import assert_computes
from tests.orderings.conftest import WORDS, save_bert


def candidates(*texts):
    return [Candidate(Segment(text), tuple(map(ord, text)), text) for text in texts]


TEXTS = candidates("river salt", "lantern", "bridge copper winter mill harbour", "salt", "mill mill")


class Recorder(Relevance):
    """Scores a text by its length and remembers what it was shown."""

    name = "recorder"

    def __init__(self, value=None):
        super().__init__("nothing")
        self.value, self.shown = value, []

    def score_texts(self, texts, query):
        self.shown.append(list(texts))
        return [len(text) if self.value is None else self.value for text in texts]


def test_the_model_is_shown_the_distinct_texts_in_sorted_order_whatever_order_they_came_in():
    recorder = Recorder()
    for shuffled in permutations(candidates("bb", "a", "bb", "ccc")):
        assert [shuffled[index].text for index in recorder.rank(shuffled, "q")] == ["ccc", "bb", "bb", "a"]
    assert recorder.shown == [["a", "bb", "ccc"]] * 24
    assert Recorder().rank([], "q") == []


@pytest.mark.parametrize("kind", [MonoT5, CrossEncoder, Embedding])
def test_segments_without_text_and_folders_without_a_model_are_refused(kind, tmp_path):
    with pytest.raises(TokenizerRequired, match="segment 1"):  # before a model is loaded
        kind().rank([*candidates("a"), Candidate(Segment.of([1, 2]), (1, 2), None)], "q")
    with pytest.raises(InvariantRAGError, match=tmp_path.name) as caught:
        kind(tmp_path).rank(candidates("a"), "q")
    assert caught.value.hint


def one_by_one(folder, *texts):
    """Return -log P(true) against false, written out for each input."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, ids = T5ForConditionalGeneration.from_pretrained(folder).eval(), tokenizer.convert_tokens_to_ids
    start = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        logits = [model(**tokenizer(each, return_tensors="pt"), decoder_input_ids=start).logits[0, 0] for each in texts]
    return [-float(each[ids(["true", "false"])].log_softmax(-1)[0]) for each in logits]


def test_monot5_scores_are_the_log_probability_of_true_against_false(monot5, t5_folder):
    expected = one_by_one(t5_folder, *(f"Query: salt mill Document: {each.text} Relevant:" for each in TEXTS))
    keys = assert_computes(expected, monot5.sort_keys, TEXTS, "salt mill")
    assert len(set(keys)) == len(keys)
    assert [keys[index] for index in monot5.rank(TEXTS, "salt mill")] == sorted(keys), "the most relevant first"


def test_monot5_cuts_a_long_document_and_keeps_the_query_and_the_end(t5_folder):
    # "Query: salt Document:" takes 3 tokens, "Relevant:" and the end 2, so 5 of the document's 40 words fit.
    short = MonoT5(str(t5_folder), max_length=10, device="cpu")
    expected = one_by_one(t5_folder, "Query: salt Document: river mill river mill river Relevant:")
    assert_computes(expected, short.sort_keys, candidates("river mill " * 20), "salt")


def test_what_a_model_cannot_score_is_refused(t5_folder, tmp_path):
    def monot5(**options):
        return MonoT5(str(t5_folder), device="cpu", **options)

    for ordering, query, error, message in (
        (monot5(true_word="unheard-of"), "salt", UnsupportedModel, "one token for"),
        (monot5(true_word="true false"), "salt", UnsupportedModel, "one token for"),
        (monot5(true_word="false"), "salt", UnsupportedModel, "same token"),
        (monot5(max_length=10), "salt " * 9, ContextOverflow, r"13 tokens .* room for 10"),
        (CrossEncoder(str(save_bert(tmp_path, outputs=2)), device="cpu"), "q", UnsupportedModel, "one score per text"),
        (Recorder(float("nan")), "q", UnsupportedModel, "nan"),
    ):
        with pytest.raises(error, match=message):
            ordering.rank(candidates("a", "b"), query)


def test_threads_that_arrive_together_load_the_model_once(t5_folder, monkeypatch):
    loads, load = [], T5ForConditionalGeneration.from_pretrained
    counted = lambda name, **options: loads.append(name) or load(name, **options)  # noqa: E731
    monkeypatch.setattr(T5ForConditionalGeneration, "from_pretrained", counted)
    ordering = MonoT5(str(t5_folder), device="cpu")
    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(lambda _: ordering.rank(TEXTS, "salt"), range(8)))
    assert loads == [str(t5_folder)]
    assert ranks == [ranks[0]] * 8


def test_an_ordering_survives_pickling_and_loads_its_model_where_it_arrives(
    monot5, cross_encoder, embedding, t5_folder
):
    for ordering in (monot5, cross_encoder, embedding):
        arrived = pickle.dumps(ordering)
        assert len(arrived) < 1000, "weights that have a name stay behind"
        assert pickle.loads(arrived).sort_keys(TEXTS, "salt mill") == ordering.sort_keys(TEXTS, "salt mill")
    model = T5ForConditionalGeneration.from_pretrained(t5_folder).eval()
    given = MonoT5(model, AutoTokenizer.from_pretrained(t5_folder), batch_size=2)  # one that is loaded already
    keys = monot5.sort_keys(TEXTS, "salt")
    assert pickle.loads(pickle.dumps(given)).sort_keys(TEXTS, "salt") == given.sort_keys(TEXTS, "salt") == keys
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        MonoT5(model)


def test_cross_encoder_scores_are_raw_logits(cross_encoder):
    keys = cross_encoder.sort_keys(TEXTS, "salt mill")
    assert max(map(abs, keys)) > 1
    assert len(set(keys)) == len(keys)


def test_embedding_ranks_by_meaning_also_with_a_loaded_model(embedding):
    texts = ["The bakery opens at seven.", "A ferry crosses the strait twice a day.", "Copper is mined in the hills."]
    ranks = [
        each.rank(candidates(*texts), "When does the boat sail?") for each in (embedding, Embedding(embedding._loaded))
    ]
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == 1


@pytest.mark.parametrize(("kind", "together"), [("monot5", 1), ("cross_encoder", 4)])
def test_no_batch_is_read_once_nobody_waits_for_the_scores(kind, together, request):
    relevance, gone, reads = request.getfixturevalue(kind), Event(), []
    listed = candidates(*(f"{word} {other} mill" for word in WORDS for other in WORDS))
    relevance.sort_keys(listed[:1], "river")  # the model is loaded

    def leave(network, *_):
        if isinstance(network, T5ForConditionalGeneration | BertModel):
            reads.append(1)
            gone.set()

    hook = register_module_forward_hook(leave)
    try:
        with cancellable(gone), pytest.raises(CancelledError):
            relevance.sort_keys(listed, "river")
    finally:
        hook.remove()
    assert len(reads) == together
