"""Reading the part of a prompt that a cache may hold: everything before its last text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from invariant_rag.arrangement import Layout
from invariant_rag.attention.rope import grows
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.kv_cache import Entry, KeyValueCache, joined, key_of
from invariant_rag.generation.prepare import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.methods import Method

Read = Callable[[PreparedPrompt], DynamicCache]
"""Runs the model over a whole prompt, as it is arranged, and returns its keys and values."""


def head_of(prepared: PreparedPrompt, method: Method) -> PreparedPrompt:
    """Return the prompt without its last text."""
    layout = prepared.arrangement.layout
    without = Layout((*layout.texts[:-1], 0), layout.sets)
    ids = prepared.input_ids[: without.length]
    return replace(prepared, input_ids=ids, arrangement=method.arrange(without))


def last_logits(model: PreTrainedModel, count: int) -> dict[str, int]:
    """Return the keyword that keeps a model from computing logits of any but the last `count` tokens, if it has one."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if known else {}


class PrefixCache:
    """One model's and one method's share of a cache.

    Args:
        cache: The cache.
        model: The model.
        method: The method.
        fingerprint: Returns the digest of the model as it is now.
        backend: Name of what computes the attention.

    Raises:
        UnsupportedCombination: The model's rotary frequencies depend on the length of the whole prompt, or it lies on
            several devices.
    """

    def __init__(
        self, cache: KeyValueCache, model: PreTrainedModel, method: Method, fingerprint: Callable[[], str], backend: str
    ) -> None:
        if grows(model):
            raise UnsupportedCombination(
                "expected rotary frequencies that do not depend on the length of the prompt, and this model's grow "
                "with it: what was read in one prompt is not what would be read in another",
                hint="Leave the cache away for this model.",
            )
        places = set(map(str, getattr(model, "hf_device_map", {}).values()))
        if len(places) > 1:
            raise UnsupportedCombination(
                f"expected a model on one device, got one on {', '.join(sorted(places))}: keys and values of all "
                "layers are put where its input goes",
                hint="Load it on one device (`device_map`), or leave the cache away.",
            )
        self._cache, self._model, self._method = cache, model, method
        self._fingerprint = fingerprint
        self._reading = (backend, type(method).__qualname__, sorted(vars(method).items()))

    def read(self, head: PreparedPrompt, read: Read, device: torch.device) -> tuple[DynamicCache, int]:
        """Return keys and values of a head, and how many of its tokens the cache had.

        Args:
            head: From `head_of`.
            read: What runs the model where the cache has nothing.
            device: Where the model takes its input.
        """
        identity = (self._fingerprint(), self._reading)
        if self._method.reads_alone and len(head.arrangement.layout.sets) == 1:
            entries, served = self._segments(head, read, identity, device)
        else:
            key = key_of(identity, head.input_ids, head.arrangement)
            entry, found = self._get(key, lambda: read(head))
            entries, served = [entry], len(head.input_ids) if found else 0
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(joined(entries, device)):
            cache.update(keys[None], values[None], layer)
        return cache, served

    def _segments(
        self, head: PreparedPrompt, read: Read, identity: object, device: torch.device
    ) -> tuple[list[Entry], int]:
        """The prefix, and each segment read alone behind it: as the plain model reads the two."""
        (text, *_), spans = head.arrangement.layout.text_spans, head.arrangement.layout.set_spans[0]
        prefix = head.input_ids[: len(text)]
        entries: list[Entry] = []
        served = 0
        if prefix:
            alone = replace(head, input_ids=prefix, arrangement=self._method.arrange(Layout((len(prefix),), ())))
            entry, found = self._get(key_of(identity, prefix), lambda: read(alone))
            entries, served = [entry], len(prefix) if found else 0
        for span in spans:
            if not len(span):
                continue
            segment = head.input_ids[span.start : span.stop]
            key = key_of(identity, prefix, segment)
            entry, found = self._get(key, partial(self._behind, entries[:1], prefix, segment, device))
            entries.append(entry)
            served += len(segment) if found else 0
        return entries, served

    def _behind(
        self, prefix: Sequence[Entry], tokens: Sequence[int], segment: Sequence[int], device: torch.device
    ) -> DynamicCache:
        """Read a segment behind its prefix, and return its own keys and values."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(joined(prefix, device) if prefix and tokens else []):
            cache.update(keys[None], values[None], layer)
        start = len(tokens)
        positions = torch.arange(start, start + len(segment), device=device)[None]
        ids = torch.tensor([segment], device=device)
        self._model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **last_logits(self._model, 1),
        )
        own = DynamicCache()
        read: list[Any] = cache.layers
        for index, layer in enumerate(read):
            own.update(layer.keys[:, :, start:], layer.values[:, :, start:], index)
        return own

    def _get(self, key: str, read: Callable[[], DynamicCache]) -> tuple[Entry, bool]:
        entry = self._cache.get(key)
        if entry is not None:
            return entry, True
        layers: list[Any] = read().layers
        entry = [(layer.keys[0].contiguous(), layer.values[0].contiguous()) for layer in layers]
        self._cache.put(key, entry)
        return entry, False
