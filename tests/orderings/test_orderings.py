"""Claims about every ordering: the rank is a function of the multiset of segments, and the published one.

`tests/laws/test_contract.py` compares logits and greedy tokens with those of the published code in its orders.
"""

import pickle
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import permutations
from threading import Event

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoTokenizer, BertModel, PreTrainedTokenizerFast, T5ForConditionalGeneration

from invariant_rag import errors
from invariant_rag.cancellation import cancellable
from invariant_rag.orderings import ORDERINGS, Candidate, CrossEncoder, Embedding, MonoT5, Relevance, resolve_ordering
from invariant_rag.segments import Segment
from tests.comparing import assert_computes

PLAIN = {name: ORDERINGS[name]() for name in ("lexical", "lexical-reversed", "frequency", "score")}
BY_MODEL = ("monot5", "cross-encoder", "embedding")


def candidate(text, score=0.0, source=""):
    return Candidate(Segment(text, score=score, metadata={"source": source}), tuple(map(ord, text)), text)


def candidates(*texts):
    return list(map(candidate, texts))


def ids_only(ids):
    return Candidate(Segment.of(list(ids)), tuple(ids), None)


ODD = ("harbour", "lantern", "river", "salt", "true", "unseen", "\ud800", "زيت")
texts = st.lists(st.sampled_from(ODD), max_size=4).map(" ".join)
any_candidates = st.lists(
    st.builds(candidate, texts, st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from(["a", "b"])), max_size=6
)


@pytest.mark.parametrize(("name", "examples"), [*((name, 100) for name in PLAIN), *((name, 6) for name in BY_MODEL)])
def test_the_rank_and_every_key_to_the_last_bit_ignore_the_order_in_which_segments_are_given(by_model, name, examples):
    ordering = {**PLAIN, **by_model}[name]

    @settings(max_examples=examples)
    @given(listed=any_candidates, order=st.randoms(use_true_random=False))
    def ignores_the_order(listed, order):
        permutation = order.sample(range(len(listed)), len(listed))
        shuffled = [listed[index] for index in permutation]
        ranks = [(each, ordering.rank(each, "river salt")) for each in (listed, shuffled)]
        assert sorted(ranks[0][1]) == list(range(len(listed)))
        one, other = ([each[index].tie_breaker for index in rank] for each, rank in ranks)
        assert one == other
        keys = ordering.sort_keys(listed, "river salt")
        assert list(ordering.sort_keys(shuffled, "river salt")) == [keys[index] for index in permutation]

    ignores_the_order()


def test_every_invariant_ordering_is_tested_and_resolved_by_its_name_without_loading_a_model():
    assert {name for name, ordering in ORDERINGS.items() if ordering.invariant} == {*PLAIN, *BY_MODEL}
    for name in ORDERINGS:
        ordering = resolve_ordering(name)
        assert (type(ordering), ordering.name) == (ORDERINGS[name], name)
        assert resolve_ordering(ordering) is ordering
    for wrong in ("lexcal", "", None, 3, Relevance):
        with pytest.raises(errors.UnknownName) as caught:
            resolve_ordering(wrong)
        assert all(repr(name) in str(caught.value) for name in ORDERINGS)


def test_orderings_rank_as_they_say_and_score_names_segments_without_one():
    by_ids = list(map(ids_only, ([5, 1], [5], [4, 9, 9], [])))
    for ordering, listed, rank in (
        ("given", candidates(*"baca"), [3, 2, 1, 0]),  # the first segment is farthest
        ("lexical", by_ids, [3, 2, 1, 0]),  # the smallest ids, and the shorter of two that begin alike
        ("lexical-reversed", by_ids, [0, 1, 2, 3]),
        # The best first, then text, then metadata.
        ("score", [candidate("a", 0.1), candidate("b", 7.0), candidate("c", float("-inf"))], [1, 0, 2]),
        ("score", [candidate("b"), candidate("a", source="y"), candidate("a", source="x")], [2, 1, 0]),
    ):
        assert ORDERINGS[ordering]().rank(listed, "") == rank, ordering
    with pytest.raises(errors.InvalidSegment, match=r"2 of 3 have none: 1 \('left'\); 2 \('right'\)"):
        PLAIN["score"].rank([candidate("a", 1.0), candidate("left", None), candidate("right", None)], "")


