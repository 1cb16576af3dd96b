"""vLLM's prefix cache keeps plain keys, arranged ones, and those of different sets apart.

Log-probabilities tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel, Prompt, Segment

from tests.documents import documents, question
from tests.raw import ask, distance
from vllm_invariant_rag import Prefilled, PrefillWorker, UnsupportedServer, VLLMBackend

ROUNDING = 1e-3
LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}


@pytest.fixture(scope="module")
def worker(lm: InvariantModel, folder: Path) -> PrefillWorker:
    return PrefillWorker(lm, folder)


def prefill(worker: PrefillWorker, lm: InvariantModel, prompt: Prompt) -> Prefilled:
    return worker.prefill(lm, lm.prepare_to_generate(prompt, 16))


def prompt_of(lm: InvariantModel, seed: int, count: int = 8) -> Prompt:
    segments = documents(count, seed)
    return lm.chat_prompt(question(segments), segments)


def plain(prefilled: Prefilled, salt: str = "") -> Prefilled:
    """The same tokens, as a client sends them that knows nothing of sets."""
    return replace(prefilled, kv_transfer_params=None, cache_salt=salt)


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("evicted", [False, True])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(
    arranged_first: bool, evicted: bool, llm: Any, lm: InvariantModel, worker: PrefillWorker
) -> None:
    prompt = prompt_of(lm, seed=200 + 2 * arranged_first + evicted)
    arranged = prefill(worker, lm, prompt)
    sequential = lm.with_method("sequential", ordering="lexical")
    expected = {True: lm.generate(prompt, **LENGTH).logprobs, False: sequential.generate(prompt, **LENGTH).logprobs}
    differ = max(abs(a - b) for a, b in zip(expected[True], expected[False], strict=True))
    assert differ > 10 * ROUNDING, "the two methods have to be told apart"
    for kind in (arranged_first, not arranged_first) * 2:
        (answer,) = ask(llm, arranged if kind else plain(arranged))
        assert distance(answer, expected[kind]) < ROUNDING
        if evicted:  # fill all blocks with others
            ask(llm, *(prefill(worker, lm, prompt_of(lm, seed=210 + each, count=20)) for each in range(8)))


def test_requests_of_both_kinds_in_one_step_do_not_meet(llm: Any, lm: InvariantModel, worker: PrefillWorker) -> None:
    prompt = prompt_of(lm, seed=220)
    arranged = prefill(worker, lm, prompt)
    sequential = lm.with_method("sequential", ordering="lexical")
    expected = [lm.generate(prompt, **LENGTH).logprobs, sequential.generate(prompt, **LENGTH).logprobs]
    answers = ask(llm, arranged, plain(arranged), arranged, plain(arranged))
    for index, answer in enumerate(answers):
        assert distance(answer, expected[index % 2]) < ROUNDING


def test_a_set_and_the_same_set_with_one_more_segment_behind_do_not_meet(
    llm: Any, lm: InvariantModel, worker: PrefillWorker
) -> None:
    """Their tokens begin alike, but in RoToR the first segments attend to those behind them, too."""
    given = lm.with_method("rotor", ordering="given")
    prefix, suffix = [5, 6, 7], [8, 9]
    segments = [[20 + each] * 40 for each in range(4)]
    for count in (3, 4, 3):
        prompt = Prompt(prefix=prefix, segments=segments[:count], suffix=suffix)
        (answer,) = ask(llm, prefill(worker, given, prompt))
        assert distance(answer, given.generate(prompt, **LENGTH).logprobs) < ROUNDING


def test_the_same_tokens_in_other_segments_do_not_meet(llm: Any, lm: InvariantModel, worker: PrefillWorker) -> None:
    given = lm.with_method("rotor", ordering="given")
    tokens = list(range(30, 130))
    for cut in (20, 64, 20):
        prompt = Prompt(prefix=[5, 6, 7], segments=[tokens[:cut], tokens[cut:]], suffix=[8, 9])
        (answer,) = ask(llm, prefill(worker, given, prompt))
        assert distance(answer, given.generate(prompt, **LENGTH).logprobs) < ROUNDING


def test_methods_and_orderings_do_not_meet(llm: Any, lm: InvariantModel, worker: PrefillWorker) -> None:
    prompt = prompt_of(lm, seed=230)
    for method in ("isolated", "rotor", "isolated", "set-based", "rotor"):
        chosen = lm.with_method(method, ordering="lexical")
        (answer,) = ask(llm, prefill(worker, chosen, prompt))
        assert distance(answer, chosen.generate(prompt, **LENGTH).logprobs) < ROUNDING


@pytest.mark.parametrize(
    "mistake", ["no salt", "another salt", "salt of another set", "set of another prompt", "no set"]
)
def test_a_request_whose_set_salt_and_tokens_do_not_belong_together_fails_and_harms_nobody(
    mistake: str, llm: Any, lm: InvariantModel, worker: PrefillWorker
) -> None:
    good, other = (prefill(worker, lm, prompt_of(lm, seed)) for seed in (240, 241))
    bad = {
        "no salt": replace(good, cache_salt=""),
        "another salt": replace(good, cache_salt="mine"),
        "salt of another set": replace(good, cache_salt=other.cache_salt),
        "set of another prompt": replace(other, token_ids=good.token_ids),
        "no set": replace(good, kv_transfer_params=None),
    }[mistake]
    expected = [lm.generate(prompt_of(lm, seed), **LENGTH).logprobs for seed in (240, 241)]
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = ask(llm, good, bad, other)
        assert failed.failed
        assert not failed.token_ids
        assert distance(first, expected[0]) < ROUNDING
        assert distance(second, expected[1]) < ROUNDING


@pytest.mark.parametrize(
    "parameters",
    [
        {"invariant_rag": "rotor"},
        {"invariant_rag": {}},
        {"invariant_rag": {"method": "rotor", "ordering": "lexical", "tenant": "", "tokens": "9", "contents": ""}},
        {"invariant_rag": {"method": "rotor", "ordering": "lexical", "tenant": "", "tokens": 10**9, "contents": ""}},
        {
            "invariant_rag": {
                "method": "rotor",
                "ordering": "lexical",
                "tenant": "",
                "tokens": -1,
                "contents": "../../x",
            }
        },
    ],
)
def test_malformed_parameters_fail_their_request(
    parameters: dict[str, Any], llm: Any, lm: InvariantModel, worker: PrefillWorker
) -> None:
    prompt = prompt_of(lm, seed=242)
    good = prefill(worker, lm, prompt)
    failed, answer = ask(llm, replace(good, kv_transfer_params=parameters), good)
    assert failed.failed
    assert distance(answer, lm.generate(prompt, **LENGTH).logprobs) < ROUNDING


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_what_makes_vllm_compute_the_prompt_again_fails(
    fields: dict[str, Any], llm: Any, lm: InvariantModel, worker: PrefillWorker
) -> None:
    prompt = prompt_of(lm, seed=243)
    good = prefill(worker, lm, prompt)
    assert ask(llm, good, **fields)[0].failed
    (answer,) = ask(llm, good)
    assert distance(answer, lm.generate(prompt, **LENGTH).logprobs) < ROUNDING


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_lost_file_fails_its_request_and_the_backend_prefills_again(
    damage: str, llm: Any, lm: InvariantModel, worker: PrefillWorker, folder: Path
) -> None:
    seed = {"missing": 250, "truncated": 251, "garbage": 252}[damage]
    prompt, other = prompt_of(lm, seed), prompt_of(lm, 253)
    kept, before = prefill(worker, lm, other), entries(folder)
    lost = prefill(worker, lm, prompt)
    (path,) = entries(folder) - before
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\0" * len(content))
    for _ in range(2):  # nothing of the failure stays in the prefix cache
        failed, answer = ask(llm, lost, kept)
        assert failed.failed
        assert distance(answer, lm.generate(other, **LENGTH).logprobs) < ROUNDING
    backend = VLLMBackend(lm, llm=llm)
    answer = backend.generate(prompt, **LENGTH)
    assert answer.token_ids == lm.generate(prompt, **LENGTH).token_ids
    assert distance(ask(llm, lost)[0], answer.logprobs) < ROUNDING


def entries(folder: Path) -> set[Path]:
    """The files of entries in a folder."""
    return set(folder.glob("*.kv"))


def test_a_file_that_is_lost_between_prefill_and_load_is_written_again(
    llm: Any, lm: InvariantModel, folder: Path
) -> None:
    """Truncated behind the worker's back, with the file still there when it looks."""
    backend, prompt = VLLMBackend(lm, llm=llm), prompt_of(lm, 254)
    before = entries(folder)
    prefill(backend._connection.worker, lm, prompt)
    (path,) = entries(folder) - before
    path.write_bytes(path.read_bytes()[:-100])
    assert backend.generate(prompt, **LENGTH).token_ids == lm.generate(prompt, **LENGTH).token_ids
    path.unlink()
    llm.reset_prefix_cache()


