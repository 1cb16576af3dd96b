"""Prefilling: the model's own forward pass over prompts, with arranged attention, after the prefix that a cache holds.

Everything here is called inside `Prefiller.exclusive`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.arrangement import natural_positions
from invariant_rag.attention.dynamic_rope import has_dynamic_rope, private_dynamic_rope
from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention, own_attention
from invariant_rag.attention.per_model import once_per_model
from invariant_rag.attention.probe import input_device, takes_position_ids
from invariant_rag.generation.padding import batch_caches, left_pad, unbatch_cache
from invariant_rag.generation.prefix_cache import load_prefixes, prompt_prefix, warn_of_foreign_code
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.interventions import PromptBatch

if TYPE_CHECKING:
    from invariant_rag.attention.positions import PositionEncoding
    from invariant_rag.generation.choices import Choices
    from invariant_rag.generation.shared_state import SharedState


@dataclass(frozen=True)
class PrefillResult:
    """A prompt, or the beginning of it, in a cache.

    Attributes:
        state: The prompt, with what its layers keep for decoding.
        cache: Keys and values.
        cached_tokens: Tokens whose keys and values came from a `KeyValueCache`.
    """

    state: PromptState
    cache: DynamicCache
    cached_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()


@dataclass(frozen=True)
class Prefiller:
    """Runs a model over prompts with the attention that the choices arrange."""

    model: PreTrainedModel
    choices: Choices
    shared: SharedState

    @property
    def device(self) -> torch.device:
        """Device of the input ids."""
        return input_device(self.model)

    @property
    def rotations(self) -> Sequence[PositionEncoding]:
        """The position encoding of each layer."""
        return self.shared.rotations

    def stock_decoding(self, prompts: Iterable[PreparedPrompt | PromptState]) -> bool:
        """Return whether tokens after prefilled prompts use the model's own attention.

        With ALiBi, that attention takes indices for positions, so the prompts' positions must be their indices.
        """
        if not (self.choices.stock_decoding and self.shared.has_alibi):
            return self.choices.stock_decoding
        arrangements = [each.arrangement for each in prompts]
        return all(each.positions == natural_positions(each.layout) for each in arrangements)

    def position_ids(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the keyword that tells the model the positions `[B, T]` of tokens, if it has one."""
        return {"position_ids": positions} if takes_position_ids(self.model) else {}

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the model's lock, without gradients, with rotary frequencies that remember no earlier call.

        A call within another one (of a logits processor, or in `lm.arranged`) has nothing of the other's attention.
        """
        with self.shared.lock.held(), torch.no_grad(), private_dynamic_rope(self.model), own_attention():
            yield

    def arranged_attention(
        self, prompts: Sequence[PromptState], *, last_text_only: bool = False, once: bool = False
    ) -> AbstractContextManager[None]:
        """Override the model's attention with that of arranged prompts; nothing where all of them are plain.

        Args:
            prompts: The prompts of the batch.
            last_text_only: Whether only the outputs of the last text are wanted.
            once: Whether the model gets its own attention back after one forward pass. An intervention stays.
        """
        if self.choices.intervention is not None:
            return self.choices.intervention.applied(self.model, PromptBatch(prompts, self.rotations))
        if all(prompt.arrangement.is_plain for prompt in prompts):
            return nullcontext()
        attention = ArrangedAttention(prompts, self.choices.backend, self.rotations, last_text_only)
        return override_attention(self.model, attention, until_layer=len(self.rotations) - 1 if once else None)

    def decoding_attention(self, prompts: Sequence[PromptState]) -> AbstractContextManager[None]:
        """Override the model's attention while it decodes after prefilled prompts; nothing with stock decoding."""
        if self.stock_decoding(prompts):
            return nullcontext()
        return self.arranged_attention(prompts, last_text_only=True)

    def generation_attention(self, prompts: Sequence[PromptState]) -> AbstractContextManager[None]:
        """Use arranged attention while prefilling whole prompts, then the decoding attention."""
        if not self.stock_decoding(prompts):
            return self.decoding_attention(prompts)
        return self.arranged_attention(prompts, last_text_only=True, once=True)

    @property
    def one_by_one(self) -> bool:
        """Whether prompts are computed one by one, so that they change nothing of each other.

        With rotary frequencies that depend on the length, the longest prompt of a batch would change all others.
        """
        return self.choices.deterministic or has_dynamic_rope(self.model)

    def can_read_together(self, lengths: Sequence[int]) -> bool:
        """Return whether one forward pass may read so many tokens of each prompt: of one always, of several if it pays.

        It does not where most of the batch would be padding. And interventions and ALiBi know no padding.
        """
        if len(lengths) == 1:
            return True
        apart = self.one_by_one or self.choices.intervention or self.shared.has_alibi
        return self.choices.backend.reads_together and not apart and len(lengths) * max(lengths) <= 2 * sum(lengths)

    def logits(self, prepared: PreparedPrompt, keep: int) -> torch.Tensor:
        """Return the logits of at least the last `keep` tokens of a prompt `[tokens, vocabulary]`."""
        if self.choices.cache is not None:
            (prefix,) = self.load_cached_prefixes([prepared])
            return self._continue(prepared, prefix, keep)
        with self.arranged_attention([PromptState(prepared.arrangement)], last_text_only=True):
            return self.forward(prepared, keep, use_cache=False)

    def forward(
        self, prepared: PreparedPrompt, keep: int, start: int = 0, answer: Sequence[int] = (), **options: Any
    ) -> torch.Tensor:
        """Run the model over a prompt from token `start` on; return logits of at least the last `keep` tokens.

        The tokens of an `answer` follow the prompt, at positions that count on from its last.
        """
        options |= self._keep_logits(keep)
        ids = torch.tensor([[*prepared.input_ids[start:], *answer]], device=self.device)
        if start or not prepared.is_natural:
            last = prepared.positions[-1]
            positions = (*prepared.positions[start:], *(last + count for count in range(1, len(answer) + 1)))
            options |= self.position_ids(torch.tensor([positions], device=self.device))
        if not start and not prepared.is_natural:
            # With a mask, transformers does not take repeated positions for several packed sequences.
            options["attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = self.model(input_ids=ids, **options).logits[0]
        return logits

    def forward_plain(self, tokens: Sequence[int], start: int, cache: DynamicCache) -> None:
        """Run the model with its own attention over tokens at the positions from `start` on, after a cache."""
        ids = torch.tensor([tokens], device=self.device)
        options = self.position_ids(torch.arange(start, start + len(tokens), device=self.device)[None])
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, **options, **self._keep_logits(1))

    def _keep_logits(self, count: int) -> dict[str, int]:
        """Return the keyword that limits the logits to the last `count` tokens, if the model has one."""
        return {"logits_to_keep": max(count, 1)} if _takes_logits_to_keep(self.model) else {}

    def load_cached_prefixes(self, prompts: Sequence[PreparedPrompt]) -> list[PrefillResult]:
        """Prefill everything before the last text of prompts, from the cache where it can; nothing without a cache."""
        empty = [PrefillResult(PromptState(each.arrangement), DynamicCache()) for each in prompts]
        cache, numbers = self.choices.cache, [number for number, each in enumerate(prompts) if _has_prefix(each)]
        if cache is None or not numbers or warn_of_foreign_code(self.model):
            return empty
        prefixes = [prompt_prefix(prompts[number], self.choices.method) for number in numbers]
        loaded = dict(zip(numbers, load_prefixes(self, cache, prefixes), strict=True))
        return [
            PrefillResult(each.state, *loaded[number]) if number in loaded else each
            for number, each in enumerate(empty)
        ]

    def prefill_uncached(self, prompts: Sequence[PreparedPrompt]) -> list[PrefillResult]:
        """Run the model over whole prompts, and keep their keys and values: in one forward pass where that pays."""
        states, lengths = [PromptState(each.arrangement) for each in prompts], [len(each.input_ids) for each in prompts]
        if len(prompts) < 2 or not self.can_read_together(lengths):
            return self._continue_each(prompts, [PrefillResult(state, DynamicCache()) for state in states])
        batch, cache = left_pad(prompts, 0, self.device), DynamicCache()
        padded = [replace(state, padding=by) for state, by in zip(states, batch.padding, strict=True)]
        with self.generation_attention(padded):
            self._read(batch.ids, batch.mask, batch.explicit_positions(), cache)
        return list(map(PrefillResult, states, unbatch_cache(cache, batch.padding, lengths)))

    def prefill(self, prompts: Sequence[PreparedPrompt]) -> list[PrefillResult]:
        """Prefill all tokens of prompts but the last of each, with which decoding starts.

        The last tokens take part and are then cropped, so that rotary scalings that depend on the length see the whole
        prompt. Layers with a sliding window keep their full length too.
        """
        results = self.load_cached_prefixes(prompts)
        unread = [len(each.input_ids) - result.length for each, result in zip(prompts, results, strict=True)]
        if not any(each.length for each in results):
            results = self.prefill_uncached(prompts)
        elif len(prompts) > 1 and all(each.length for each in results) and self.can_read_together(unread):
            results = self._continue_together(prompts, results)
        else:
            results = self._continue_each(prompts, results)
        for result in results:
            result.cache.crop(-1)
        return results

    def _continue_each(
        self, prompts: Sequence[PreparedPrompt], prefixes: Sequence[PrefillResult]
    ) -> list[PrefillResult]:
        """Prefill the rest of each prompt by itself, into the cache of its prefix."""
        for prepared, prefix in zip(prompts, prefixes, strict=True):
            self._continue(prepared, prefix, keep=1)
        return list(prefixes)

    def _continue_together(
        self, prompts: Sequence[PreparedPrompt], prefixes: Sequence[PrefillResult]
    ) -> list[PrefillResult]:
        """Prefill the last texts of prompts in one forward pass.

        The prefixes are padded on the left and the texts on the right, so that every text follows its prefix. What
        follows a text is not seen by it.
        """
        read, longest = [each.length for each in prefixes], max(each.length for each in prefixes)
        padding = [longest - length for length in read]
        texts = [each.input_ids[length:] for each, length in zip(prompts, read, strict=True)]
        count = max(map(len, texts))
        tokens = [[*text, *[0] * (count - len(text))] for text in texts]
        places = [
            [*each.positions[length:], *[0] * (count - len(text))]
            for each, length, text in zip(prompts, read, texts, strict=True)
        ]
        seen = [[0] * padded + [1] * (longest - padded + count) for padded in padding]
        states = [replace(each.state, padding=by, scratch={}) for each, by in zip(prefixes, padding, strict=True)]
        cache = batch_caches([each.cache for each in prefixes], padding, 1)
        with self.decoding_attention(states):
            ids, mask, positions = (torch.tensor(each, device=self.device) for each in (tokens, seen, places))
            self._read(ids, mask, positions, cache)
        lengths = [len(each.input_ids) for each in prompts]
        rows = unbatch_cache(cache, padding, lengths)
        return [replace(each, cache=row) for each, row in zip(prefixes, rows, strict=True)]

    def _read(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> None:
        """Run the model over a padded batch `[B, Q]` that follows a cache; the mask is over all tokens `[B, S]`."""
        options = self.position_ids(positions) | self._keep_logits(1)
        self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)

    def _continue(self, prepared: PreparedPrompt, prefix: PrefillResult, keep: int) -> torch.Tensor:
        """Prefill the rest of a prompt; return logits of at least the last `keep` tokens `[tokens, vocabulary]`."""
        attention = self.decoding_attention if prefix.length else self.generation_attention
        with attention([prefix.state]):
            return self.forward(prepared, keep, prefix.length, past_key_values=prefix.cache, use_cache=True)


def _has_prefix(prepared: PreparedPrompt) -> bool:
    """Return whether there is something before the last text of a prompt, a set among it."""
    layout = prepared.arrangement.layout
    return bool(layout.sets and layout.text_spans[-1].start and prepared.suffix_length)


@once_per_model
def _takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
