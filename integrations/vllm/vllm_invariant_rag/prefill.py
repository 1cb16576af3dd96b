"""`PrefillWorker`: computes the keys and values of a prompt's sets, and writes them where vLLM's connector reads.

They are those of everything before the last text of a prompt, in canonical order, so one entry serves every question
about the same sets, in any order, by every vLLM that reads there. The last text and the answer are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from invariant_rag.attention.rope import Rotation
from invariant_rag.checks import check_number, check_text
from invariant_rag.errors import InvalidChoice, UnsupportedCombination, UnsupportedModel
from invariant_rag.generation.fingerprint import foreign_code
from invariant_rag.generation.identity import describe_choice, weights_digest
from invariant_rag.generation.kv_cache import KeyValueCache, key_of
from invariant_rag.generation.kv_cache_files import Entry
from invariant_rag.generation.prefix_cache import check_cacheable, load_prefixes, prompt_prefix
from invariant_rag.shown import shown

from vllm_invariant_rag.checkpoint import check_weights, checkpoint_folder, fingerprint
from vllm_invariant_rag.errors import EntryUnusable
from vllm_invariant_rag.layout import key_copies, token_indices
from vllm_invariant_rag.parameters import PLAIN_SALT_PREFIX, SetParameters

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.prepare import PreparedPrompt


@dataclass(frozen=True)
class Prefilled:
    """A prompt as vLLM takes it.

    Attributes:
        token_ids: The prompt, for vLLM. Tokens whose keys count several times are in it several times.
        cache_salt: The salt of its requests.
        kv_transfer_params: The parameters of its requests; None for a prompt that is plain causal attention.
        cached_tokens: Tokens of the prompt that were not computed, because they were stored.
    """

    token_ids: tuple[int, ...]
    cache_salt: str
    kv_transfer_params: dict[str, Any] | None
    cached_tokens: int


class PrefillWorker:
    """Writes the keys and values of prompts to where vLLM's connector reads. Safe for threads.

    Args:
        lm: The model. vLLM serves the files that it was loaded from.
        folder: The folder: on a RAM disk such as `/dev/shm`, or on a disk that several machines share.
        redis_url: Or the address of a Redis server, as for `KeyValueCache`.
        tenant: Whose documents these are. Tenants share no keys and values, neither here nor in vLLM.
        max_bytes: Size of the cache of entries in memory.
        max_disk_bytes: Size of the folder. The least recently used entries are removed. It should hold the sets of all
            requests that run at the same time.

    Raises:
        InvalidChoice: There is neither a folder nor Redis, or both; the folder has no room at all; or the tenant is no
            text of UTF-8, in which requests are sent.
        UnsupportedCombination: The intervention or the model cannot be decoded by vLLM; the message says why.
        UnsupportedModel: The weights in memory are not those of the model's files.
    """

    def __init__(
        self,
        lm: InvariantModel,
        folder: str | Path | None = None,
        *,
        redis_url: str | None = None,
        tenant: str = "",
        max_bytes: int = 1 << 30,
        max_disk_bytes: int = 10 << 30,
    ) -> None:
        if folder is None and redis_url is None:
            raise InvalidChoice(
                "expected a folder or redis_url, where vLLM's connector reads, got neither",
                hint="It is what kv_connector_extra_config says.",
            )
        check_number("max_disk_bytes", max_disk_bytes, 1)  # vLLM reads what is there, and nothing else
        files = checkpoint_folder(lm.name)
        check_weights(lm.model, files)
        self.model = fingerprint(files)
        self.tenant = _check_tenant(tenant)
        self.cache = KeyValueCache(max_bytes, folder=folder, max_disk_bytes=max_disk_bytes, redis_url=redis_url)
        self._weights = weights_digest(lm)
        self._files = files

    def with_tenant(self, tenant: str) -> PrefillWorker:
        """Return a worker for another tenant, with the same folder and memory: each key in there is some tenant's."""
        other = copy(self)
        other.tenant = _check_tenant(tenant)
        return other

    def prefill(self, lm: InvariantModel, prepared: PreparedPrompt, *, anew: bool = False) -> Prefilled:
        """Write the keys and values of everything before the last text of a prompt, unless they are stored.

        Args:
            lm: The model, with the choices that the prompt was prepared with.
            prepared: The prompt, from `lm.prepare_to_generate`.
            anew: Write them also if something is stored: vLLM could not load it.

        Raises:
            EntryUnusable: They could not be written.
            UnsupportedCombination: The method or the model cannot be decoded by vLLM; the message says why.
            UnsupportedModel: They had to be computed, and the weights are not those of the model's files.
        """
        _check_model(lm)
        if prepared.arrangement.is_plain:
            salt = PLAIN_SALT_PREFIX + key_of("plain", self.model, self.tenant)
            return Prefilled(prepared.input_ids, salt, None, 0)
        copies = key_copies(lm.method, prepared.arrangement)
        if max(copies) != min(copies) and _has_sliding_window(lm):
            raise UnsupportedCombination(
                f"expected a model without a sliding window for {lm.method.name!r}, which lays keys into memory that "
                "the window would count",
                hint="Use rotor.",
            )
        indices = token_indices(copies)
        suffix = prepared.input_ids[len(copies) :]
        token_ids = (*(prepared.input_ids[index] for index in indices), *suffix)
        prefix = prompt_prefix(prepared, lm.method)
        parameters = SetParameters(
            method=lm.method.name,
            ordering=lm.ordering.name,
            tenant=self.tenant,
            tokens=len(indices),
            contents=key_of(self._weights, describe_choice(lm.method), lm.backend.name, prefix.arrangement),
        )
        key = parameters.key(self.model, token_ids)
        shift = len(indices) - int(prepared.positions[len(copies)])
        with lm.prefiller.exclusive():  # whoever waits for the lock finds what the one before it wrote
            if anew:
                self.cache.discard(key)
            found = self._write(key, lambda: self._entry(lm, prefix, indices, shift))
        return Prefilled(token_ids, parameters.salt(self.model, key), parameters.as_json(), len(copies) if found else 0)

    def _write(self, key: str, compute: Callable[[], Entry]) -> bool:
        """Have an entry stored; return whether it was known."""
        if self.cache.is_stored(key):
            return True
        known = self.cache.get(key)
        entry = compute() if known is None else known
        self.cache.put(key, entry)
        if not self.cache.is_stored(key):
            size = sum(each.nbytes for layer in entry for each in layer)
            raise EntryUnusable(
                f"expected to write {size} bytes of keys and values for vLLM, but the folder or Redis took none",
                hint="Is max_disk_bytes larger than that, and the disk not full? Has Redis room, by its maxmemory, and "
                "the password? The log says what failed.",
            )
        return known is not None

    def _entry(self, lm: InvariantModel, prefix: PreparedPrompt, indices: Sequence[int], shift: int) -> Entry:
        """Return the keys and values of a prefix as they lie in vLLM: `[H_kv, len(indices), D]` for each layer.

        Raises:
            UnsupportedModel: The weights are not those that were compared with the files. Only here do they count: what
                is stored was computed with those of the files.
        """
        self._check_same_weights(lm)
        prefiller = lm.with_cache(self.cache).prefiller
        if lm.method.context_free_segments:  # segments that were computed for another set are not computed again
            layers: list[Any] = load_prefixes(prefiller, self.cache, [prefix], owner=self.tenant)[0][0].layers
        else:
            layers = prefiller.prefill_uncached([prefix])[0].cache.layers
        chosen = torch.tensor(indices, device=layers[0].keys.device)
        return [
            (rotation.rotate(layer.keys[0, :, chosen], shift).contiguous(), layer.values[0, :, chosen].contiguous())
            for rotation, layer in zip(prefiller.rotations, layers, strict=True)
        ]

    def _check_same_weights(self, lm: InvariantModel) -> None:
        """Raise if the weights are not those that were compared with the files."""
        if weights_digest(lm) != self._weights:
            check_weights(lm.model, self._files)
            raise UnsupportedModel(
                f"expected the weights with which the worker was made, those of {self._files}, got others",
                hint="Make another PrefillWorker for this model.",
            )


def _check_tenant(tenant: str) -> str:
    try:
        check_text("tenant", tenant).encode()
    except UnicodeEncodeError as error:
        raise InvalidChoice(f"tenant: expected a text that UTF-8 can hold, got {shown(tenant)}") from error
    return tenant


def _check_model(lm: InvariantModel) -> None:
    """Raise for what vLLM does not run when it decodes, or makes keys depend on what comes after them."""
    check_cacheable(lm.model, lm.method, lm.intervention)
    foreign = next(iter(foreign_code(lm.model)), None)
    if foreign is not None:
        raise UnsupportedCombination(
            f"expected a model with the code of its classes alone, got one with {foreign}, which vLLM does not run",
            hint="Remove it, or run this model without vLLM.",
        )
    if not all(isinstance(each, Rotation) for each in lm.prefiller.rotations):
        raise UnsupportedCombination(
            "expected rotary position embeddings, by which keys can be rotated to where vLLM expects them, got another "
            "position encoding",
            hint="Run this model without vLLM.",
        )


def _has_sliding_window(lm: InvariantModel) -> bool:
    return bool(getattr(lm.model.config.get_text_config(decoder=True), "sliding_window", None))