def test_files_of_another_model_are_never_read(llm: Any, lm: InvariantModel, folder: Path) -> None:
    native = InvariantModel.from_pretrained("native", ordering="lexical")
    prompt = prompt_of(lm, 260)
    foreign = prefill(PrefillWorker(native, folder), native, prompt)
    assert ask(llm, foreign)[0].failed
    with pytest.raises(UnsupportedServer, match="serves"):
        VLLMBackend(native, llm=llm)


def test_another_dtype_is_refused(llm: Any, lm: InvariantModel, folder: Path) -> None:
    half = InvariantModel.from_pretrained(dtype=torch.bfloat16, ordering="lexical")
    with pytest.raises(UnsupportedServer, match="float32"):
        VLLMBackend(half, llm=llm)
    assert ask(llm, prefill(PrefillWorker(half, folder), half, prompt_of(lm, 261)))[0].failed


def test_tenants_share_nothing_and_cannot_name_each_others_sets(llm: Any, lm: InvariantModel, folder: Path) -> None:
    prompt = prompt_of(lm, 270)
    one, two = (PrefillWorker(lm, folder, tenant=name) for name in ("one", "two"))
    first, second = prefill(one, lm, prompt), prefill(two, lm, prompt)
    assert first.cached_tokens == second.cached_tokens == 0
    assert first.cache_salt != second.cache_salt
    expected = lm.generate(prompt, **LENGTH).logprobs
    for each in (first, second):
        (answer,) = ask(llm, each)
        assert distance(answer, expected) < ROUNDING
    assert ask(llm, replace(first, cache_salt=second.cache_salt))[0].failed


