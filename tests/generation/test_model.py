"""InvariantModel as a user meets it: loading, also at the first use; wrapping, choosing, and what it refuses."""

import copy
import logging
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import invariant_rag
from invariant_rag import InvariantModel, KeyValueCache, Prompt, SegmentSet, errors
from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.generation.lazy_model import LazyModel
from invariant_rag.methods import PINE
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import Frequency
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.comparing import assert_computes
from tests.generation.test_batching import forward_passes

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10]], [11, 12])
NAMED = ("method", "ordering", "backend", "overflow", "intervention")


def test_a_folder_is_loaded_with_its_tokenizer_and_keywords_of_transformers(tiny_folder, chat_llama, tmp_path, caplog):
    options = {"dtype": "float32", "cache_dir": tmp_path, "local_files_only": True, "use_cache": False}
    lm = InvariantModel.from_pretrained(tiny_folder, method="pine", ordering="frequency", backend="sdpa", **options)
    described = f"InvariantModel({str(tiny_folder)!r}, method='pine', ordering='frequency', backend='sdpa')"
    assert (repr(lm), lm.context_window, lm.model.config.use_cache) == (described, 4096, False)
    prompt = lm.chat_prompt("Why?", ["one", "two"])
    wrapped = InvariantModel(chat_llama, lm.tokenizer, method=PINE(), ordering=Frequency())
    assert torch.equal(lm.logits(prompt), wrapped.logits(prompt))
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(errors.ModelNotFound, match="expected a causal LM"):
            InvariantModel.from_pretrained(place)
    with pytest.raises(errors.InvalidChoice, match=r"cannot load.*'fooo'"):
        InvariantModel.from_pretrained(tiny_folder, fooo=1)
    with caplog.at_level(logging.WARNING):
        lm = InvariantModel.from_pretrained(GOLDEN / "gqa")
    assert "no tokenizer" in caplog.text, "and takes token ids"
    assert lm.tokenizer is None
    assert lm.logits(PROMPT).shape == (2, 512)
    with pytest.raises(errors.TokenizerRequired, match="token ids"):
        lm.logits(Prompt("text", ["more"], "text"))


def test_another_method_shares_the_weights_and_brings_its_own_ordering_and_an_answer_needs_room_too(llama):
    lm = InvariantModel(llama, ordering="frequency", max_segment_tokens=5)
    other = lm.with_method("sequential")
    assert other.model is lm.model
    assert (other.method.name, other.ordering.name) == ("sequential", "given")
    assert lm.with_method("pine", ordering="lexical-reversed").ordering.name == "lexical-reversed"
    assert lm.with_method(backend="reference").ordering.name == "frequency"
    assert (lm.method.name, lm.ordering.name) == ("rotor", "frequency"), "the first is as it was"
    with pytest.raises(errors.ContextOverflow, match="max_segment_tokens=5"):
        other.logits(Prompt([1], [[2] * 6], [3]))
    assert len(other.with_method(overflow="trim_segments").prepare(Prompt([1], [[2] * 6], [3])).input_ids) == 7
    long = Prompt([3], [[5] * 5] * 100, [7])
    with pytest.raises(errors.ContextOverflow, match=r"512 tokens.*502 in the prompt.*20 to generate"):
        lm.generate(long, max_new_tokens=20)
    assert lm.generate(long, max_new_tokens=10).usage.total_tokens == 512


