"""Prefix caching: load or compute the keys and values of everything before the last text of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

from invariant_rag.arrangement import Layout
from invariant_rag.attention.rope import has_dynamic_rope
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.kv_cache import Entry, concatenate, key_of
from invariant_rag.generation.prepare import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.prefill import Prefiller
    from invariant_rag.interventions import Intervention
    from invariant_rag.methods import Method


def check_cacheable(model: PreTrainedModel, intervention: Intervention | None) -> None:
    """Check that the keys and values of a prefix can be reused by other prompts.

    Raises:
        UnsupportedCombination: An intervention changes them, the model's rotary frequencies depend on the length of the
            prompt, or the model is spread over several devices.
    """
    if intervention is not None:
        raise UnsupportedCombination(
            f"expected a model without an intervention for a key-value cache, got {intervention.name!r}",
            hint="Use with_cache(None), or a model without an intervention.",
        )
    if has_dynamic_rope(model):
        raise UnsupportedCombination(
            "expected rotary frequencies that do not depend on the prompt length; this model's grow with it, so keys "
            "cannot be reused by another prompt",
            hint="Use this model without a cache.",
        )
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    if len(devices) > 1:
        raise UnsupportedCombination(
            f"expected a model on one device, got one on {', '.join(sorted(devices))}: cached keys and values of all "
            "layers are loaded to the device of the input ids",
            hint="Load the model on one device (`device_map`), or use it without a cache.",
        )


def prompt_prefix(prepared: PreparedPrompt, method: Method) -> PreparedPrompt:
    """Return the prompt without its suffix, the last text."""
    layout = prepared.arrangement.layout
    prefix = Layout((*layout.texts[:-1], 0), layout.sets)
    return replace(prepared, input_ids=prepared.input_ids[: prefix.length], arrangement=method.arrange(prefix))


def load_prefix(prefiller: Prefiller, cache: KeyValueCache, prefix: PreparedPrompt) -> tuple[DynamicCache, int]:
    """Return the keys and values of a prompt's prefix, and the number of tokens that were cached.

    Missing entries are computed and stored. With a method whose segments do not see each other, each segment is a
    separate entry; otherwise the whole prefix is one entry.

    Args:
        prefiller: Computes missing entries.
        cache: The cache.
        prefix: From `prompt_prefix`.
    """
    return _PrefixLoader(prefiller, cache).load(prefix)


class _PrefixLoader:
    """Loads prefixes for one prefiller from one cache. Its identity is part of every key."""

    def __init__(self, prefiller: Prefiller, cache: KeyValueCache) -> None:
        self._prefiller, self._cache = prefiller, cache
        choices = prefiller.choices
        attention = (choices.backend.name, type(choices.method).__qualname__, sorted(vars(choices.method).items()))
        self._identity = (prefiller.shared.fingerprint(prefiller.model), attention)

    def load(self, prefix: PreparedPrompt) -> tuple[DynamicCache, int]:
        if self._prefiller.choices.method.context_free_segments and len(prefix.arrangement.layout.sets) == 1:
            entries, cached_tokens = self._segments(prefix)
        else:
            key = key_of(self._identity, prefix.input_ids, prefix.arrangement)
            entry, found = self._get(key, lambda: self._prefiller.prefill_uncached(prefix))
            entries, cached_tokens = [entry], len(prefix.input_ids) if found else 0
        return self._as_cache(entries), cached_tokens

    def _segments(self, prefix: PreparedPrompt) -> tuple[list[Entry], int]:
        """Load the text before the set, and each segment as the plain model computes it directly after that text."""
        (text, *_), spans = prefix.arrangement.layout.text_spans, prefix.arrangement.layout.set_spans[0]
        tokens = prefix.input_ids[: len(text)]
        entries: list[Entry] = []
        cached_tokens = 0
        if tokens:
            method = self._prefiller.choices.method
            text_only = replace(prefix, input_ids=tokens, arrangement=method.arrange(Layout((len(tokens),), ())))
            key = key_of(self._identity, tokens)
            entry, found = self._get(key, lambda: self._prefiller.prefill_uncached(text_only))
            entries, cached_tokens = [entry], len(tokens) if found else 0
        for span in spans:
            if not len(span):
                continue
            segment = prefix.input_ids[span.start : span.stop]
            key = key_of(self._identity, tokens, segment)
            entry, found = self._get(key, partial(self._prefill_segment, entries[:1], tokens, segment))
            entries.append(entry)
            cached_tokens += len(segment) if found else 0
        return entries, cached_tokens

    def _prefill_segment(self, text: Sequence[Entry], tokens: Sequence[int], segment: Sequence[int]) -> DynamicCache:
        """Return the keys and values of a segment, computed after the text before its set."""
        cache = self._as_cache(text if tokens else [])
        start = len(tokens)
        self._prefiller.forward_plain(segment, start, cache)
        segment_cache = DynamicCache()
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            segment_cache.update(layer.keys[:, :, start:], layer.values[:, :, start:], index)
        return segment_cache

    def _as_cache(self, entries: Sequence[Entry]) -> DynamicCache:
        """Return consecutive entries as one cache."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(concatenate(entries, self._prefiller.device)):
            cache.update(keys[None], values[None], layer)
        return cache

    def _get(self, key: str, compute: Callable[[], DynamicCache]) -> tuple[Entry, bool]:
        """Return an entry, and whether it was cached; a missing one is computed and stored."""
        entry = self._cache.get(key)
        if entry is not None:
            return entry, True
        layers: list[Any] = compute().layers
        entry = [(layer.keys[0].contiguous(), layer.values[0].contiguous()) for layer in layers]
        self._cache.put(key, entry)
        return entry, False
