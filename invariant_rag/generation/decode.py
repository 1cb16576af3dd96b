"""Decoding: the model's own `generate`, from the cache of an arranged prefill, and what it records and draws."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, itemgetter
from threading import get_ident
from typing import Any

import torch
from transformers import Cache, GenerationMixin, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import BaseWatermarkingConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from invariant_rag.attention.hook import override_only_over
from invariant_rag.attention.per_model import cache_keyword, input_device, takes_position_ids
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.options import is_set, refusals, resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prefill import padded
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.generation.streaming import replay

_CACHE = cache_keyword(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)  # of `generate`
_ALONE = ("epsilon_cutoff", "eta_cutoff", "num_beams", "num_return_sequences", "top_h", "typical_p")
"""Ways of sampling in which a prompt is decoded alone."""


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[PreparedPrompt],
    cache: Cache,
    max_new_tokens: int,
    options: dict[str, Any],
    cached_tokens: Sequence[int] = (),
) -> list[Generation]:
    """Run the model's own `generate`, which prefills the uncached tokens of the prompts and decodes.

    Each row of the cache has keys and values of the first tokens of a prompt, of which `cached_tokens` came from a
    `KeyValueCache`. The options are from `generation_options`.
    """
    rows = list(map(attrgetter("input_ids"), prompts))
    device, lengths = input_device(model), torch.tensor(list(map(len, rows)))
    ids = padded(rows, device, options["pad_token_id"])
    mask = (torch.arange(ids.shape[1], 0, -1) <= lengths[:, None]).long().to(device)
    if not all(map(attrgetter("is_natural"), prompts)) and takes_position_ids(model):
        options["position_ids"] = padded(list(map(attrgetter("positions"), prompts)), device)
    top = options.pop("top_logprobs", 0)
    streamers = dict(filter(itemgetter(1), enumerate(options.pop("streamers", ()))))  # of the rows that have one
    recorder = _Recorder(options, top, {} if options["num_beams"] > 1 else streamers)
    generate: Any = model.generate
    with refusals(), override_only_over(model, cache), model.register_forward_hook(recorder.after_forward):
        output = generate(
            input_ids=ids,
            attention_mask=mask,
            **{_CACHE: cache},
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **{**options, "stopping_criteria": StoppingCriteriaList([recorder])},
        )
    if output.get(_CACHE) is not cache:
        raise UnsupportedCombination(
            "expected a model that decodes from the cache of the arranged prefill, got one that dropped the cache and "
            "prefilled the prompt again with its own attention",
            hint="Phi-3 does so when an answer passes original_max_position_embeddings: reduce max_new_tokens.",
        )
    start, beams, copies = ids.shape[1], output.get("beam_indices"), options["num_return_sequences"]
    beams = None if beams is None else beams.tolist()  # -1 after the end
    generations = []
    for row, sequence in enumerate(output.sequences.tolist()):
        if beams is None:
            at, end = repeat(row), recorder.lengths.get(row)
            tokens, stopped = sequence[start:end], end is not None
        else:  # beams move between rows during the search, so recorded lengths do not apply
            at = beams[row]
            tokens = sequence[start : start + sum(each >= 0 for each in at)]
            stopped = len(tokens) < max_new_tokens or tokens[-1] in (options["eos_token_id"] or ())
        generations.append(
            prompts[row // copies].generation(
                tokenizer,
                tokens,
                [step[own][token] for token, own, step in zip(tokens, at, recorder.logprobs, strict=False)],
                finish_reason="stop" if stopped else "length",
                cached_tokens=cached_tokens[row // copies] if cached_tokens else 0,
                top_logprobs=[each[row] for each in recorder.tops[: len(tokens)]],
            )
        )
    for row, streamer in streamers.items():
        if beams is None:  # the row has not ended by itself
            streamer.end()
        else:  # which beam is the answer is known at the end
            replay(generations[row].token_ids, streamer)
    return generations


class _Recorder(StoppingCriteria):
    """Combines stopping criteria, and records what `generate` calls them with: ends, and log-probabilities.

    `lengths` has the length at which a row stopped: transformers appends tokens until all rows have. For each step and
    row, `logprobs` has the log-probability of each candidate under the model (of several per prompt with beams, each of
    which may extend any beam), and `tops` the `top` most likely tokens with theirs: as Python objects, since small
    tensors between the large ones of every step would fragment the heap. `streamers` get the tokens of their rows.
    """

    def __init__(self, options: Mapping[str, Any], top: int, streamers: dict[int, BaseStreamer]) -> None:
        self.lengths: dict[int, int] = {}
        self.logprobs: list[list[dict[int, float]]] = []
        self.tops: list[list[tuple[tuple[int, float], ...]]] = []
        self._criteria: Any = StoppingCriteriaList(options["stopping_criteria"])
        self._ends, self._num_beams, self._top = options["eos_token_id"] or (), options["num_beams"], top
        self._streamers, self._thread = streamers, get_ident()
        self._logits: torch.Tensor | None = None

    def after_forward(self, _model: object, _args: object, output: Any) -> None:
        """Keep the logits of the first call of a step (guidance calls again), not of all steps, as `output_logits`."""
        if self._logits is None and get_ident() == self._thread:
            self._logits = output.logits[:, -1]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Record the log-probabilities of the tokens of a step; return whether each row stops `[rows]`."""
        tokens = input_ids[:, -1].tolist()
        for row, streamer in self._streamers.items():
            if not self.logprobs:
                streamer.put(input_ids[row : row + 1, :-1])
            streamer.put(torch.tensor([tokens[row]]))
        stopped: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        for row, (token, stops) in enumerate(zip(tokens, stopped.tolist(), strict=True)):
            if stops or token in self._ends:
                self.lengths.setdefault(row, input_ids.shape[1])
        for row in self._streamers.keys() & self.lengths.keys():  # what follows is padding
            self._streamers.pop(row).end()
        if self._logits is not None:
            logprobs = torch.log_softmax(self._logits.float(), dim=-1)
            self._logits = None
            candidates = input_ids[:, -1].to(logprobs.device).reshape(logprobs.shape[0] // self._num_beams, -1)
            candidates = candidates.repeat_interleave(self._num_beams, dim=0)
            gathered = logprobs.gather(1, candidates).tolist()
            self.logprobs.append(list(map(dict, map(zip, candidates.tolist(), gathered))))
            if self._top:
                best = logprobs.topk(min(self._top, logprobs.shape[1]))
                self.tops.append(list(map(tuple, map(zip, best.indices.tolist(), best.values.tolist()))))
        return stopped


def samples_rows(options: Mapping[str, Any], model: PreTrainedModel) -> bool:
    """Return whether rows of a batch can draw by themselves with options of `generate`, by a `RowSampler`."""
    alone = any(is_set(resolve_option(options, name, model.generation_config)) for name in _ALONE)
    more = [options.get(name) for name in ("generation_config", "watermarking_config")]
    return bool(resolve_option(options, "do_sample")) and not alone and more == [None, None]


@dataclass
class RowSampler(BaseWatermarkingConfig):
    """Draws a token for each row, and leaves nothing else to choose. Without a seed, torch's state draws one.

    It is passed as the `watermarking_config`, whose processor transformers puts after all others.
    """

    seeds: Sequence[Any]

    def __post_init__(self) -> None:
        self.seeds = [int(torch.randint(1 << 62, ())) if seed is None else seed for seed in self.seeds]

    def validate(self) -> None:
        """Seeds are checked by `generate`."""

    def construct_processor(self, vocab_size: int, device: Any = None) -> Any:
        """Return a function of scores `[B, vocabulary]`: 0 for the token that was drawn, minus infinity for others."""
        generators = [torch.Generator(device).manual_seed(seed) for seed in self.seeds]

        def draw(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            rows = zip(torch.softmax(scores, dim=-1).split(1), generators, strict=True)
            drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
            return torch.full_like(scores, -torch.inf).scatter(1, torch.cat(drawn), 0.0)

        return draw


@dataclass(unsafe_hash=True)
class TokenPenalties(LogitsProcessor):
    """Takes `presence`, and `frequency` for each time, from the scores of tokens that the answer has already.

    Two with the same numbers are equal, so that their texts can be rows of one batch. Of beams it knows nothing.
    https://platform.openai.com/docs/api-reference/chat/create (`presence_penalty`, `frequency_penalty`)
    """

    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        self._seen: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]` after prompts and answers `[B, L]`."""
        if self._seen is None or not torch.equal(input_ids[:, :-1], self._seen):  # other prompts
            self._start = input_ids.shape[1]
        self._seen = input_ids
        counts = torch.zeros_like(scores)
        answered = input_ids[:, self._start :]
        counts.scatter_add_(1, answered, torch.ones_like(answered, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenPenalties:
        """Return one of answers that have not begun: a routed model writes two."""
        return replace(self)
