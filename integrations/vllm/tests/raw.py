"""Requests to vLLM without our backend: what another client, or a mistaken one, sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_invariant_rag import Prefilled


@dataclass(frozen=True)
class Answer:
    """What vLLM wrote for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    failed: bool
    cached: int


def ask(llm: Any, *prefilled: Prefilled, tokens: int = 16, **fields: Any) -> list[Answer]:
    """Send requests at the same time, as an LLM in this process takes them."""
    from vllm import SamplingParams

    prompts: list[Any] = []
    params = []
    for each in prefilled:
        prompts.append({"prompt_token_ids": list(each.token_ids)})
        if each.cache_salt:
            prompts[-1]["cache_salt"] = each.cache_salt
        extra = None if each.kv_transfer_params is None else {"kv_transfer_params": each.kv_transfer_params}
        params.append(
            SamplingParams(
                temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, extra_args=extra,
                **fields,
            )
        )  # fmt: skip
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (written,) = output.outputs
        logprobs = [entry[token].logprob for entry, token in zip(written.logprobs, written.token_ids, strict=True)]
        failed = written.finish_reason == "error"
        answers.append(Answer(tuple(written.token_ids), tuple(logprobs), failed, output.num_cached_tokens or 0))
    return answers


def distance(answer: Answer, logprobs: tuple[float, ...]) -> float:
    """Return the largest difference of log-probabilities."""
    assert not answer.failed
    return max(abs(a - b) for a, b in zip(answer.logprobs, logprobs, strict=True))
