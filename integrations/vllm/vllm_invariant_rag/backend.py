"""`VLLMBackend`: an `InvariantModel` that vLLM runs, from one copy of the weights: vLLM's own.

It writes prompts as any `InvariantModel` does, for which the tokenizer suffices. vLLM reads the documents with arranged
attention in its own forward pass, and writes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, overload

import torch
from invariant_rag.checks import check_text
from invariant_rag.errors import ContextOverflow, InvalidChoice, InvalidOption, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel, Seeds
from invariant_rag.generation.options import check_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens
from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.facts import ServerFacts
from vllm_invariant_rag.http_engine import HTTPEngine
from vllm_invariant_rag.reading import Reading, check_method, decodes_plainly
from vllm_invariant_rag.sampling import Sampling, sampling_of
from vllm_invariant_rag.weightless import RemoteState, load_without_weights

if TYPE_CHECKING:
    from invariant_rag.generation.choices import ResolvedChoices
    from invariant_rag.generation.prepare import Overflow, PreparedPrompt
    from invariant_rag.methods import Method
    from invariant_rag.orderings import Ordering
    from invariant_rag.segments import Prompt, TokenIds
    from vllm import LLM


@dataclass(frozen=True)
class _Connection:
    """A vLLM, for whom it is asked, and by what names of the request."""

    engine: Engine
    facts: ServerFacts
    tenant: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def request(self, token_ids: TokenIds, reading: Mapping[str, Any] | None, fields: dict[str, Any]) -> EngineRequest:
        """Return a request."""
        return EngineRequest(token_ids, self.tenant, reading, fields, self.headers)


class VLLMBackend(InvariantModel):
    """An `InvariantModel` whose `generate`, `stream` and `score` run on vLLM.

    Greedy answers are those of `InvariantModel.generate` up to rounding, sampled ones are drawn by vLLM's own random
    numbers. `logits` and `arranged` need a model in this process, and are refused.

    Example:
        ```python
        lm = VLLMBackend(url="http://127.0.0.1:8000")
        lm.generate(lm.chat_prompt("What colour is the flag of Ostra?", documents)).text
        ```

    Args:
        model: Hub id or folder of the tokenizer and the configuration. None: the place that vLLM loaded its model from.
            Or an `InvariantModel`, for its tokenizer and its choices.
        url: Address of a vLLM server.
        llm: Or a `vllm.LLM` in this process.
        engine: Or another `Engine`.
        tenant: Whose documents these are. Tenants share no keys and values.
        method: As for `InvariantModel`. None: that of the model, or `rotor`.
        ordering: As for `InvariantModel`. None: that of the model, or the method's default.
        max_segment_tokens: As for `InvariantModel`.
        overflow: As for `InvariantModel`.
        api_key: The server's key.
        timeout: Seconds until a request to the server fails.

    Raises:
        InvalidChoice: Not exactly one of `url`, `llm` and `engine` was given, or the tenant is no text.
        ModelNotFound: There is no tokenizer where vLLM loaded its model from.
        UnsupportedCombination: vLLM cannot read prompts with the method; the message says why.
        UnsupportedServer: vLLM runs without our connector.
        VLLMError: The server cannot be reached.
    """

    def __init__(
        self,
        model: InvariantModel | str | Path | None = None,
        *,
        url: str | None = None,
        llm: LLM | None = None,
        engine: Engine | None = None,
        tenant: str = "",
        method: str | Method | None = None,
        ordering: str | Ordering | None = None,
        max_segment_tokens: int | None = None,
        overflow: Overflow | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        engine = _engine(url, llm, engine, api_key, timeout)
        facts = engine.facts()
        if not isinstance(model, InvariantModel):
            model = load_without_weights(facts.source if model is None else model)
        if type(model) not in (InvariantModel, type(self)):
            raise InvalidChoice(
                f"expected an InvariantModel, a hub id or a folder, got {type(model).__name__}",
                hint="It writes prompts; vLLM runs them, so a router or another backend has nothing to do.",
            )
        lm = model.with_method(
            method, ordering=ordering, max_segment_tokens=max_segment_tokens, overflow=overflow
        ).with_cache(None)
        window = min(filter(None, (lm.context_window, facts.max_tokens)))
        choices = replace(lm.choices, context_window=window)
        shared = RemoteState([], source=facts.source)
        vars(self).update(
            vars(lm),
            prefiller=replace(lm.prefiller, choices=choices, shared=shared),
            _connection=_Connection(engine, facts, _check_tenant(tenant)),
        )
        self._check_supported(choices)

    def __repr__(self) -> str:
        return f"VLLMBackend({super().__repr__()})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedCombination(
            "expected a model that can be pickled, got one that is connected to vLLM",
            hint="Make another VLLMBackend in the other process.",
        )

    def _with(self, **changes: Any) -> Self:
        other = super()._with(**changes)
        other._check_supported(other.choices)
        return other

    def _check_supported(self, choices: ResolvedChoices) -> None:
        """Raise UnsupportedCombination for choices that vLLM cannot run."""
        if choices.intervention is not None or choices.cache is not None:
            raise UnsupportedCombination(
                "expected no intervention and no cache of our own on vLLM, which has its own attention and prefix cache"
            )
        check_method(choices.method)
        if not (self._connection.facts.arranges_decoding or decodes_plainly(choices.method)):
            raise UnsupportedCombination(
                f"expected a method that decodes as a plain model does, got {choices.method.name!r}: CUDA graphs "
                "replay vLLM's own attention",
                hint='Start vLLM with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'.',
            )

    batches_calls: ClassVar[bool] = True
    """Whether calls of several threads are batched anyhow: vLLM does it."""

    @property
    def device(self) -> torch.device:
        """Device of the input ids: none, since they go to vLLM."""
        return torch.device("cpu")

    def with_tenant(self, tenant: str) -> Self:
        """Return a backend for the documents of another tenant, on the same vLLM.

        Raises:
            InvalidChoice: The tenant is no text.
        """
        other = super()._with()
        vars(other)["_connection"] = replace(self._connection, tenant=_check_tenant(tenant))
        return other

    def with_headers(self, headers: Mapping[str, str]) -> Self:
        """Return a backend whose requests have these headers: `x-request-id` and `traceparent` of who asks."""
        other = super()._with()
        vars(other)["_connection"] = replace(self._connection, headers=dict(headers))
        return other

    def check_ready(self) -> None:
        """Check that vLLM takes requests.

        Raises:
            VLLMError: It does not, or cannot be reached.
        """
        self._connection.engine.check_ready()

    def with_routing(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a router asks two branches of a model in this process."""
        _refuse("routing")

    def logits(self, prompt: Prompt) -> NoReturn:
        """Refuse: vLLM returns log-probabilities of tokens, which `score` and `generate` give."""
        _refuse("logits")

    def arranged(self, prompts: Sequence[PreparedPrompt]) -> NoReturn:
        """Refuse: vLLM's forward pass is its own."""
        _refuse("arranged attention")

    @overload
    def generate(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: Seeds = None, **kwargs: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, seed: Seeds = None, **kwargs: Any
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        seed: Seeds = None,
        **kwargs: Any,
    ) -> Generation | list[Generation]:
        """Generate with vLLM.

        Args:
            prompt: One prompt, or several, which run at the same time.
            max_new_tokens: As for `InvariantModel.generate`.
            seed: Seed of vLLM's sampling: one for all prompts, or a list with one for each.
            **kwargs: As for `InvariantModel.generate`: `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`,
                `repetition_penalty`, `stop_strings`, `min_new_tokens`, `num_return_sequences`, `eos_token_id`,
                `generation_config`, `streamer`, and what `constrain` and `ToolCalling.constrain` return.

        Raises:
            InvalidOption: As for `InvariantModel.generate`.
            RequestRefused: vLLM cannot read the documents as asked; its log says why.
            UnsupportedCombination: vLLM does not know a keyword.
            VLLMError: vLLM answered an error, or cannot be reached.
        """
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        prompts = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else [prompt]
        check_options({**kwargs, "seed": seed}, self.model)
        seeds: Sequence[Any] = seed if isinstance(seed, list | tuple) else [seed] * len(prompts)
        if len(seeds) != len(prompts):
            raise InvalidOption(f"seed: expected one for each of {len(prompts)} prompts, got {len(seeds)}")
        sampling = sampling_of(self, wanted, kwargs)
        samplings = [sampling.with_seed(each) for each in seeds]
        prepared = [self.prepare_to_generate(each, sampling.fields["max_tokens"]) for each in prompts]
        if not prepared:
            return []
        if sampling.streamer is None and sampling.stopped is None:
            answers = self._connection.engine.complete_all(
                [self._request(each, own.fields) for each, own in zip(prepared, samplings, strict=True)]
            )
        else:
            if sampling.streamer is not None and len(prepared) * sampling.sequences > 1:
                raise UnsupportedCombination(
                    f"expected one sequence to stream, got {len(prepared) * sampling.sequences}"
                )
            answers = [self._complete(each, own) for each, own in zip(prepared, samplings, strict=True)]
        generations = [
            each.generation(self.tokenizer, **vars(completion))
            for each, completions in zip(prepared, answers, strict=True)
            for completion in completions
        ]
        return generations[0] if not isinstance(prompt, Sequence) and len(generations) == 1 else generations

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Return the log-probability of each candidate as the continuation of the prompt; see `InvariantModel.score`.

        vLLM is asked for one token after each beginning of a candidate; equal beginnings are asked for once.
        """
        options = self.candidate_ids(candidates)
        if not options:
            return []
        prepared = self.prepare_to_generate(prompt, max(map(len, options)))
        steps = sorted({(each[:index], each[index]) for each in options for index in range(len(each))})
        requests = [self._request(prepared, _step_fields(token), before) for before, token in steps]
        logprobs: dict[tuple[TokenIds, int], float] = {}
        for step, (completion,) in zip(steps, self._connection.engine.complete_all(requests), strict=True):
            if completion.token_ids != [step[1]]:
                raise UnsupportedServer(f"expected vLLM to write the only allowed token {step[1]}, got {completion}")
            logprobs[step] = completion.logprobs[0]
        return [sum(logprobs[each[:index], each[index]] for index in range(len(each))) for each in options]

    @property
    def _connection(self) -> _Connection:
        connection: _Connection = vars(self)["_connection"]
        return connection

    def _request(self, prepared: PreparedPrompt, fields: dict[str, Any], before: TokenIds = ()) -> EngineRequest:
        """Return the request for a prompt, and the first tokens of its answer."""
        facts, token_ids = self._connection.facts, (*prepared.input_ids, *before)
        window, length = facts.sliding_window, len(token_ids) + fields["max_tokens"]
        if length > facts.max_tokens:  # the context window limits positions, of which some methods take fewer
            raise ContextOverflow(f"expected at most {facts.max_tokens} tokens of prompt and answer, got {length}")
        if prepared.arrangement.is_plain:
            return self._connection.request(token_ids, None, fields)
        reading = Reading.of(self.method, prepared.arrangement.layout)
        if window is not None and length > window and not reading.is_plain_behind:
            raise UnsupportedCombination(
                f"expected prompt and answer within the sliding window of {window} tokens for {self.method.name!r}, "
                "whose answers read documents elsewhere than they lie",
                hint="Use rotor or isolated.",
            )
        return self._connection.request(token_ids, reading.as_params(), fields)

    def _complete(self, prepared: PreparedPrompt, sampling: Sampling) -> list[Completion]:
        """Run one prompt, token by token."""
        request = self._request(prepared, sampling.fields)
        on_tokens: OnTokens | None = None
        if (streamer := sampling.streamer) is not None:
            streamer.put(torch.tensor([prepared.input_ids]))

            def emit(_: int, tokens: Sequence[int]) -> None:
                if tokens:
                    streamer.put(torch.tensor(tokens))

            on_tokens = emit
        completions = self._connection.engine.complete(request, on_tokens, sampling.stopped)
        if streamer is not None:
            streamer.end()
        return completions


def _engine(url: str | None, llm: LLM | None, engine: Engine | None, api_key: str | None, timeout: float) -> Engine:
    if sum(each is not None for each in (url, llm, engine)) != 1:
        raise InvalidChoice("expected either url, the address of a vLLM server, or llm, a vllm.LLM")
    if url is not None:
        return HTTPEngine(url, api_key=api_key, timeout=timeout)
    if engine is not None:
        return engine
    from vllm_invariant_rag.llm_engine import LLMEngine  # needs vLLM

    return LLMEngine(llm)


def _refuse(wanted: str) -> NoReturn:
    raise UnsupportedCombination(
        f"expected a model in this process for {wanted}, got one on vLLM", hint="Load an InvariantModel here."
    )


def _check_tenant(tenant: object) -> str:
    checked = check_text("tenant", tenant)
    try:
        checked.encode()
    except UnicodeEncodeError as error:
        raise InvalidChoice(f"tenant: expected text of UTF-8, got {tenant!r}") from error
    return checked


def _step_fields(token: int) -> dict[str, Any]:
    """Return what asks for the log-probability of one token. That of vLLM is taken before other tokens are masked."""
    return {
        "max_tokens": 1,
        "n": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "ignore_eos": True,
        "logprobs": 0,
    }
