"""Which model the files of a checkpoint hold: the fact that the prefill worker and vLLM can both know.

vLLM merges and shards weights as it loads them, so their values in memory cannot be compared with those of
transformers. Both load the same files, though.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from invariant_rag.errors import UnsupportedModel
from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 16  # pieces of each tensor that the fingerprint reads
_SAMPLE_BYTES = 64


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder with the files of a model that was loaded on this machine.

    Raises:
        UnsupportedModel: There is none, or it holds no safetensors.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (OSError, ValueError) as error:
            raise UnsupportedModel(
                f"expected a folder, or a hub id whose files are on this machine, got {name!r}: {error}",
                hint="Save the model with save_pretrained, and serve that folder.",
            ) from error
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"expected *.safetensors in {folder}, found none",
            hint="Save the model with save_pretrained, and serve that folder.",
        )
    return folder


def fingerprint(folder: Path) -> str:
    """Return a digest of a model's configuration, and of names, shapes, dtypes and samples of all its tensors.

    Copies of the files have the same fingerprint. A few kilobytes of each tensor are read.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(json.dumps(json.loads(config.read_text(encoding="utf-8")), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
            digest.update(header)
            tensors = {name: each for name, each in json.loads(header).items() if name != "__metadata__"}
            for _, tensor in sorted(tensors.items()):
                start, stop = tensor["data_offsets"]
                for offset in _spread(start, stop):
                    file.seek(8 + length + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, stop - offset)))
    return digest.hexdigest()


def _spread(start: int, stop: int) -> Iterator[int]:
    """Yield offsets of the pieces to read, evenly spread."""
    last = max(start, stop - _SAMPLE_BYTES)
    yield from sorted({start + (last - start) * index // (_SAMPLES - 1) for index in range(_SAMPLES)})


def check_weights(model: PreTrainedModel, folder: Path) -> None:
    """Check that a model's weights in memory are those of its files, by one row of each tensor that has their name.

    Raises:
        UnsupportedModel: They are not: the model was trained, merged or quantized after it was loaded, or has adapters.
    """
    adapters = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]  # as PEFT wraps layers
    weights = model.state_dict()
    changed = [f"an adapter at {name}" for name in adapters[:1]]
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                kept = weights.get(name)
                stored = file.get_slice(name)
                if kept is None or kept.is_meta or list(kept.shape) != stored.get_shape() or not kept.numel():
                    continue  # loaded under another name or in another shape
                middle = kept.shape[0] // 2 if kept.ndim else 0
                row = stored[middle : middle + 1] if kept.ndim else file.get_tensor(name)
                ours = kept[middle : middle + 1] if kept.ndim else kept
                if not torch.equal(row.to(kept.dtype), ours.cpu()):
                    changed.append(name)
    if changed:
        raise UnsupportedModel(
            f"expected the weights of {folder}, which vLLM serves, got others in memory: {', '.join(changed[:3])}",
            hint="Save the model as it is with save_pretrained, and serve that folder with vLLM.",
        )
