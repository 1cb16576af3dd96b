"""Log-probabilities of generated tokens, recorded during generation: one number per row and step.

`output_logits=True` of transformers' `generate` would need memory for vocabulary size times length. Here a forward hook
stores the logits of the current step only, until the next token is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, StoppingCriteria

from invariant_rag.generation.answers import TokenLogprob
from invariant_rag.generation.streaming import TextQueueStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.outputs import Generation


def token_logprobs(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[TokenLogprob]:
    """Return the generated tokens with their parts of the text. Joined, they are the text."""
    streamer = TextQueueStreamer(tokenizer)
    streamer.put(torch.empty((1, 0), dtype=torch.long))  # the prompt
    found: list[TokenLogprob] = []
    start = 0
    tops = generation.top_logprobs or ((),) * len(generation.token_ids)
    chosen = zip(generation.token_ids, generation.logprobs, tops, strict=True)
    for place, (token, logprob, best) in enumerate(chosen, 1):
        streamer.put(torch.tensor([token]))
        if place == len(generation.token_ids):
            streamer.end()
        pieces = [streamer.queue.get() or "" for _ in range(streamer.queue.qsize())]
        text = "".join(pieces)
        top = tuple((str(tokenizer.decode([each])), value) for each, value in best)
        found.append(TokenLogprob(text, logprob, start, start + len(text), top))
        start += len(text)
    return found


class TokenLogprobs(StoppingCriteria):
    """Records the log-probability of every chosen token under the model, before logits processors and sampling.

    It is implemented as a stopping criterion, which `generate` calls with the tokens of every step; it never stops a
    row. With beam search, the criterion is called with several candidates per prompt, each of which may extend any
    beam. So the log-probabilities of all candidates are recorded for every beam of their prompt, and `of` selects by
    the beam indices of the output.

    Args:
        num_beams: Beams of each prompt.
        top: How many of the most likely tokens of each step to record, too; not with beams.
    """

    def __init__(self, num_beams: int = 1, top: int = 0) -> None:
        self._num_beams = num_beams
        self._top = top
        self._tops: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and log-probabilities `[R, top]` of each step
        self._thread = get_ident()
        self._logits: torch.Tensor | None = None
        self._steps = 0
        # Candidates and their log-probabilities, `[steps, R, C]` each, preallocated for more steps: small allocations
        # between the large ones of every step would fragment the heap.
        self._tokens = torch.empty(0, 0, 0, dtype=torch.long)
        self._logprobs = torch.empty(0, 0, 0)

    @contextmanager
    def recording(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the model's forward passes in this thread."""
        hook = model.register_forward_hook(self._after_forward)
        try:
            yield
        finally:
            hook.remove()

    def _after_forward(self, _model: object, _args: object, output: Any) -> None:
        # A logits processor may call the model too (guidance): only the first call of a step is recorded.
        if self._logits is None and get_ident() == self._thread:
            self._logits = output.logits[:, -1]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Record the log-probabilities of the tokens of a step; return False for every row `[rows]`."""
        if self._logits is not None:
            logprobs = torch.log_softmax(self._logits.float(), dim=-1)
            rows = logprobs.shape[0]
            candidates = input_ids[:, -1].to(logprobs.device).reshape(rows // self._num_beams, -1)
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

    def of(self, sequences: torch.Tensor, start: int, beam_indices: torch.Tensor | None) -> list[list[float]]:
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
