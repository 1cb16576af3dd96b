"""`VLLMBackend`: an `InvariantModel` that vLLM runs, from one copy of the weights: vLLM's own.

It prepares prompts as any `InvariantModel` does, for which configuration and tokenizer suffice. vLLM prefills them with
arranged attention in its own forward pass, and decodes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

import torch
from invariant_rag.arrangement import Layout
from invariant_rag.checks import check_text
from invariant_rag.errors import ContextOverflow, InvalidChoice, UnsupportedCombination
from invariant_rag.generation.choices import takes_choices
from invariant_rag.generation.digest import digest_of
from invariant_rag.generation.model import InvariantModel, Seeds
from invariant_rag.generation.options import check_options
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prefill import RUNS_ELSEWHERE, Prefiller, SharedState
from invariant_rag.models.loading import load_config, load_tokenizer, model_location
from transformers import AutoModelForCausalLM, GenerationConfig

from vllm_invariant_rag.arranged_prompt import ArrangedPrompt, check_method
from vllm_invariant_rag.engines import EngineRequest, HTTPEngine, VLLMEngine
from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.sampling import sampling_of

if TYPE_CHECKING:
    from invariant_rag.generation.prepare import PreparedPrompt
    from invariant_rag.segments import Prompt, TokenIds
    from transformers import PreTrainedModel
    from vllm import LLM


class VLLMBackend(InvariantModel):
    """An `InvariantModel` whose `generate`, `stream` and `score` run on vLLM. Several prompts run at the same time.

    Greedy answers are those of `InvariantModel.generate` up to rounding, sampled ones are drawn by vLLM's own random
    numbers. What needs a forward pass in this process, such as `logits` and `arranged`, is refused.
    Of the keywords of `generate`, vLLM knows `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `min_new_tokens`,
    `repetition_penalty`, `sequence_bias`, `stop_strings`, `eos_token_id`, `num_return_sequences`, `top_logprobs`,
    `generation_config`, `streamer`, and what `constrain` and `ToolCalling.constrain` return; others are refused.

    Example:
        ```python
        lm = VLLMBackend(url="http://127.0.0.1:8000")
        lm.generate(lm.chat_prompt("What colour is the flag of Ostra?", documents)).text
        ```

    Args:
        model: Hub id or folder of the tokenizer and the configuration. None: where vLLM loaded its model from.
            Or an `InvariantModel`, for its tokenizer and its choices.
        url: Address of a vLLM server, such as `http://127.0.0.1:8000`.
        llm: Or a `vllm.LLM` in this process.
        engine: Or another `VLLMEngine`.
        tenant: Whose documents these are. Tenants share no keys and values.
        api_key: The server's key.
        timeout: Seconds until a request to the server fails.
        **choices: As for `InvariantModel`: `method`, `ordering`, `max_segment_tokens`, `overflow`. vLLM has its own
            attention and prefix cache, so an intervention and a cache are refused.

    Raises:
        InvalidChoice: Not exactly one of `url`, `llm` and `engine` was given, or the tenant is no text.
        ModelNotFound: There is no tokenizer where vLLM loaded its model from.
        UnsupportedCombination: vLLM cannot run a choice; the message says why.
        UnsupportedServer: vLLM runs without our connector.
        VLLMError: The server cannot be reached.
    """

    _engine: VLLMEngine
    _tenant: str
    _headers: Mapping[str, str]

    batches_calls: ClassVar[bool] = True  # vLLM does it

    @takes_choices
    def __init__(
        self,
        model: InvariantModel | str | Path | None = None,
        *,
        url: str | None = None,
        llm: LLM | None = None,
        engine: VLLMEngine | None = None,
        tenant: str = "",
        api_key: str | None = None,
        timeout: float = 600.0,
        **choices: Any,
    ) -> None:
        if sum(each is not None for each in (url, llm, engine)) != 1:
            raise InvalidChoice("expected either url, the address of a vLLM server, or llm, a vllm.LLM")
        if url is not None:
            engine = HTTPEngine(url, api_key=api_key, timeout=timeout)
        elif engine is None:
            from vllm_invariant_rag.llm_engine import LLMEngine  # needs vLLM

            engine = LLMEngine(llm)
        facts = engine.facts
        if not isinstance(model, InvariantModel):
            model = _load_without_weights(facts.source if model is None else model)
        if type(model) not in (InvariantModel, type(self)):
            raise InvalidChoice(
                f"expected an InvariantModel, a hub id or a folder, got {type(model).__name__}",
                hint="It prepares prompts; vLLM runs them, so a router or another backend has nothing to do.",
            )
        lm = model.with_cache(None).with_method(**choices)
        window = min(filter(None, (lm.context_window, facts.max_tokens)))
        prefiller = _Elsewhere(lm.model, replace(lm.choices, context_window=window), _State([], source=facts.source))
        mine = {"_engine": engine, "_tenant": _check_tenant(tenant), "_headers": {}}
        vars(self).update(vars(lm), prefiller=prefiller, **mine)
        self._check_supported()

    def __repr__(self) -> str:
        return f"VLLMBackend({super().__repr__()})"

    def __deepcopy__(self, memo: object = None) -> Self:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise UnsupportedCombination(
            "expected a model that can be pickled, got one that is connected to vLLM",
            hint="Make another VLLMBackend in the other process.",
        )

    def _with(self, **changes: Any) -> Self:
        other = super()._with(**changes)
        other._check_supported()
        return other

    def _check_supported(self) -> None:
        """Raise UnsupportedCombination for choices that vLLM cannot run."""
        if self.intervention is not None or self.cache is not None:
            raise UnsupportedCombination(
                "expected no intervention and no cache of our own on vLLM, which has its own attention and prefix cache"
            )
        check_method(self.method)
        self._engine.facts.check(ArrangedPrompt(self.method.name, Layout((2, 1), ((1, 2),))), 0, UnsupportedCombination)

    def with_tenant(self, tenant: str) -> Self:
        """Return a backend for the documents of another tenant, on the same vLLM."""
        other = super()._with()
        vars(other)["_tenant"] = _check_tenant(tenant)
        return other

    def with_headers(self, headers: Mapping[str, str]) -> Self:
        """Return a backend whose requests have these headers: `x-request-id` and `traceparent` of the client."""
        other = super()._with()
        vars(other)["_headers"] = dict(headers)
        return other

    def check_ready(self) -> None:
        """Check that vLLM takes requests; VLLMError if it does not, or cannot be reached."""
        self._engine.check_ready()

    def with_routing(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a router runs two branches of a model in this process."""
        _refuse("routing")

    def _generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int, seed: Seeds, kwargs: dict[str, Any]
    ) -> list[Generation]:
        check_options({**kwargs, "seed": seed}, self.model)
        seeds: Sequence[Any] = seed if isinstance(seed, list | tuple) else [seed] * len(prompts)
        fields, stopped = sampling_of(self, max_new_tokens, kwargs)
        prepared = [self.prepare_to_generate(each, max_new_tokens) for each in prompts]
        requests = [self._request(each, {**fields, "seed": own}) for each, own in zip(prepared, seeds, strict=True)]
        streamer = kwargs.get("streamer")
        if streamer is not None:
            if (sequences := len(prepared) * fields["n"]) != 1:
                raise UnsupportedCombination(f"expected one sequence to stream, got {sequences}")
            streamer.put(torch.tensor([prepared[0].input_ids]))
            requests = [replace(requests[0], on_tokens=lambda tokens: streamer.put(torch.tensor(tokens)))]
        answers = self._engine.complete(requests, stopped)
        if streamer is not None:
            streamer.end()
        return [
            each.generation(
                self.tokenizer,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
                cached_tokens=completion.cached_tokens,
                top_logprobs=completion.likeliest(fields["logprobs"]),
            )
            for each, completions in zip(prepared, answers, strict=True)
            for completion in completions
        ]

    def _score(self, prepared: PreparedPrompt, options: Sequence[TokenIds]) -> list[float]:
        # One request for one token after each prefix of a candidate; equal prefixes share a request.
        steps = sorted({(each[:index], each[index]) for each in options for index in range(len(each))})
        # vLLM takes log-probabilities before other tokens are masked.
        fields = {"max_tokens": 1, "n": 1, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        requests = [self._request(prepared, {**fields, "allowed_token_ids": [last]}, before) for before, last in steps]
        logprobs: dict[tuple[TokenIds, int], float] = {}
        for step, (completion,) in zip(steps, self._engine.complete(requests), strict=True):
            if completion.token_ids != [step[1]]:
                raise UnsupportedServer(f"expected vLLM to write the only allowed token {step[1]}, got {completion}")
            logprobs[step] = completion.logprobs[0]
        return [sum(logprobs[each[:index], each[index]] for index in range(len(each))) for each in options]

    def _request(self, prepared: PreparedPrompt, fields: dict[str, Any], before: TokenIds = ()) -> EngineRequest:
        """Return the request for a prompt, and the first tokens of its answer."""
        token_ids, params, facts = (*prepared.input_ids, *before), None, self._engine.facts
        length = len(token_ids) + fields["max_tokens"]
        if length > facts.max_tokens:  # the context window limits positions, of which some methods take fewer
            raise ContextOverflow(f"expected at most {facts.max_tokens} tokens of prompt and answer, got {length}")
        if not prepared.arrangement.is_plain:
            arranged = ArrangedPrompt(self.method.name, prepared.arrangement.layout)
            facts.check(arranged, length, UnsupportedCombination)
            params = arranged.as_params()
        return EngineRequest(token_ids, fields, params, self._tenant, self._headers)


class _Elsewhere(Prefiller):
    """Refuses forward passes in this process."""

    device = torch.device("cpu")

    def exclusive(self, *, gradients: bool = False) -> NoReturn:
        _refuse("a forward pass")


@dataclass
class _State(SharedState):
    """State of a model that vLLM loaded from `source`."""

    source: str = ""

    def weights_digest(self, model: PreTrainedModel) -> str:
        return digest_of("vllm", self.source, repr(model.config))


def _load_without_weights(source: str | Path) -> InvariantModel:
    """Load configuration, generation configuration and tokenizer of a model, or raise ModelNotFound."""
    tokenizer, config = load_tokenizer(source), load_config(source)
    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
    with suppress(OSError):  # there is none: that of the configuration stays
        model.generation_config = GenerationConfig.from_pretrained(model_location(source))
    config._name_or_path = str(source)
    setattr(model, RUNS_ELSEWHERE, True)
    return InvariantModel(model.eval(), tokenizer)


def _refuse(feature: str) -> NoReturn:
    raise UnsupportedCombination(
        f"expected a model in this process for {feature}, got one on vLLM", hint="Load an InvariantModel here."
    )


def _check_tenant(tenant: object) -> str:
    if any("\ud800" <= each <= "\udfff" for each in check_text("tenant", tenant)):
        raise InvalidChoice(f"tenant: expected text of UTF-8, got {tenant!r}")
    return str(tenant)
