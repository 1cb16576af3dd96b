"""Identity: equal for models that answer alike, and another one as soon as anything can change an answer."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, KeyValueCache, MicroBatcher
from invariant_rag.generation.identity import describe_choice, describe_data, identity
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import APE, METHODS
from invariant_rag.orderings import Lexical, MonoT5
from invariant_rag.testing import tiny_model


@pytest.fixture
def lm(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    """A model that a test may change."""
    return InvariantModel(copy.deepcopy(chat_llama), copy.deepcopy(tokenizer))


CHOICES: dict[str, dict[str, Any]] = {
    **{f"method {name}": {"method": name, "ordering": "lexical"} for name in METHODS if name != "rotor"},
    "a method's parameter": {"method": APE(temperature=0.5)},
    "another parameter of it": {"method": APE(scale=0.5)},
    "ordering": {"ordering": "frequency"},
    "an ordering with a model": {"ordering": "monot5"},
    "an ordering's parameter": {"ordering": MonoT5(max_length=9)},
    "backend": {"backend": "reference"},
    "max_segment_tokens": {"max_segment_tokens": 9},
    "another max_segment_tokens": {"max_segment_tokens": 10},
    "overflow": {"overflow": "trim_segments"},
    "an intervention": {"method": "sequential", "ordering": "lexical", "intervention": MsPoE(first_layer=0)},
    "an intervention's parameter": {
        "method": "sequential", "ordering": "lexical", "intervention": MsPoE(first_layer=1)
    },
}  # fmt: skip


def test_every_choice_that_changes_an_answer_changes_the_identity(model: InvariantModel) -> None:
    found = {"plain": identity(model)} | {name: identity(model.with_method(**each)) for name, each in CHOICES.items()}
    for name, options in {"alpha": {"alpha": 0.3}, "order": {"plain_order": "canonical"}, "routing": {}}.items():
        found[name] = identity(model.with_routing(**options))
    assert len(set(found.values())) == len(found)


def change_a_weight(lm: InvariantModel) -> None:
    with torch.no_grad():
        lm.model.lm_head.weight[-1, -1] += 1.0


def change_a_weight_behind_autograd(lm: InvariantModel) -> None:
    lm.model.lm_head.weight.data.mul_(1.5)


def change_the_template(lm: InvariantModel) -> None:
    lm.tokenizer.chat_template += " "


def add_a_token(lm: InvariantModel) -> None:
    lm.tokenizer.add_tokens(["Ostra"])


def name_another_end(lm: InvariantModel) -> None:
    lm.tokenizer.eos_token = "a"


def change_the_generation_config(lm: InvariantModel) -> None:
    lm.model.generation_config.repetition_penalty = 1.5


def change_the_config(lm: InvariantModel) -> None:
    lm.model.config.use_cache = not lm.model.config.use_cache


def change_the_dtype(lm: InvariantModel) -> None:
    lm.model.to(torch.bfloat16)


CHANGES = [
    change_a_weight, change_a_weight_behind_autograd, change_the_template, add_a_token, name_another_end,
    change_the_generation_config, change_the_config, change_the_dtype,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_place_changes_the_identity(lm: InvariantModel, change: Any) -> None:
    other = lm.with_method("pine")
    before = identity(lm), identity(other)
    assert (identity(lm), identity(other)) == before
    change(lm)
    after = identity(lm), identity(other)
    assert len({*before, *after}) == 4


def test_models_that_answer_alike_share_one(lm: InvariantModel) -> None:
    before = identity(lm)
    for alike in (
        lm.with_method("rotor"),
        lm.with_cache(KeyValueCache()),
        pickle.loads(pickle.dumps(lm)),
        lm.with_method("pine").with_method("rotor", ordering=Lexical()),
    ):
        assert identity(alike) == before
    lm.generate(lm.chat_prompt("Where?", ["Here."]), max_new_tokens=1)
    assert identity(lm) == before, "a call leaves no trace in it"


@pytest.mark.slow
def test_it_is_the_same_in_another_process(tiny_folder: Path) -> None:
    code = (
        "import sys\n"
        "from invariant_rag import InvariantModel\n"
        "from invariant_rag.generation.identity import identity\n"
        "print(identity(InvariantModel.from_pretrained(sys.argv[1], method='ape', ordering='monot5')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tiny_folder], capture_output=True, text=True, check=True)
    here = InvariantModel.from_pretrained(tiny_folder, method="ape", ordering="monot5")
    here.tokenizer(["a", "bb"], padding=True, truncation=True, max_length=1)
    assert done.stdout.strip() == identity(here)


def test_a_model_without_a_tokenizer_has_one_too(chat_llama: PreTrainedModel, model: InvariantModel) -> None:
    assert identity(InvariantModel(chat_llama)) == identity(InvariantModel(chat_llama)) != identity(model)


def test_a_model_with_offloaded_weights_has_an_identity_of_its_own(lm: InvariantModel) -> None:
    other = copy.deepcopy(lm)
    assert identity(lm) == identity(other)
    for each in (lm, other):
        each.model.lm_head.to("meta")
    assert identity(lm) == identity(lm.with_method("rotor")) != identity(lm.with_method("pine"))
    assert identity(lm) != identity(other) == identity(other)


def test_classes_of_the_same_name_are_told_apart() -> None:
    def ordering() -> Lexical:
        class Mine(Lexical):
            pass

        return Mine()

    one = ordering()
    assert describe_choice(one) == describe_choice(one) != describe_choice(ordering())


def test_objects_are_told_by_what_they_are_and_never_by_an_address_that_is_used_again() -> None:
    assert len({describe_data([tiny_model("llama")]) for _ in range(3)}) == 3
    held = object.__new__(type("Held", (), {}))
    assert describe_data({"a": held}) == describe_data({"a": held})
    assert describe_data(len) == describe_data(len) != describe_data(sorted)
    assert describe_data(lambda: 1) != describe_data(lambda: 1)
    data = [1, True, "1", 1.0, None, (1,), [1], {1}, {1: 1}, b"1", Path("1"), torch.float32]
    assert len(set(map(describe_data, data))) == len(data)


def test_a_batch_holds_prompts_of_one_identity(model: InvariantModel) -> None:
    prompt = model.chat_prompt("Where?", ["The ferry leaves the harbour at noon.", "The mill grinds barley."])
    trimmed = [model.with_method(max_segment_tokens=size, overflow="trim_segments") for size in (5, 20)]
    lms, batcher, options = [model, *trimmed] * 8, MicroBatcher(), {"max_new_tokens": 6}
    random.Random(0).shuffle(lms)
    alone = [lm.generate(prompt, **options).text for lm in lms]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(len(lms)) as pool:
        with batcher._generate_lock:
            calls = [pool.submit(batcher.generate, lm, prompt, options) for lm in lms]
            while len(batcher._waiting) < len(lms):
                time.sleep(0.001)
        assert [call.result().text for call in calls] == alone
