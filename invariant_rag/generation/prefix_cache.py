"""Prefix caching: load or compute the keys and values of everything before the last text of a prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

from invariant_rag.arrangement import Layout
from invariant_rag.attention.dynamic_rope import has_dynamic_rope
from invariant_rag.errors import CacheWarning, UnsupportedCombination
from invariant_rag.generation.fingerprint import environment, foreign_code
from invariant_rag.generation.kv_cache import EntryLayout, concatenate, key_of, layout_of
from invariant_rag.generation.kv_cache_files import Entry
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
    if any(each.is_meta for each in model.parameters()):
        raise UnsupportedCombination(
            "expected a model whose weights are in memory, got one with offloaded weights: nothing can tell whether "
            "cached keys and values belong to them",
            hint="Load the model on one device (`device_map`), or use it without a cache.",
        )
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    if len(devices) > 1:
        raise UnsupportedCombination(
            f"expected a model on one device, got one on {', '.join(sorted(devices))}: cached keys and values of all "
            "layers are loaded to the device of the input ids",
            hint="Load the model on one device (`device_map`), or use it without a cache.",
        )


def warn_of_foreign_code(model: PreTrainedModel) -> bool:
    """Return whether a model runs code that no key can tell, so that the cache is not used; a warning says where."""
    found = list(foreign_code(model))
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(CacheWarning(f"the key-value cache is not used: the model has {found[0]}{more}"), stacklevel=2)
    return bool(found)


def prompt_prefix(prepared: PreparedPrompt, method: Method) -> PreparedPrompt:
    """Return the prompt without its suffix, the last text."""
    layout = prepared.arrangement.layout
    prefix = replace(layout, texts=(*layout.texts[:-1], 0))
    return replace(prepared, input_ids=prepared.input_ids[: prefix.length], arrangement=method.arrange(prefix))


def load_prefixes(
    prefiller: Prefiller, cache: KeyValueCache, prefixes: Sequence[PreparedPrompt], *, owner: str = ""
) -> list[tuple[DynamicCache, int]]:
    """Return the keys and values of prompts' prefixes, and how many tokens of each were cached.

    Missing entries are computed and stored. With a method whose segments do not see each other, each segment is a
    separate entry; otherwise the whole prefix is one entry, and the missing ones of a batch are read together.

    Args:
        prefiller: Computes missing entries.
        cache: The cache.
        prefixes: From `prompt_prefix`.
        owner: Whose entries these are, where several owners share a namespace. It is part of every key.
    """
    return _PrefixLoader(prefiller, cache, owner).load(prefixes)


class _PrefixLoader:
    """Loads prefixes for one prefiller from one cache. Its identity is part of every key."""

    def __init__(self, prefiller: Prefiller, cache: KeyValueCache, owner: str) -> None:
        self._prefiller, self._cache = prefiller, cache
        choices = prefiller.choices
        method = (type(choices.method).__qualname__, sorted(vars(choices.method).items()))
        attention = (choices.backend.name, *method, choices.deterministic)  # else batches may be read together
        model = prefiller.model
        self._identity = (prefiller.shared.fingerprint(model), environment(model, prefiller.device), attention, owner)
        known, computes_with = prefiller.shared.entry_layout, self._identity[:2]
        if known is None or known[0] != computes_with:
            known = prefiller.shared.entry_layout = computes_with, self._layout_of_a_token()
        self._layout = known[1]

    def _layout_of_a_token(self) -> EntryLayout:
        cache = DynamicCache()
        self._prefiller.forward_plain([0], 0, cache)
        return layout_of(_entry_of(cache))

    def load(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[DynamicCache, int]]:
        wholes = iter(self._whole([each for each in prefixes if not self._has_segment_entries(each)]))
        found = [self._segments(each) if self._has_segment_entries(each) else next(wholes) for each in prefixes]
        return [(self._as_cache(entries), cached_tokens) for entries, cached_tokens in found]

    def _has_segment_entries(self, prefix: PreparedPrompt) -> bool:
        return self._prefiller.choices.method.context_free_segments and len(prefix.arrangement.layout.sets) == 1

    def _whole(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[list[Entry], int]]:
        """Load prefixes, each of which is one entry. Of several that are missing and equal, one is computed."""
        keys = [key_of(self._identity, each.input_ids, each.arrangement) for each in prefixes]
        distinct = dict(zip(keys, prefixes, strict=True))
        found = {key: self._find(key, len(each.input_ids)) for key, each in distinct.items()}
        entries = {key: entry for key, entry in found.items() if entry is not None}
        missing = {key: each for key, each in distinct.items() if key not in entries}
        computed = self._prefiller.prefill_uncached([*missing.values()])
        entries |= {key: self._store(key, each.cache) for key, each in zip(missing, computed, strict=True)}
        return [
            ([entries[key]], 0 if missing.pop(key, None) else len(each.input_ids))
            for key, each in zip(keys, prefixes, strict=True)
        ]

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
            entry, found = self._get(key, len(tokens), lambda: self._prefiller.prefill_uncached([text_only])[0].cache)
            entries, cached_tokens = [entry], len(tokens) if found else 0
        for span in spans:
            if not len(span):
                continue
            segment = prefix.input_ids[span.start : span.stop]
            key = key_of(self._identity, tokens, segment)
            compute = partial(self._prefill_segment, entries[:1], tokens, segment)
            entry, found = self._get(key, len(segment), compute)
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

    def _get(self, key: str, tokens: int, compute: Callable[[], DynamicCache]) -> tuple[Entry, bool]:
        """Return an entry of so many tokens, and whether it was cached; a missing one is computed and stored."""
        entry = self._find(key, tokens)
        return (self._store(key, compute()), False) if entry is None else (entry, True)

    def _find(self, key: str, tokens: int) -> Entry | None:
        layout = [[((heads, tokens, size), dtype) for (heads, _, size), dtype in pair] for pair in self._layout]
        return self._cache.get(key, layout)

    def _store(self, key: str, computed: DynamicCache) -> Entry:
        entry = _entry_of(computed)
        self._cache.put(key, entry)
        return entry


def _entry_of(cache: DynamicCache) -> Entry:
    layers: list[Any] = cache.layers
    return [(layer.keys[0].contiguous(), layer.values[0].contiguous()) for layer in layers]