def test_a_prompt_is_rendered_from_a_question_or_from_messages_alone(model):
    messages = [{"role": "user", "content": [SegmentSet(["one", "two"]), "What?"]}]
    assert [len(each) for each in model.chat_prompt(messages=messages).sets] == [2]
    with pytest.raises(errors.InvalidPrompt, match="either"):
        model.chat_prompt()
    for name, message in (("question", "either"), ("segments", "messages alone"), ("system", "messages alone")):
        with pytest.raises(errors.InvalidPrompt, match=message):
            model.chat_prompt(messages=messages, **{name: "LOST"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({name: "x"}, "'x'") for name in NAMED[:3]),
        *(({name: ["x"]}, "unknown|expected") for name in NAMED),
        ({"dtype": "floot"}, "dtype.*'floot'"),
        *(({each[:2] + each[3:]: "x"}, f"unknown keyword.*did you mean '{each}'") for each in ("method", "cache")),
        ({"overflow": "drop_lst"}, "unknown overflow 'drop_lst'.*did you mean 'drop_last'"),
        ({"intervention": "ms-po"}, "unknown intervention 'ms-po'.*did you mean 'ms-poe'"),
        *(({"max_segment_tokens": each}, "max_segment_tokens: expected at least 1") for each in (0, "5", 2.5, True)),
        ({"deterministic": "no"}, "deterministic: expected True or False"),
        ({"cache": "folder"}, "KeyValueCache, got str"),
    ],
    ids=str,
)
def test_wrong_choices_are_refused_before_anything_is_loaded(wrong, message, llama):
    calls = [lambda **given: InvariantModel.from_pretrained("no/such-model", **given)]
    if "dtype" not in wrong:
        calls += [InvariantModel(llama).with_method, lambda **given: InvariantModel(llama, **given)]
    for call in calls:
        with pytest.raises((errors.InvariantRAGError, errors.InvalidChoice), match=message):
            call(**wrong)


@pytest.mark.parametrize("method", ["rotor", "pine"])
def test_the_models_own_forward_can_be_trained_as_prompts_are_arranged(llama, method):
    lm = InvariantModel(llama, method=method, ordering="lexical")
    prompts = [Prompt([1, 2], [[3, 4], [5], [6, 7, 8]], [9]), Prompt([1], [[8, 8, 8], [7, 6]], [5, 4, 3])]
    prepared = [lm.prepare(prompt) for prompt in prompts]
    ids = torch.tensor([each.input_ids for each in prepared])
    embedded = llama.get_input_embeddings()(ids).detach().requires_grad_()
    with lm.arranged(prepared):
        logits = llama(inputs_embeds=embedded, use_cache=False).logits
    for row, prompt in zip(logits.detach(), prompts, strict=True):
        assert_computes(row[-len(prompt.suffix) :], lm.logits, prompt)
    with torch.no_grad():
        first = llama(ids[:, :1], use_cache=False).logits  # which stands in a text: also those are computed
    torch.testing.assert_close(logits[:, :1].detach(), first, atol=rounding(lm.logits, prompts[0]), rtol=0)
    states = [PromptState(each.arrangement) for each in prepared]
    with torch.no_grad():
        with override_attention(llama, ArrangedAttention(states, lm.backend, lm.prefiller.shared.rotations)):
            every = llama(ids, use_cache=False).logits
        with lm.arranged(prepared):
            assert torch.equal(llama(ids, use_cache=False).logits, every), "of segments, too"
    (gradient,) = torch.autograd.grad(logits[0, -1].logsumexp(0), embedded)
    assert (gradient[0].abs().sum(-1) > 0).all()  # every token of the first prompt has a part in it
    assert not gradient[1].any()
    with pytest.raises(errors.InvalidPrompt, match="same length in a batch"):
        lm.arranged([prepared[0], lm.prepare(Prompt([1], [[2], [3]], [4] * 5))]).__enter__()
    for rows, said in ((ids[:, :-1], "at least the 9 tokens"), (ids[:1], "2 arranged prompts, got 1 rows")):
        with lm.arranged(prepared), pytest.raises(errors.InvalidPrompt, match=said):
            llama(input_ids=rows)


def test_a_generation_config_says_how_and_leaves_the_rest_to_the_model_as_keywords_do_that_are_none(llama):
    lm, config, model = InvariantModel(llama), GenerationConfig(max_new_tokens=70), copy.deepcopy(llama)
    options = {"generation_config": None, "num_beams": None, "stop_strings": None, "temperature": None}
    expected = lm.generate(PROMPT, max_new_tokens=3)
    assert lm.generate(PROMPT, max_new_tokens=3, **options) == expected
    model.generation_config.cache_implementation = "static"
    assert InvariantModel(model).generate(PROMPT, max_new_tokens=3) == expected, "there is another cache"
    written = lm.generate(PROMPT, generation_config=config).token_ids
    assert len(written) == 70
    assert len(lm.generate(PROMPT, max_new_tokens=3, generation_config=config).token_ids) == 3
    assert len(lm.generate(PROMPT).token_ids) == 64
    sampling = GenerationConfig(do_sample=True, temperature=5.0, max_new_tokens=8)
    assert len({lm.generate(PROMPT, seed=seed, generation_config=sampling).token_ids for seed in range(4)}) > 1
    model.generation_config.update(eos_token_id=written[2], do_sample=True)
    for own in (GenerationConfig(), GenerationConfig(do_sample=False)):
        short = InvariantModel(model).generate(PROMPT, max_new_tokens=6, generation_config=own)
        assert short.token_ids == written[: written.index(written[2]) + 1]
        assert short.finish_reason == "stop"


