"""Prefilling: the model's own forward pass over prompts, with arranged attention, after what a cache holds of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.arrangement import natural_positions
from invariant_rag.attention.dynamic_rope import private_dynamic_rope
from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention, own_attention
from invariant_rag.attention.per_model import dynamic_rope_modules, forward_parameters, input_device, once_per_model
from invariant_rag.attention.positions import Alibi, PositionEncoding
from invariant_rag.attention.probe import probe
from invariant_rag.cancellation import check_cancelled
from invariant_rag.errors import CacheWarning, UnsupportedCombination
from invariant_rag.generation.digest import digest_of, environment, foreign_code, weights_digest
from invariant_rag.generation.kv_cache import Entry, EntryLayout, KeyValueCache, layout_of
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.interventions import PromptBatch
from invariant_rag.locks import ForkSafeLock

if TYPE_CHECKING:
    from invariant_rag.generation.choices import ResolvedChoices
    from invariant_rag.segments import TokenIds

RUNS_ELSEWHERE = "invariant_rag_runs_elsewhere"  # of models without weights: configuration and tokenizer are enough
after_prefill: ContextVar[Callable[[], object] | None] = ContextVar("after_prefill", default=None)
"""What a batch calls after each forward pass of its prefill, outside of arranged attention: others may run there."""

_holds: ContextVar[frozenset[object]] = ContextVar("holds_of_model_locks", default=frozenset())


class ModelLock(ForkSafeLock):  # type: ignore[misc] # of C
    """A re-entrant lock that is refused to a thread for whose end the holder may be waiting.

    Such a thread was started by the holder, with a copy of its context as asyncio and LangChain do.
    """

    _hold: object | None = None  # of the outermost block that holds it

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; CancelledError once the result of this thread is abandoned; see `cancellable`."""
        if _holds.get() and not self._is_owned():  # type: ignore[attr-defined]
            self.check_new_thread()
        with self:
            check_cancelled()
            outer, self._hold = self._hold, self._hold or object()
            token = _holds.set(_holds.get() | {self._hold})
            try:
                yield
            finally:
                self._hold = outer
                _holds.reset(token)

    def check_new_thread(self) -> None:
        """Check that a new thread could get the lock while this one waits for it; else UnsupportedCombination."""
        if self._hold in _holds.get():
            raise UnsupportedCombination(
                "expected a call from outside of `lm.arranged`, logits processors, stopping criteria and streamers of "
                "the same model, got one from a thread that they wait for, so that both would wait for ever",
                hint="Call generate instead of stream, in the same thread; or stream when they have ended.",
            )


@dataclass
class SharedState:
    """State of a model that belongs to no single wrapper."""

    rotations: list[PositionEncoding]  # of each layer
    has_dynamic_rope: bool = False  # whether rotary frequencies depend on the length of the prompt
    lock: ModelLock = field(default_factory=ModelLock)  # held during every call of the model
    entry_layout: tuple[object, EntryLayout] | None = None  # of one token, with what it was computed with
    _digesting: ForkSafeLock = field(default_factory=ForkSafeLock)
    _begun: int = 0
    _digest: tuple[int, str] = (0, "")

    @cached_property
    def has_alibi(self) -> bool:
        """Whether a layer has ALiBi: then the model itself takes the index of a token for its position."""
        return any(isinstance(each, Alibi) for each in self.rotations)

    def weights_digest(self, model: PreTrainedModel) -> str:
        """Return a digest of the weights computed after this call started; concurrent callers share one."""
        number = self._begun + 1
        with self._digesting:
            if self._digest[0] < number:
                self._begun += 1
                self._digest = self._begun, weights_digest(model)
            return self._digest[1]


@once_per_model
def shared_state(model: PreTrainedModel) -> SharedState:
    """Return the state that all wrappers of a model share; the first time, probe it, or raise UnsupportedModel."""
    rotations = [] if getattr(model, RUNS_ELSEWHERE, False) else probe(model)
    return SharedState(rotations, has_dynamic_rope=bool(dynamic_rope_modules(model)))