def padded_frequency_rank(rows):
    """Rank as the published code does it: pad, count the padding, and read whatever has its count as padding."""
    longest = max(map(len, rows))
    padded = [row + [-1] * (longest - len(row)) for row in rows]
    tokens = [-1] + [token for row in padded for token in row]
    values = [[1 / tokens.count(token) for token in row] for row in padded]
    keys = [[0.0 if value == 1 / tokens.count(-1) else value for value in row] for row in values]
    return sorted(range(len(rows)), key=lambda index: (keys[index], len(rows[index]), rows[index]))


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=6))
def test_frequency_ranks_as_the_published_code_does_up_to_its_ties(rows):
    rank = PLAIN["frequency"].rank([ids_only(row) for row in rows], "")
    assert [rows[index] for index in rank] == [rows[index] for index in padded_frequency_rank(rows)]


# --- orderings that ask a model: tiny ones with random weights and one token per word, built here ---

WORDS = ("harbour", "lantern", "river", "salt", "bridge", "copper", "winter", "mill")
TEXTS = candidates("river salt", "lantern", "bridge copper winter mill harbour", "salt", "mill mill")


def saved(model, folder):
    """Save a model with a tokenizer of words, and return its folder."""
    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = (*specials.values(), "Query:", "Document:", "Relevant:", "true", "false", *WORDS)
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = "$A </s> $B:1 </s>:1"
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", pair=pair, special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=inner, **specials).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def saved_bert(folder, outputs):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": outputs, "initializer_range": 1.0}
    torch.manual_seed(0)
    return saved(transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **layers)), folder)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=1)
    return saved(T5ForConditionalGeneration(config), tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def by_model(t5_folder, tmp_path_factory):
    """Orderings by name; they load their models when they are first used. The embedding is the real MiniLM."""
    options, bert = {"batch_size": 2, "device": "cpu"}, saved_bert(tmp_path_factory.mktemp("bert"), outputs=1)
    built = MonoT5(t5_folder, **options), CrossEncoder(bert, **options), Embedding(**options)
    return dict(zip(BY_MODEL, built, strict=True))


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


def one_by_one(folder, *texts):
    """Return -log P(true) against false, written out for each input."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, ids = T5ForConditionalGeneration.from_pretrained(folder).eval(), tokenizer.convert_tokens_to_ids
    start = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        logits = [model(**tokenizer(each, return_tensors="pt"), decoder_input_ids=start).logits[0, 0] for each in texts]
    return [-float(each[ids(["true", "false"])].log_softmax(-1)[0]) for each in logits]


def test_monot5_scores_are_the_log_probability_of_true_and_a_long_document_is_cut(by_model, t5_folder):
    monot5 = by_model["monot5"]
    expected = one_by_one(t5_folder, *(f"Query: salt mill Document: {each.text} Relevant:" for each in TEXTS))
    keys = assert_computes(expected, monot5.sort_keys, TEXTS, "salt mill")
    assert len(set(keys)) == len(keys)
    assert [keys[index] for index in monot5.rank(TEXTS, "salt mill")] == sorted(keys), "the most relevant first"
    # "Query: salt Document:" takes 3 tokens, "Relevant:" and the end 2, so 5 of the document's 40 words fit.
    short = MonoT5(t5_folder, max_length=10, device="cpu")
    expected = one_by_one(t5_folder, "Query: salt Document: river mill river mill river Relevant:")
    assert_computes(expected, short.sort_keys, candidates("river mill " * 20), "salt")


def test_cross_encoder_scores_are_raw_logits_and_embeddings_rank_by_meaning(by_model):
    keys, embedding = by_model["cross-encoder"].sort_keys(TEXTS, "salt mill"), by_model["embedding"]
    assert max(map(abs, keys)) > 1
    assert len(set(keys)) == len(keys)
    texts = ["The bakery opens at seven.", "A ferry crosses the strait twice a day.", "Copper is mined in the hills."]
    rank = embedding.rank(candidates(*texts), "When does the boat sail?")
    assert rank[0] == 1
    assert Embedding(embedding._loaded).rank(candidates(*texts), "When does the boat sail?") == rank


def test_what_a_model_cannot_score_is_refused(t5_folder, tmp_path):
    def monot5(**options):
        return MonoT5(t5_folder, device="cpu", **options)

    two_scores = saved_bert(tmp_path / "two", outputs=2)
    for ordering, query, error, message in (
        (monot5(true_word="unheard-of"), "salt", errors.UnsupportedModel, "one token for"),
        (monot5(true_word="true false"), "salt", errors.UnsupportedModel, "one token for"),
        (monot5(true_word="false"), "salt", errors.UnsupportedModel, "same token"),
        (monot5(max_length=10), "salt " * 9, errors.ContextOverflow, r"13 tokens .* room for 10"),
        (CrossEncoder(two_scores, device="cpu"), "q", errors.UnsupportedModel, "one score per text"),
        (Recorder(float("nan")), "q", errors.UnsupportedModel, "nan"),
    ):
        with pytest.raises(error, match=message):
            ordering.rank(candidates("a", "b"), query)
    for kind in (MonoT5, CrossEncoder, Embedding):
        with pytest.raises(errors.TokenizerRequired, match="segment 1"):  # before a model is loaded
            kind().rank([*candidates("a"), ids_only((1, 2))], "q")
        with pytest.raises(errors.InvariantRAGError, match=tmp_path.name) as caught:  # no model is in the folder
            kind(tmp_path).rank(candidates("a"), "q")
        assert caught.value.hint


def test_threads_that_arrive_together_load_the_model_once(t5_folder, monkeypatch):
    loads, load = [], T5ForConditionalGeneration.from_pretrained
    counted = lambda name, **options: loads.append(name) or load(name, **options)  # noqa: E731
    monkeypatch.setattr(T5ForConditionalGeneration, "from_pretrained", counted)
    ordering = MonoT5(t5_folder, device="cpu")
    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(lambda _: ordering.rank(TEXTS, "salt"), range(8)))
    assert loads == [t5_folder]
    assert ranks == [ranks[0]] * 8


def test_an_ordering_survives_pickling_and_loads_its_model_anew(by_model, t5_folder):
    for ordering in by_model.values():
        arrived = pickle.dumps(ordering)
        assert len(arrived) < 1000, "weights that have a name stay behind"
        assert pickle.loads(arrived).sort_keys(TEXTS, "salt mill") == ordering.sort_keys(TEXTS, "salt mill")
    model = T5ForConditionalGeneration.from_pretrained(t5_folder).eval()
    given = MonoT5(model, AutoTokenizer.from_pretrained(t5_folder), batch_size=2)  # one that is loaded already
    keys = by_model["monot5"].sort_keys(TEXTS, "salt")
    assert pickle.loads(pickle.dumps(given)).sort_keys(TEXTS, "salt") == given.sort_keys(TEXTS, "salt") == keys
    with pytest.raises(errors.UnsupportedModel, match="tokenizer"):
        MonoT5(model)


@pytest.mark.parametrize(("name", "together"), [("monot5", 1), ("cross-encoder", 4)])
def test_no_batch_is_read_once_nobody_waits_for_the_scores(name, together, by_model):
    relevance, gone, reads = by_model[name], Event(), []
    listed = candidates(*(f"{word} {other} mill" for word in WORDS for other in WORDS))
    relevance.sort_keys(listed[:1], "river")  # the model is loaded

    def leave(network, *_):
        if isinstance(network, T5ForConditionalGeneration | BertModel):
            reads.append(1)
            gone.set()

    with register_module_forward_hook(leave), cancellable(gone), pytest.raises(CancelledError):
        relevance.sort_keys(listed, "river")
    assert len(reads) == together
