"""Models that are loaded when they are first used: once per process, and not for what a configuration states."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoModelForCausalLM

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.errors import ModelNotFound, ToyModelWarning
from invariant_rag.generation.lazy import LazyModel
from invariant_rag.models.embedded import EMBEDDED


@pytest.fixture
def loads(monkeypatch):
    """Folders that transformers loaded weights from."""
    folders = []
    load = AutoModelForCausalLM.from_pretrained

    def noting(place, **options):
        folders.append(str(place))
        return load(place, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    return folders


@pytest.fixture
def folder(tmp_path, tiny_folder):
    """A folder that no other test loads from."""
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_nothing_is_loaded_before_the_first_use_and_then_once(folder, loads):
    lazy = LazyModel(folder)
    copies = [lazy, copy.copy(lazy), copy.deepcopy(lazy), LazyModel(str(folder)), pickle.loads(pickle.dumps(lazy))]
    assert not loads
    with ThreadPoolExecutor(5) as pool:
        assert len(set(pool.map(lambda each: id(each.lm().model), copies))) == 1
    assert loads == [str(folder)]


def test_a_model_is_shared_as_long_as_somebody_has_it(folder, tiny_folder, loads):
    held = LazyModel(folder).lm(method="pine")
    LazyModel(tiny_folder).lm()
    assert LazyModel(folder).lm().model is held.model
    del held
    LazyModel(folder).lm()  # the one that was used last
    assert loads == [str(folder), str(tiny_folder)]
    LazyModel(tiny_folder).lm()
    LazyModel(folder).lm()
    assert loads == [str(folder), str(tiny_folder), str(tiny_folder), str(folder)]


def test_other_options_and_a_folder_that_was_written_again_load_other_weights(folder):
    plain, half = LazyModel(folder).lm(), LazyModel(folder, {"dtype": "bfloat16"}).lm()
    assert plain.model is not half.model
    assert str(half.model.dtype) == "torch.bfloat16"
    os.utime(folder / "config.json", (0, 2**33))
    assert LazyModel(folder).lm().model is not plain.model


def test_the_same_choices_are_the_same_object(folder):
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
    with pytest.raises(ModelNotFound, match="nowhere"):
        LazyModel(tmp_path / "nowhere").context_window()


def test_a_pickle_of_a_name_has_neither_weights_nor_a_cache(folder):
    lazy = LazyModel(folder, {"dtype": "float32"}, cache=KeyValueCache())
    assert lazy.lm().cache is copy.deepcopy(lazy).lm(method="pine").cache is not None
    pickled = pickle.dumps(lazy)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).lm().cache is None


def test_a_model_in_memory_is_used_as_it_is(chat_llama):
    lm = InvariantModel(chat_llama, method="pine", cache=KeyValueCache())
    lazy = LazyModel(lm)
    assert lazy.in_memory
    assert lazy.lm() is lm
    assert lazy.context_window() == lm.context_window
    assert lazy.lm(ordering="frequency").cache is lm.cache
    assert LazyModel(lm, cache=KeyValueCache()).lm().cache is not lm.cache
    assert repr(pickle.loads(pickle.dumps(lazy)).lm()) == repr(lm)


def test_without_a_name_it_says_once_that_a_toy_answers():
    lazy = LazyModel()
    with pytest.warns(ToyModelWarning, match="Name a model"):
        assert lazy.lm().name == str(EMBEDDED["generator"])
    lazy.lm()
    LazyModel(EMBEDDED["generator"]).lm()  # who names it knows it
    assert LazyModel("native").lm().name == str(EMBEDDED["native"])