@dataclass(frozen=True)
class PrefillResult:
    """A prompt, or the beginning of it, in a cache."""

    state: PromptState  # with what its layers keep for decoding
    cache: DynamicCache = field(default_factory=DynamicCache)
    cached_tokens: int = 0  # those whose keys and values came from a `KeyValueCache`


@dataclass(frozen=True)
class Prefiller:
    """Runs a model over prompts with the attention that the choices of a wrapper arrange, inside of `exclusive`."""

    model: PreTrainedModel
    choices: ResolvedChoices
    shared: SharedState

    @classmethod
    def of(cls, model: PreTrainedModel, choices: ResolvedChoices) -> Prefiller:
        """Return one that shares with others of the model what belongs to no single wrapper."""
        return cls(model, choices, shared_state(model))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of, (self.model, self.choices)

    @property
    def device(self) -> torch.device:
        """Device of the input ids."""
        return input_device(self.model)

    @property
    def one_by_one(self) -> bool:
        """Whether prompts are computed one by one, so that they change nothing of each other."""
        return self.choices.deterministic or self.shared.has_dynamic_rope  # of a batch, it is that of the longest

    def stock_decoding(self, prompts: Iterable[PreparedPrompt | PromptState]) -> bool:
        """Return whether tokens after prefilled prompts use the model's own attention."""
        is_stock = self.choices.method.stock_decoding and self.choices.intervention is None
        if is_stock and self.shared.has_alibi:  # which takes the index of a token for its position
            arrangements = [each.arrangement for each in prompts]
            return all(each.positions == natural_positions(each.layout) for each in arrangements)
        return is_stock

    def shares_prefill(self, lengths: Sequence[int]) -> bool:
        """Return whether prompts with so many uncached tokens share a pass, of which at most half is padding."""
        separate = self.one_by_one or self.choices.intervention or self.shared.has_alibi  # which know no padding
        return self.choices.backend.batched_prefill and not separate and len(lengths) * max(lengths) <= 2 * sum(lengths)

    @contextmanager
    def exclusive(self, *, gradients: bool = False) -> Iterator[None]:
        """Hold the model's lock, by default without gradients, with rotary frequencies that remember no earlier call.

        A call within another one (of a logits processor, or in `lm.arranged`) has nothing of the other's attention.
        """
        rope = private_dynamic_rope(self.model) if self.shared.has_dynamic_rope else nullcontext()
        with self.shared.lock.held(), torch.set_grad_enabled(gradients), rope, own_attention():
            yield

    def arranged_attention(
        self, prompts: Sequence[PromptState], *, last_text_only: bool = False, once: bool = False
    ) -> AbstractContextManager[None]:
        """Override the model's attention with that of the prompts of a batch; nothing where all of them are plain.

        With `last_text_only`, only the outputs of the last text are computed. With `once`, the model gets its own
        attention back after one forward pass; an intervention stays.
        """
        rotations = self.shared.rotations
        if self.choices.intervention is not None:
            return self.choices.intervention.applied(self.model, PromptBatch(prompts, rotations))
        if all(map(attrgetter("arrangement.is_plain"), prompts)):
            return nullcontext()
        attention = ArrangedAttention(prompts, self.choices.backend, rotations, last_text_only)
        return override_attention(self.model, attention, once=once)

    def attention(self, prompts: Sequence[PromptState], *, is_whole: bool = False) -> AbstractContextManager[None]:
        """Use arranged attention while decoding after prompts, if it is not stock, and while prefilling whole ones."""
        stock = self.stock_decoding(prompts)
        if stock and not is_whole:
            return nullcontext()
        return self.arranged_attention(prompts, last_text_only=True, once=stock)

    def logits(self, prepared: PreparedPrompt, keep: int) -> torch.Tensor:
        """Return the logits of at least the last `keep` tokens of a prompt `[tokens, vocabulary]`."""
        (prefix,) = self.load_cached_prefixes([prepared])
        return self._continue(prepared, prefix, keep)

    def forward(self, prepared: PreparedPrompt, cache: DynamicCache, keep: int = 1) -> torch.Tensor:
        """Run the model over a prompt after what a cache has of it; return logits of at least its last tokens."""
        start = cache.get_seq_length()
        # With a mask, transformers does not take repeated positions for several packed sequences.
        is_masked = not start and not prepared.is_natural
        ids, positions = prepared.input_ids[start:], prepared.positions[start:]
        mask = torch.ones((1, len(ids)), dtype=torch.long, device=self.device) if is_masked else None
        return self._run([ids], [positions] if start or is_masked else None, cache, mask, keep)[0]

    def _run(
        self, ids: Any, positions: Any, cache: DynamicCache, mask: torch.Tensor | None = None, keep: int | None = 1
    ) -> torch.Tensor:
        """Run the model over ids `[B, Q]` at positions `[B, Q]` (None: from 0 on), with a mask `[B, cached + Q]`.

        Return the logits of at least the last `keep` tokens (None: all) `[B, tokens, V]`.
        """
        names, device = forward_parameters(self.model), self.device
        options: dict[str, Any] = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
        if keep is not None and "logits_to_keep" in names:
            options["logits_to_keep"] = max(keep, 1)
        if positions is not None and "position_ids" in names:
            options["position_ids"] = torch.as_tensor(positions, device=device)
        ids = torch.as_tensor(ids, device=device)
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **options).logits
        return logits

    def load_cached_prefixes(self, prompts: Sequence[PreparedPrompt]) -> list[PrefillResult]:
        """Prefill everything before the last text of prompts, from the cache where it can; nothing without a cache."""
        results = [PrefillResult(PromptState(each.arrangement)) for each in prompts]
        if (store := self.choices.cache) is None:
            return results
        cached = []  # prompts with a set, and anything at all, before the suffix
        for number, each in enumerate(prompts):
            if each.arrangement.layout.sets and len(each.input_ids) > each.suffix_length > 0:
                cached.append(number)
        if cached and (foreign := list(foreign_code(self.model))):
            message = f"the key-value cache is not used: the model has {', '.join(foreign[:3])}"
            warnings.warn(CacheWarning(message), stacklevel=2)
        elif cached:
            loaded = PrefixCache(self, store).load([prompts[number].prefix(self.choices.method) for number in cached])
            for number, (cache, tokens) in zip(cached, loaded, strict=True):
                results[number] = replace(results[number], cache=cache, cached_tokens=tokens)
        return results

    def prefill_plain(self, tokens: Sequence[int], start: int = 0, cache: DynamicCache | None = None) -> DynamicCache:
        """Run the model with its own attention over tokens at the positions from `start` on; return their cache."""
        cache = DynamicCache() if cache is None else cache
        self._run([tokens], [range(start, start + len(tokens))], cache)
        return cache

    def prefill(self, prompts: Sequence[PreparedPrompt]) -> list[PrefillResult]:
        """Prefill all tokens of prompts but the last of each, with which decoding starts."""
        results = self.prefill_uncached(prompts, self.load_cached_prefixes(prompts))
        for result in results:
            result.cache.crop(-1)  # afterwards: rotary scalings that depend on the length need the whole prompt
        return results

    def prefill_uncached(
        self, prompts: Sequence[PreparedPrompt], prefixes: Sequence[PrefillResult] = ()
    ) -> list[PrefillResult]:
        """Prefill what follows the prefixes of prompts, or all of them, in one forward pass where that pays."""
        prefixes = list(prefixes) or [PrefillResult(PromptState(each.arrangement)) for each in prompts]
        starts = [each.cache.get_seq_length() for each in prefixes]
        uncached = [len(each.input_ids) - start for each, start in zip(prompts, starts, strict=True)]
        run_others = after_prefill.get() or (lambda: None)
        if len(prompts) > 1 and (all(starts) or not any(starts)) and self.shares_prefill(uncached):
            prefixes = self._prefill_together(prompts, prefixes, starts)
            run_others()
            return prefixes
        for prepared, prefix in zip(prompts, prefixes, strict=True):
            self._continue(prepared, prefix)
            run_others()
        return prefixes

    def _continue(self, prepared: PreparedPrompt, prefix: PrefillResult, keep: int = 1) -> torch.Tensor:
        """Prefill the rest of a prompt; return logits of at least the last `keep` tokens `[tokens, vocabulary]`."""
        with self.attention([prefix.state], is_whole=not prefix.cache.get_seq_length()):
            return self.forward(prepared, prefix.cache, keep)

    def _prefill_together(
        self, prompts: Sequence[PreparedPrompt], prefixes: Sequence[PrefillResult], starts: Sequence[int]
    ) -> list[PrefillResult]:
        """Prefill what follows prefixes, padded on the right, in one forward pass; prefixes are padded on the left."""
        padding = [max(starts) - start for start in starts]
        rows = list(zip(prompts, starts, strict=True))
        ids = padded([each.input_ids[start:] for each, start in rows], self.device, side="right")
        positions = padded([each.positions[start:] for each, start in rows], self.device, side="right")
        mask = [[0] * by + [1] * (start + ids.shape[1]) for by, start in zip(padding, starts, strict=True)]
        states = [replace(each.state, padding=by, scratch={}) for each, by in zip(prefixes, padding, strict=True)]
        cache = batch_caches([each.cache for each in prefixes], padding)
        with self.attention(states, is_whole=not any(starts)):
            self._run(ids, positions, cache, torch.tensor(mask, device=self.device))
        results, layers = [], layers_of(cache)  # the batch, split
        for row, (prompt, by) in enumerate(zip(prompts, padding, strict=True)):
            tokens = slice(by, by + len(prompt.input_ids))
            own = DynamicCache((keys[row, None, :, tokens], values[row, None, :, tokens]) for keys, values in layers)
            results.append(replace(prefixes[row], cache=own))
        return results

    def continuation_logits(self, prepared: PreparedPrompt, continuations: Sequence[TokenIds]) -> torch.Tensor:
        """Return the logits that predict each token of continuations `[N, longest, V]`; after an end, anything."""
        longest, last = max(map(len, continuations)), prepared.input_ids[-1]
        rows = [[last, *each[:-1]] + [each[-1]] * (longest - len(each)) for each in continuations]
        first = prepared.positions[-1]
        (prefilled,) = self.prefill([prepared])
        cache = batch_caches([prefilled.cache], [0], len(rows))
        with self.attention([prefilled.state]):
            positions = [range(first, first + longest)] * len(rows)
            return self._run(rows, positions, cache, keep=None)


