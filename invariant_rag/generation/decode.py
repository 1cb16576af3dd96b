"""Decoding: the model's own `generate`, starting from the cache of an arranged prefill, with log-probabilities.

`output_logits=True` of transformers' `generate` would need memory for vocabulary size times length. Here a forward hook
stores the logits of the current step only, until the next token is chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, GenerationMixin, StoppingCriteria, StoppingCriteriaList

from invariant_rag.attention.hook import override_only_over
from invariant_rag.attention.per_model import cache_keyword
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.options import as_ids, as_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from invariant_rag.generation.outputs import Generation
    from invariant_rag.generation.prepare import PreparedPrompt

_CACHE = cache_keyword(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)  # of `generate`


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[PreparedPrompt],
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Cache,
    max_new_tokens: int,
    options: dict[str, Any],
    cached_tokens: Sequence[int] | None = None,
) -> list[Generation]:
    """Run the model's own `generate`, which prefills the uncached tokens of the prompts and decodes.

    Args:
        model: The model.
        tokenizer: Its tokenizer. None: texts are empty.
        prompts: The prompts, one for each row.
        ids: Input ids `[B, L]` of the whole prompts.
        mask: Attention mask `[B, L]`.
        cache: Keys and values of the first tokens of the prompts.
        max_new_tokens: Maximum number of tokens to generate.
        options: From `generation_options`.
        cached_tokens: How many tokens of each prompt came from a `KeyValueCache`. None: none.
    """
    top = options.pop("top_logprobs", 0)
    recorder = _LogprobRecorder(options["num_beams"], top)
    criteria = StoppingCriteriaList([*options["stopping_criteria"], recorder])
    generate: Any = model.generate
    with override_only_over(model, cache), model.register_forward_hook(recorder.after_forward):
        try:
            output = generate(
                input_ids=ids,
                attention_mask=mask,
                **{_CACHE: cache},
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
                **{**options, "stopping_criteria": criteria},
            )
        except Exception as error:
            refusal = as_refusal(error)
            if refusal is error:
                raise
            raise refusal from error
    if output.get(_CACHE) is not cache:
        raise UnsupportedCombination(
            "expected a model that decodes from the cache of the arranged prefill, got one that dropped the cache and "
            "prefilled the prompt again with its own attention",
            hint="Phi-3 does so when an answer passes original_max_position_embeddings: reduce max_new_tokens.",
        )
    start, beams, copies = ids.shape[1], output.get("beam_indices"), options["num_return_sequences"]
    lengths = None if beams is None else (beams >= 0).sum(dim=1).tolist()
    end_tokens = as_ids(options["eos_token_id"])
    generations = []
    for row, (sequence, logprobs) in enumerate(
        zip(output.sequences.tolist(), recorder.logprobs(output.sequences, start, beams), strict=True)
    ):
        prompt, generated = prompts[row // copies], sequence[start:]
        if lengths is None:
            ends = [index + 1 for index, token in enumerate(generated) if token in end_tokens][:1]
            ends += [each.lengths[row] - start for each in options["stopping_criteria"] if row in each.lengths]
            tokens, stopped = generated[: min(ends, default=None)], bool(ends)
        else:  # beams move between rows during the search, so recorded lengths do not apply
            tokens = generated[: lengths[row]]
            stopped = len(tokens) < max_new_tokens or tokens[-1:] in [[each] for each in end_tokens]
        generations.append(
            prompt.generation(
                tokenizer,
                tokens,
                logprobs[: len(tokens)],
                finish_reason="stop" if stopped else "length",
                cached_tokens=cached_tokens[row // copies] if cached_tokens else 0,
                top_logprobs=recorder.top_of(row)[: len(tokens)] if top else (),
            )
        )
    return generations


class _LogprobRecorder(StoppingCriteria):
    """Records the log-probability of every chosen token under the model, before logits processors and sampling.

    It is a stopping criterion, which `generate` calls with the tokens of every step; it never stops a row. With beam
    search, the criterion gets several candidates per prompt, each of which may extend any beam. So the
    log-probabilities of all candidates are recorded for every beam of their prompt, and `logprobs` selects by the beam
    indices of the output.

    Args:
        num_beams: Beams of each prompt.
        top: How many of the most likely tokens of each step to record, too; not with beams.
    """

    def __init__(self, num_beams: int, top: int) -> None:
        self._num_beams, self._top = num_beams, top
        self._tops: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and log-probabilities `[R, top]` of each step
        self._thread = get_ident()
        self._logits: torch.Tensor | None = None
        self._steps = 0
        # Candidates and their log-probabilities, `[steps, R, C]` each, preallocated for more steps: small allocations
        # between the large ones of every step would fragment the heap.
        self._tokens = torch.empty(0, 0, 0, dtype=torch.long)
        self._logprobs = torch.empty(0, 0, 0)

    def after_forward(self, _model: object, _args: object, output: Any) -> None:
        """Keep the logits of the first call of a step: a logits processor may call the model too (guidance)."""
        if self._logits is None and get_ident() == self._thread:
            self._logits = output.logits[:, -1]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Record the log-probabilities of the tokens of a step; return False for every row `[rows]`."""
        if self._logits is not None:
            logprobs = torch.log_softmax(self._logits.float(), dim=-1)
            candidates = input_ids[:, -1].to(logprobs.device).reshape(logprobs.shape[0] // self._num_beams, -1)
            candidates = candidates.repeat_interleave(self._num_beams, dim=0)
            if self._steps == len(self._tokens):
                self._tokens = _grow(self._tokens, candidates)
                self._logprobs = _grow(self._logprobs, logprobs[:, : candidates.shape[1]])
            self._tokens[self._steps] = candidates
            self._logprobs[self._steps] = logprobs.gather(1, candidates)
            self._steps += 1
            self._logits = None
            if self._top:
                best = logprobs.topk(min(self._top, logprobs.shape[1]))
                self._tops.append((best.indices.cpu(), best.values.cpu()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def logprobs(self, sequences: torch.Tensor, start: int, beam_indices: torch.Tensor | None) -> list[list[float]]:
        """Return the log-probabilities of the generated tokens of every row.

        Args:
            sequences: Prompts and generated tokens `[rows, tokens]`.
            start: Index of the first generated token.
            beam_indices: For every generated token, the beam that it extended `[rows, steps]`, negative after the end
                of a row. None: no beam search.
        """
        steps = min(sequences.shape[1] - start, self._steps)
        if not steps:
            return [[] for _ in sequences]
        tokens, logprobs = self._tokens[:steps].cpu(), self._logprobs[:steps].cpu()
        if beam_indices is None:
            return logprobs[:, :, 0].T.tolist()
        beams = beam_indices[:, :steps].cpu().long().T  # [steps, rows]
        chosen = sequences[:, start : start + steps].cpu().T[..., None]
        step = torch.arange(steps)[:, None]
        matches = tokens[step, beams.clamp_min(0)] == chosen
        found = logprobs[step, beams.clamp_min(0)].gather(2, matches.int().argmax(dim=2, keepdim=True))[..., 0]
        return torch.where(beams < 0, 0.0, found).T.tolist()

    def top_of(self, row: int) -> list[tuple[tuple[int, float], ...]]:
        """Return the most likely tokens of every step of a row with their log-probabilities, the first one first."""
        return [tuple(zip(ids[row].tolist(), best[row].tolist(), strict=True)) for ids, best in self._tops]


def _grow(recorded: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return a copy of the recorded steps with twice the capacity, at least 64 more steps, shaped like `step`."""
    larger = recorded.new_empty(len(recorded) + max(len(recorded), 64), *step.shape, device=step.device)
    if len(recorded):
        larger[: len(recorded)] = recorded
    return larger