def test_tenants_share_no_segments_either(lm: InvariantModel, tmp_path: Path) -> None:
    chosen, segments = lm.with_method("set-based"), documents(8, 271)
    few, more = (lm.chat_prompt("How long is it?", each) for each in (segments[1:], segments))
    for tenant, prompt, reused in (
        ("one", few, False),
        ("two", more, False),
        ("two", few, True),
        ("three", more, False),
    ):
        worker = PrefillWorker(lm, tmp_path, tenant=tenant)
        assert prefill(worker, chosen, prompt).cached_tokens == 0
        assert (worker.cache.stats().hits > 0) == reused


def test_plain_prompts_of_two_tenants_have_other_salts(lm: InvariantModel, folder: Path) -> None:
    prompt = lm.chat_prompt("How long is the Lume?", [Segment("The Lume is 80 miles long.")])
    salts = {prefill(PrefillWorker(lm, folder, tenant=name), lm, prompt).cache_salt for name in ("", "one", "two")}
    assert len(salts) == 3


def test_a_full_folder_is_an_error_and_no_answer(lm: InvariantModel, tmp_path: Path) -> None:
    from vllm_invariant_rag import EntryUnusable

    folder = tmp_path / "gone"
    worker = PrefillWorker(lm, folder)
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with pytest.raises(EntryUnusable, match="folder"):
        prefill(worker, lm, prompt_of(lm, 280))