def test_a_model_that_gives_its_cache_up_is_refused():
    lm = InvariantModel(tiny_model("phi3", original_max_position_embeddings=8, eos_token_id=None))
    assert len(lm.prepare(PROMPT).input_ids) > 8
    lm.generate(PROMPT, max_new_tokens=4)  # beyond it from the beginning
    shorter = Prompt([3], [[5, 6], [7]], [11, 12])
    lm.generate(shorter, max_new_tokens=2)
    with pytest.raises(errors.UnsupportedCombination, match="dropped the cache and prefilled"):
        lm.generate(shorter, max_new_tokens=6)


def test_guidance_goes_with_stock_decoding_alone(llama):
    lm = InvariantModel(llama)
    guided = lm.generate(PROMPT, max_new_tokens=4, guidance_scale=3.0)
    assert guided.logprobs != lm.generate(PROMPT, max_new_tokens=4).logprobs
    for method in ("pine", "ape", "structured"):
        with pytest.raises(errors.UnsupportedCombination, match="guidance_scale"):
            lm.with_method(method).generate(PROMPT, max_new_tokens=4, guidance_scale=3.0)


@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_a_prompt_is_read_once_by_the_last_layer_from_the_last_text_alone_and_then_the_model_decodes(method, llama):
    attentions, queries = [], []

    class Listening(SDPA):
        def attend(self, arrangement, call):
            queries.append(call.queries.shape[1])
            return super().attend(arrangement, call)

    lm = InvariantModel(llama, method=method, backend=Listening())
    prepared = lm.prepare(PROMPT)
    with forward_passes(llama, lambda _: attentions.append(llama.config._attn_implementation)) as passes:
        lm.generate(PROMPT, max_new_tokens=4)
    assert passes == [(1, len(prepared.input_ids)), (1, 1), (1, 1), (1, 1)]
    assert set(attentions[1:]) == ({"sdpa"} if lm.method.stock_decoding else {attentions[0]})
    assert llama.config._attn_implementation == "sdpa"
    assert method == "sequential" or queries[:2] == [len(prepared.input_ids), prepared.suffix_length]
    assert len(queries) == {"rotor": 2, "pine": 8, "sequential": 0}[method]


def test_assigning_an_attribute_names_the_call_that_makes_another_wrapper(llama):
    lm = InvariantModel(llama)
    routed = lm.with_routing(alpha=0.1, plain_order="canonical")
    before, described = lm.logits(PROMPT), (repr(lm), repr(routed))
    calls = dict.fromkeys(("model", "tokenizer"), "InvariantModel") | {"cache": "with_cache"}
    for name in (*calls, "method", "ordering", "backend", "overflow", "intervention", "choices", "anything", "alpha"):
        for wrapper in (lm, routed):
            with pytest.raises(errors.ImmutableModel, match=name) as caught:
                setattr(wrapper, name, None)
            assert calls.get(name, "with_method") in caught.value.hint
            with pytest.raises(AttributeError, match=name):
                delattr(wrapper, name)
    assert (repr(lm), repr(routed)) == described
    assert torch.equal(lm.logits(PROMPT), before)
    again = routed.with_routing(alpha=0.5)
    assert (again.alpha, again.plain_order, again.invariant) == (0.5, "canonical", True)
    assert (routed.with_method("pine").alpha, routed.with_routing(plain_order="given").alpha) == (0.1, 0.1)


