"""Prefix caching: load or compute the keys and values of everything before the last text of a prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from invariant_rag.arrangement import Layout
from invariant_rag.errors import CacheWarning
from invariant_rag.generation.digest import digest_of, environment, foreign_code
from invariant_rag.generation.kv_cache import EntryLayout, layout_of
from invariant_rag.generation.kv_cache_files import Entry
from invariant_rag.generation.prepare import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.generation.choices import ResolvedChoices
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.prefill import Prefiller


def warn_of_foreign_code(model: PreTrainedModel) -> bool:
    """Return whether a model runs code that no key can cover, so that the cache is not used; a warning names it."""
    found = list(foreign_code(model))
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(CacheWarning(f"the key-value cache is not used: the model has {found[0]}{more}"), stacklevel=2)
    return bool(found)


def prompt_prefix(prepared: PreparedPrompt, choices: ResolvedChoices) -> PreparedPrompt:
    """Return the prompt without its suffix, the last text."""
    layout = prepared.arrangement.layout
    prefix = replace(layout, texts=(*layout.texts[:-1], 0))
    ids = prepared.input_ids[: prefix.length]
    return replace(prepared, input_ids=ids, arrangement=choices.method.arrange(prefix))


@dataclass(frozen=True)
class PrefixCache:
    """Loads prefixes for one prefiller from its cache; missing entries are computed and stored.

    With a method whose segments do not attend to each other, each segment is a separate entry; otherwise the whole
    prefix is one entry, and the missing ones of a batch share a forward pass.

    Attributes:
        prefiller: Computes missing entries.
        cache: The cache.
        identity: What determines keys and values besides tokens and arrangement; part of every key.
        token_layout: Shapes and dtypes of the keys and values of one token.
    """

    prefiller: Prefiller
    cache: KeyValueCache
    identity: tuple[object, ...]
    token_layout: EntryLayout

    @classmethod
    def of(cls, prefiller: Prefiller, cache: KeyValueCache) -> PrefixCache:
        """Return the prefixes of a prefiller in a cache."""
        choices, shared, model = prefiller.choices, prefiller.shared, prefiller.model
        computed_by = shared.weights_digest(model), environment(model, prefiller.device)
        if shared.entry_layout is None or shared.entry_layout[0] != computed_by:
            shared.entry_layout = computed_by, layout_of(_entry_of(prefiller.prefill_plain([0])))
        method = (type(choices.method).__qualname__, sorted(vars(choices.method).items()))
        # Without `deterministic`, the prefixes of a batch may share a forward pass, and so differ by rounding.
        identity = (*computed_by, choices.backend.name, method, choices.deterministic)
        return cls(prefiller, cache, identity, shared.entry_layout[1])

    def load(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[DynamicCache, int]]:
        """Return the keys and values of prefixes from `prompt_prefix`, and how many tokens of each were cached."""
        by_segment = self.prefiller.choices.method.context_free_segments
        alone = [by_segment and len(each.arrangement.layout.sets) == 1 for each in prefixes]
        wholes = iter(self._load_whole([each for each, is_alone in zip(prefixes, alone, strict=True) if not is_alone]))
        return [
            self._load_segments(each) if is_alone else next(wholes)
            for each, is_alone in zip(prefixes, alone, strict=True)
        ]

    def _load_whole(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[DynamicCache, int]]:
        """Load prefixes, each of which is one entry. Of several that are missing and equal, one is computed."""
        keys = [digest_of(self.identity, each.input_ids, each.arrangement) for each in prefixes]
        distinct = dict(zip(keys, prefixes, strict=True))
        entries = {key: self._find(key, len(each.input_ids)) for key, each in distinct.items()}
        missing = {key: distinct[key] for key, entry in entries.items() if entry is None}
        for key, computed in zip(missing, self.prefiller.prefill_uncached([*missing.values()]), strict=True):
            entries[key] = self._store(key, computed.cache)
        return [
            (self._as_cache([entries[key]]), 0 if missing.pop(key, None) else len(each.input_ids))
            for key, each in zip(keys, prefixes, strict=True)
        ]

    def _load_segments(self, prefix: PreparedPrompt) -> tuple[DynamicCache, int]:
        """Load the text before the set, and each segment as the plain model computes it directly after that text."""
        layout, ids = prefix.arrangement.layout, prefix.input_ids
        text = ids[: layout.texts[0]]
        entries: list[Any] = []
        cached_tokens = 0

        def add(key: str, tokens: int, compute: Callable[[], DynamicCache]) -> int:
            entry = self._find(key, tokens)
            entries.append(self._store(key, compute()) if entry is None else entry)
            return 0 if entry is None else tokens

        if text:
            arrangement = self.prefiller.choices.method.arrange(Layout((len(text),), ()))
            text_only = replace(prefix, input_ids=text, arrangement=arrangement)
            compute = lambda: self.prefiller.prefill_uncached([text_only])[0].cache  # noqa: E731
            cached_tokens += add(digest_of(self.identity, text), len(text), compute)
        for span in filter(len, layout.set_spans[0]):
            segment = ids[span.start : span.stop]
            compute = partial(self._prefill_segment, entries[:1] if text else [], len(text), segment)
            cached_tokens += add(digest_of(self.identity, text, segment), len(segment), compute)
        return self._as_cache(entries), cached_tokens

    def _prefill_segment(self, text: Sequence[Entry], start: int, segment: Sequence[int]) -> DynamicCache:
        """Return the keys and values of a segment, computed after the text before its set."""
        cache = self.prefiller.prefill_plain(segment, start, self._as_cache(text))
        segment_cache = DynamicCache()
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            segment_cache.update(layer.keys[:, :, start:], layer.values[:, :, start:], index)
        return segment_cache

    def _as_cache(self, entries: Sequence[Any]) -> DynamicCache:
        """Return consecutive entries as one cache."""
        cache, device = DynamicCache(), self.prefiller.device
        for index, layer in enumerate(zip(*entries, strict=True)):
            keys, values = (torch.cat([pair[side].to(device) for pair in layer], dim=1)[None] for side in (0, 1))
            cache.update(keys, values, index)
        return cache

    def _find(self, key: str, tokens: int) -> Entry | None:
        layout = [[((heads, tokens, size), dtype) for (heads, _, size), dtype in pair] for pair in self.token_layout]
        return self.cache.get(key, layout)

    def _store(self, key: str, computed: DynamicCache) -> Entry:
        entry = _entry_of(computed)
        self.cache.put(key, entry)
        return entry


def _entry_of(cache: DynamicCache) -> Entry:
    layers: list[Any] = cache.layers
    return [(layer.keys[0].contiguous(), layer.values[0].contiguous()) for layer in layers]