class PrefixCache:
    """Loads prefixes of prompts from a cache; missing entries are computed, by a prefiller, and stored."""

    def __init__(self, prefiller: Prefiller, cache: KeyValueCache) -> None:
        self._prefiller, self._cache = prefiller, cache
        choices, shared, model = prefiller.choices, prefiller.shared, prefiller.model
        computed_by = shared.weights_digest(model), environment(model, prefiller.device)
        if shared.entry_layout is None or shared.entry_layout[0] != computed_by:
            shared.entry_layout = computed_by, layout_of(_entry_of(prefiller.prefill_plain([0])))
        self._token_layout = shared.entry_layout[1]
        method = (type(choices.method).__qualname__, sorted(vars(choices.method).items()))
        # Part of every key. Without `deterministic`, the prefixes of a batch may share a pass, and differ by rounding.
        self._identity = (*computed_by, choices.backend.name, method, choices.deterministic)

    def load(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[DynamicCache, int]]:
        """Return the keys and values of prefixes, and how many tokens of each were cached."""
        by_segment = self._prefiller.choices.method.context_free_segments
        whole = [each for each in prefixes if not by_segment or len(each.arrangement.layout.sets) > 1]
        loaded = dict(zip(map(id, whole), self._load_whole(whole), strict=True))
        return [loaded.get(id(each)) or self._load_segments(each) for each in prefixes]

    def _load_whole(self, prefixes: Sequence[PreparedPrompt]) -> list[tuple[DynamicCache, int]]:
        """Load prefixes, each of which is one entry. Missing ones share a pass; of equal ones, one is computed."""
        keys = [digest_of(self._identity, each.input_ids, each.arrangement) for each in prefixes]
        distinct = dict(zip(keys, prefixes, strict=True))
        entries = {key: self._find(key, len(each.input_ids)) for key, each in distinct.items()}
        missing = {key: distinct[key] for key, entry in entries.items() if entry is None}
        for key, computed in zip(missing, self._prefiller.prefill_uncached([*missing.values()]), strict=True):
            entries[key] = entry = _entry_of(computed.cache)
            self._cache.put(key, entry)
        return [
            (self._as_cache([entries[key]]), 0 if missing.pop(key, None) else len(each.input_ids))
            for key, each in zip(keys, prefixes, strict=True)
        ]

    def _load_segments(self, prefix: PreparedPrompt) -> tuple[DynamicCache, int]:
        """Load the text before the set, and each segment as the plain model computes it directly after that text."""
        layout, ids = prefix.arrangement.layout, prefix.input_ids
        text, entries, cached_tokens = ids[: layout.texts[0]], list[Entry](), 0
        parts = [((), text)] if text else []
        for before, tokens in [*parts, *((text, ids[each.start : each.stop]) for each in layout.set_spans[0] if each)]:
            key = digest_of(self._identity, before, tokens)
            entry = self._find(key, len(tokens))
            cached_tokens += 0 if entry is None else len(tokens)
            if entry is None:
                cache = self._as_cache(entries[:1] if before else [])
                entry = _entry_of(self._prefiller.prefill_plain(tokens, len(before), cache), len(before))
                self._cache.put(key, entry)
            entries.append(entry)
        return self._as_cache(entries), cached_tokens

    def _as_cache(self, entries: Sequence[Any]) -> DynamicCache:
        """Return consecutive entries as one cache."""
        layers, move = [], methodcaller("to", self._prefiller.device)
        for layer in zip(*entries, strict=True):
            sides = zip(*layer, strict=True)  # the keys of all entries, and their values
            layers.append(tuple([torch.cat(list(map(move, side)), dim=1)[None] for side in sides]))
        return DynamicCache(layers)

    def _find(self, key: str, tokens: int) -> Entry | None:
        layout = [[((heads, tokens, size), dtype) for (heads, _, size), dtype in pair] for pair in self._token_layout]
        return self._cache.get(key, layout)