@pytest.mark.parametrize("cached", [False, True])
def test_one_generation_takes_few_calls(llama, cached):
    """Functions of the package that are called for two tokens behind three segments, without a tokenizer."""
    package, calls, files = str(Path(invariant_rag.__file__).parent), [], set()
    lm = InvariantModel(tiny_model("llama", num_hidden_layers=1, eos_token_id=None))
    lm = lm.with_cache(KeyValueCache()) if cached else lm
    lm.generate(Prompt([3, 4], [[5], [6]], [7]), max_new_tokens=2)  # what is found out once for each model

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_qualname)
            files.add(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        lm.generate(PROMPT, max_new_tokens=2)
    finally:
        sys.setprofile(None)
    assert len(calls) <= (199 if cached else 130), calls
    assert len(files) <= 20, files


def test_padding_is_of_the_vocabulary_and_beams_keep_tokens_that_equal_it_and_stop_where_a_criterion_ends_them():
    model = tiny_model("llama", num_hidden_layers=2, eos_token_id=None, pad_token_id=None)
    lm, shorter = InvariantModel(model, backend="varlen"), Prompt([3], [[5]], [11])
    alone = lm.generate(shorter, max_new_tokens=3)
    model.generation_config.pad_token_id = -1  # as some configs say
    assert lm.generate([PROMPT, shorter], max_new_tokens=3)[1].token_ids == alone.token_ids
    model.generation_config.pad_token_id = None
    length, only_zero = len(lm.prepare(PROMPT).input_ids), {"suppress_tokens": list(range(1, 128))}

    def four(input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= length + 4)

    for beams in (1, 3):
        zeros = lm.generate(PROMPT, max_new_tokens=4, num_beams=beams, **only_zero)
        assert (zeros.token_ids, zeros.finish_reason) == ((0, 0, 0, 0), "length")
        ended = lm.generate(PROMPT, max_new_tokens=9, num_beams=beams, stopping_criteria=[four])
        assert (len(ended.token_ids), ended.finish_reason) == (4, "stop")


@pytest.mark.parametrize("method", ["rotor", "sequential"])
def test_empty_parts_are_nothing_and_a_prompt_of_one_token_is_decoded_in_every_way(llama, method):
    lm = InvariantModel(llama, method=method)
    plain, *empty = map(lm.logits, (Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4]), Prompt.of([3, 4])))
    assert all(torch.equal(each, plain) for each in empty)
    for prompt in (Prompt([7], [], []), Prompt([], [[]], [7])):
        greedy = lm.generate(prompt, max_new_tokens=3).token_ids
        assert lm.generate([prompt, prompt], max_new_tokens=3)[1].token_ids == greedy
        assert len(lm.generate(prompt, max_new_tokens=3, num_beams=4).token_ids) == 3
        assert len(lm.generate(prompt, max_new_tokens=3, num_return_sequences=2, do_sample=True, seed=1)) == 2
        one, two = lm.score(prompt, [[5], [5, 6]])
        bound = rounding(lm.score, prompt, [[5], [5, 6]])
        behind_5 = torch.log_softmax(lm.logits(Prompt([], [], [7, 5]))[-1], dim=-1)
        assert two - one == pytest.approx(float(behind_5[6]), abs=bound)


@pytest.mark.parametrize("options", [{}, {"typical_p": 0.9}], ids=["a batch", "one by one"])
def test_every_prompt_of_a_list_has_a_seed_and_the_tokens_that_it_has_alone(options, llama):
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0, **options}
    lm, prompts = InvariantModel(llama), [PROMPT, Prompt([3], [[5], [6, 7]], [9]), PROMPT]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    alone = [lm.generate(each, seed=seed, **options).token_ids for seed, each in enumerate(prompts)]
    assert torch.equal(torch.get_rng_state(), state), "the global state is as it was"
    for model in (lm, lm.with_method(deterministic=True)):
        assert [each.token_ids for each in model.generate(prompts, seed=[0, 1, 2], **options)] == alone
    assert lm.generate([], seed=[]) == []
    with pytest.raises(errors.InvalidOption, match="one for each of 3 prompts, got 2"):
        lm.generate(prompts, seed=[0, 1], **options)
    for name, wrong in (("temperature", 0.0), ("temperature", "hot"), ("top_p", 2.0), ("min_p", "x"), ("top_k", 1.5)):
        with pytest.raises(errors.InvalidOption):
            lm.generate(prompts, seed=[0, 1, 2], **{**options, name: wrong})


# --- loaded when they are first used, once in a process, and not for what a configuration states ---


@pytest.fixture
def loads(monkeypatch):
    """Calls by which transformers loaded weights."""
    load = Mock(wraps=AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    return load.call_args_list


@pytest.fixture
def folder(tmp_path, tiny_folder):
    """A folder that no other test loads from."""
    return shutil.copytree(tiny_folder, tmp_path / "own")


def test_nothing_is_loaded_before_the_first_use_and_then_once_as_long_as_somebody_has_it(folder, tiny_folder, loads):
    lazy = LazyModel(folder)
    copies = [lazy, copy.copy(lazy), copy.deepcopy(lazy), LazyModel(str(folder)), pickle.loads(pickle.dumps(lazy))]
    assert not loads
    with ThreadPoolExecutor(5) as pool:
        assert len(set(pool.map(lambda each: id(each.lm().model), copies))) == 1
    held = LazyModel(folder).lm(method="pine")
    del lazy, copies
    LazyModel(tiny_folder).lm()
    assert LazyModel(folder).lm().model is held.model
    del held
    LazyModel(folder).lm()  # the one that was used last
    assert len(loads) == 2
    LazyModel(tiny_folder).lm()
    waiting = LazyModel(folder)
    LazyModel(folder).lm()
    LazyModel(tiny_folder).lm()
    waiting.lm()  # has the weights that were loaded for a single call
    loaded = [str(call.args[0]) for call in loads]
    assert loaded == [str(each) for each in (folder, tiny_folder, tiny_folder, folder, tiny_folder)]


def test_other_options_and_a_folder_that_was_written_again_load_other_weights_and_choices_share_them(folder):
    plain, half = LazyModel(folder).lm(), LazyModel(folder, {"dtype": "bfloat16"}).lm()
    assert plain.model is not half.model
    assert str(half.model.dtype) == "torch.bfloat16"
    os.utime(folder / "config.json", (0, 2**33))
    assert LazyModel(folder).lm().model is not plain.model
    lazy = LazyModel(folder)
    ordered = lazy.lm(ordering="monot5", overflow="drop_last")
    assert (ordered.ordering.name, ordered.overflow) == ("monot5", "drop_last")
    assert lazy.lm(ordering="monot5", overflow="drop_last") is ordered
    assert lazy.lm(method="pine").method.name == "pine"


def test_the_context_window_needs_the_configuration_only(folder, tmp_path, loads):
    (folder / "model.safetensors").unlink()
    assert LazyModel(folder).context_window() == LazyModel(folder).context_window(local_files_only=True) == 4096
    embedded = InvariantModel.from_pretrained().context_window
    loads.clear()
    assert LazyModel().context_window() == LazyModel("native").context_window() == embedded
    assert not loads
    with pytest.raises(errors.ModelNotFound, match="nowhere"):
        LazyModel(tmp_path / "nowhere").context_window()


def test_a_pickle_of_a_name_has_neither_weights_nor_a_cache_and_a_model_in_memory_is_used_as_it_is(folder, chat_llama):
    named = LazyModel(folder, {"dtype": "float32"}, cache=KeyValueCache())
    assert named.lm().cache is copy.deepcopy(named).lm(method="pine").cache is not None
    pickled = pickle.dumps(named)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).lm().cache is None
    lm = InvariantModel(chat_llama, method="pine", cache=KeyValueCache())
    lazy = LazyModel(lm)
    assert (lazy.in_memory, named.in_memory) == (True, False)
    assert lazy.lm() is lm
    assert lazy.context_window() == lm.context_window
    assert lazy.lm(ordering="frequency").cache is lm.cache
    assert LazyModel(lm, cache=KeyValueCache()).lm().cache is not lm.cache
    assert repr(pickle.loads(pickle.dumps(lazy)).lm()) == repr(lm)


def test_without_a_name_it_says_once_that_a_toy_answers():
    lazy = LazyModel()
    with pytest.warns(errors.ToyModelWarning, match="Name a model"):
        assert lazy.lm().name == str(EMBEDDED["generator"])
    lazy.lm()
    LazyModel(EMBEDDED["generator"]).lm()  # who names it knows it
    assert LazyModel("native").lm().name == str(EMBEDDED["native"])