def _entry_of(cache: DynamicCache, start: int = 0) -> Entry:
    """Return the keys and values of a cache with one row, from token `start` on."""
    return [(keys[0, :, start:].contiguous(), values[0, :, start:].contiguous()) for keys, values in layers_of(cache)]


def layers_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of each layer, `[B, H_kv, T, D]` each."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, value: int = 0, *, side: Literal["left", "right"] = "left"
) -> torch.Tensor:
    """Return rows of whole numbers as one tensor `[B, longest]`, padded with a value."""
    tensors = list(map(torch.tensor, rows))
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side).to(device)


def batch_caches(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int = 1) -> DynamicCache:
    """Batch the caches of single prompts, left-padded by `padding`; each row is repeated `copies` times."""
    cache = caches[0]
    if len(caches) > 1:
        layers: list[tuple[torch.Tensor, ...]] = []
        for layer in zip(*map(layers_of, caches), strict=True):
            sides = [map(pad, side, [(0, 0, count, 0) for count in padding]) for side in zip(*layer, strict=True)]
            layers.append(tuple([torch.cat(list(side)) for side in sides]))
        cache = DynamicCache(layers)
    if not cache.get_seq_length():
        return DynamicCache()  # of a prompt with one token; transformers does not repeat an empty cache
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache
