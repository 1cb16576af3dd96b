"""`VLLMBackend`: an `InvariantModel` whose answers vLLM writes.

It prepares prompts and prefills their sets as any `InvariantModel` does, with weights in this process, and leaves the
last text and the answer to vLLM. `logits` and `arranged` run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import torch
from invariant_rag.errors import ContextOverflow, InvalidChoice, UnsupportedCombination
from invariant_rag.generation.kv_cache_redis import without_secrets
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.option_checks import check_options
from invariant_rag.generation.options import resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation, Usage
from invariant_rag.generation.prefix_cache import check_cacheable

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens
from vllm_invariant_rag.errors import EntryUnusable, UnsupportedServer
from vllm_invariant_rag.http_engine import HTTPEngine
from vllm_invariant_rag.layout import check_method
from vllm_invariant_rag.prefill import Prefilled, PrefillWorker
from vllm_invariant_rag.sampling import Sampling, sampling_of

if TYPE_CHECKING:
    from invariant_rag.attention.call import Backend
    from invariant_rag.generation.choices import Choices
    from invariant_rag.generation.overflow import Overflow
    from invariant_rag.generation.prepare import PreparedPrompt
    from invariant_rag.methods import Method
    from invariant_rag.orderings import Ordering
    from invariant_rag.segments import Prompt, TokenIds
    from vllm import LLM

    from vllm_invariant_rag.server_facts import ServerFacts


@dataclass(frozen=True)
class _Connection:
    """A vLLM, what feeds it, and what it serves."""

    engine: Engine
    worker: PrefillWorker
    facts: ServerFacts
    writes_to: str


class VLLMBackend(InvariantModel):
    """An `InvariantModel` whose `generate`, `stream` and `score` run on vLLM.

    Decoding is vLLM's: greedy answers are those of `InvariantModel.generate` up to rounding, sampled ones are drawn by
    vLLM's own random numbers. Methods that have an attention of their own while they decode are refused.

    Example:
        ```python
        lm = VLLMBackend(url="http://127.0.0.1:8000")
        lm.generate(lm.chat_prompt("What colour is the flag of Ostra?", documents)).text
        ```

    Args:
        model: The model with which sets are prefilled: an `InvariantModel`, or the hub id or folder of one. None: the
            one that vLLM serves, loaded from the same place.
        url: Address of a vLLM server.
        llm: Or a `vllm.LLM` in this process.
        folder: The folder that vLLM's connector reads, as this process sees it. None: as vLLM sees it.
        redis_url: Or the address of the Redis that it reads. None: as vLLM sees it, but for user and password, which no
            server tells.
        tenant: Whose documents these are. Tenants share no keys and values.
        method: As for `InvariantModel`. None: that of the model, or `rotor`.
        ordering: As for `InvariantModel`. None: that of the model, or the method's default.
        backend: As for `InvariantModel`.
        max_segment_tokens: As for `InvariantModel`.
        overflow: As for `InvariantModel`.
        device_map: Where to load a model, as in transformers.
        api_key: The server's key.
        timeout: Seconds until a request to the server fails.
        max_disk_bytes: Size of the folder; see `PrefillWorker`.

    Raises:
        InvalidChoice: Neither or both of `url` and `llm` were given.
        UnsupportedCombination: vLLM cannot decode with the method; the message says why.
        UnsupportedServer: vLLM runs without our connector, or serves another model or dtype.
        VLLMError: The server cannot be reached.
    """

    def __init__(
        self,
        model: InvariantModel | str | Path | None = None,
        *,
        url: str | None = None,
        llm: LLM | None = None,
        folder: str | Path | None = None,
        redis_url: str | None = None,
        tenant: str = "",
        method: str | Method | None = None,
        ordering: str | Ordering | None = None,
        backend: str | Backend | None = None,
        max_segment_tokens: int | None = None,
        overflow: Overflow | None = None,
        device_map: str | None = "auto",
        api_key: str | None = None,
        timeout: float = 600.0,
        max_disk_bytes: int = 10 << 30,
    ) -> None:
        engine = _engine(url, llm, api_key, timeout)
        facts = engine.facts()
        if not isinstance(model, InvariantModel):
            source = facts.source if model is None else model
            model = InvariantModel.from_pretrained(source, dtype=facts.dtype, device_map=device_map)
        if type(model) is not InvariantModel:
            raise InvalidChoice(
                f"expected an InvariantModel, a hub id or a folder, got {type(model).__name__}",
                hint="The model prefills; vLLM writes the answers, so a router or another backend has nothing to do.",
            )
        lm = model.with_method(
            method,
            ordering=ordering,
            backend=backend,
            max_segment_tokens=max_segment_tokens,
            overflow=overflow,
        )
        if str(lm.model.dtype) != f"torch.{facts.dtype}":
            raise UnsupportedServer(
                f"expected a model in {facts.dtype}, as vLLM serves it, got {lm.model.dtype}",
                hint="Load the model with dtype=..., or start vLLM with --dtype.",
            )
        if folder is None and redis_url is None:
            folder, redis_url = facts.folder, facts.redis_url
        worker = PrefillWorker(lm, folder, redis_url=redis_url, tenant=tenant, max_disk_bytes=max_disk_bytes)
        if worker.model != facts.model:
            raise UnsupportedServer(
                f"expected a vLLM that serves the files of {lm.name!r}, got one that serves {facts.source!r}",
                hint="Leave `model` away, or start vLLM with the same files.",
            )
        window = min(filter(None, (lm.context_window, facts.max_model_len)))
        choices = replace(lm.choices, limits=replace(lm.choices.limits, context_window=window))
        _check_supported(lm, choices)
        vars(self).update(
            vars(lm),
            prefiller=replace(lm.prefiller, choices=choices),
            _connection=_Connection(engine, worker, facts, str(folder or without_secrets(str(redis_url)))),
        )

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

    def _with(self, choices: Choices) -> Self:
        _check_supported(self, choices)
        return super()._with(choices)

    @property
    def batches_calls(self) -> bool:
        """Whether calls of several threads run together anyhow: vLLM puts them together."""
        return True

    def with_tenant(self, tenant: str) -> Self:
        """Return a backend for the documents of another tenant, on the same vLLM and with the same weights.

        Raises:
            InvalidChoice: The tenant is no text.
        """
        other = super()._with(self.prefiller.choices)
        vars(other)["_connection"] = replace(self._connection, worker=self._connection.worker.with_tenant(tenant))
        return other

    def check_ready(self) -> None:
        """Check that vLLM takes requests.

        Raises:
            VLLMError: It does not, or cannot be reached.
        """
        self._connection.engine.check_ready()

    def with_routing(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a router asks two branches of a model in this process.

        Raises:
            UnsupportedCombination: Always.
        """
        raise UnsupportedCombination(
            "expected a model in this process for routing, got one on vLLM", hint="Route an InvariantModel."
        )

    @overload
    def generate(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Generation | list[Generation]:
        """Generate with vLLM, from prefilled sets.

        Args:
            prompt: One prompt, or several, which run at the same time.
            max_new_tokens: As for `InvariantModel.generate`.
            seed: Seed of vLLM's sampling, for each prompt.
            **kwargs: As for `InvariantModel.generate`: `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`,
                `repetition_penalty`, `stop_strings`, `min_new_tokens`, `num_return_sequences`, `eos_token_id`,
                `generation_config`, `streamer`, and what `constrain` and `ToolCalling.constrain` return.

        Raises:
            InvalidOption: As for `InvariantModel.generate`.
            EntryUnusable: Keys and values could not be loaded, also after another prefill.
            UnsupportedCombination: vLLM does not know a keyword.
            VLLMError: vLLM answered an error, or cannot be reached.
        """
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        prompts = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else [prompt]
        check_options({**kwargs, "seed": seed}, self.model)
        sampling = sampling_of(self, wanted, seed, kwargs)
        prepared = [self.prepare_to_generate(each, sampling.fields["max_tokens"]) for each in prompts]
        if not prepared:
            return []
        if sampling.streamer is None and sampling.stopped is None:
            answers = self._complete_all(prepared, sampling)
        else:
            if sampling.streamer is not None and len(prepared) * sampling.sequences > 1:
                raise UnsupportedCombination(
                    f"expected one sequence to stream, got {len(prepared) * sampling.sequences}"
                )
            answers = [self._complete(each, sampling) for each in prepared]
        generations = [
            self._generation(each, _finished(each, completion, sampling), prefilled)
            for each, (prefilled, completions) in zip(prepared, answers, strict=True)
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
        prefilled = self._prefill(prepared, max(map(len, options)))
        requests = [_step_request(prefilled, before, token) for before, token in steps]
        results = self._connection.engine.complete_all(requests)
        logprobs: dict[tuple[TokenIds, int], float] = {}
        for step, request, result in zip(steps, requests, results, strict=True):
            (completion,) = self._retried(prepared, request, result)
            if completion.token_ids != [step[1]]:
                raise UnsupportedServer(f"expected vLLM to write the only allowed token {step[1]}, got {completion}")
            logprobs[step] = completion.logprobs[0]
        return [sum(logprobs[each[:index], each[index]] for index in range(len(each))) for each in options]

    @property
    def _connection(self) -> _Connection:
        connection: _Connection = vars(self)["_connection"]
        return connection

    def _prefill(self, prepared: PreparedPrompt, new_tokens: int) -> Prefilled:
        """Have the sets of a prompt where vLLM finds them.

        Raises:
            ContextOverflow: The prompt is too long for vLLM, in which keys that count several times lie several times.
        """
        prefilled = self._connection.worker.prefill(self, prepared)
        length = len(prefilled.token_ids) + new_tokens
        if length > (most := self._connection.facts.max_model_len):
            raise ContextOverflow(
                f"expected at most {most} tokens of prompt and answer in vLLM, got {length} "
                f"with the copies of {self.method.name!r}"
            )
        return prefilled

    def _complete(self, prepared: PreparedPrompt, sampling: Sampling) -> tuple[Prefilled, list[Completion]]:
        """Run one prompt, token by token."""
        emitted = 0
        prefilled = self._prefill(prepared, sampling.fields["max_tokens"])
        request = _request(prefilled, sampling)
        on_tokens: OnTokens | None = None
        if (streamer := sampling.streamer) is not None:
            streamer.put(torch.tensor([prepared.input_ids]))

            def emit(_: int, tokens: Sequence[int]) -> None:
                nonlocal emitted
                if shown := tokens[: sampling.max_new_tokens - emitted]:
                    streamer.put(torch.tensor(shown))
                emitted += len(shown)

            on_tokens = emit
        engine = self._connection.engine
        try:
            completions = engine.complete(request, on_tokens, sampling.stopped)
        except EntryUnusable:
            if emitted:  # a preempted request that could not load again: its tokens are out already
                raise
            completions = self._complete_again(prepared, request, on_tokens, sampling.stopped)
        if streamer is not None:
            streamer.end()
        return prefilled, completions

    def _complete_all(
        self, prepared: Sequence[PreparedPrompt], sampling: Sampling
    ) -> list[tuple[Prefilled, list[Completion]]]:
        """Run several prompts at the same time."""
        prefilled = [self._prefill(each, sampling.fields["max_tokens"]) for each in prepared]
        requests = [_request(each, sampling) for each in prefilled]
        results = self._connection.engine.complete_all(requests)
        answers = map(self._retried, prepared, requests, results)
        return list(zip(prefilled, answers, strict=True))

    def _retried(
        self, prepared: PreparedPrompt, request: EngineRequest, result: list[Completion] | Exception
    ) -> list[Completion]:
        """Return a result. If keys and values were lost between prefill and load, prefill and run once more."""
        if isinstance(result, EntryUnusable):
            return self._complete_again(prepared, request)
        if isinstance(result, Exception):
            raise result
        return result

    def _complete_again(
        self,
        prepared: PreparedPrompt,
        request: EngineRequest,
        on_tokens: OnTokens | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Prefill once more, and run.

        Raises:
            EntryUnusable: The keys and values could not be loaded now either.
        """
        connection = self._connection
        connection.worker.prefill(self, prepared, anew=True)
        try:
            return connection.engine.complete(request, on_tokens, stopped)
        except EntryUnusable as error:
            raise EntryUnusable(
                f"{error}; they were prefilled twice",
                hint=f"They are written to {connection.writes_to}, and vLLM reads "
                f"{connection.facts.folder or connection.facts.redis_url}: is that the same place? Then it may be too "
                "small for all requests at the same time (max_disk_bytes; maxmemory of Redis). vLLM's log says more.",
            ) from error

    def _generation(self, prepared: PreparedPrompt, completion: Completion, prefilled: Prefilled) -> Generation:
        tokens, tokenizer = completion.token_ids, self.tokenizer
        return Generation(
            text="" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True)),
            token_ids=tuple(tokens),
            logprobs=tuple(completion.logprobs),
            finish_reason=completion.finish_reason,
            usage=Usage(len(prepared.input_ids), len(tokens), prefilled.cached_tokens),
            order=prepared.order,
            dropped=prepared.dropped,
            trimmed=prepared.trimmed,
            sets=prepared.sets,
            method=prepared.method,
            labels=prepared.labels,
            invariant=prepared.invariant,
        )


def _engine(url: str | None, llm: LLM | None, api_key: str | None, timeout: float) -> Engine:
    if (url is None) == (llm is None):
        raise InvalidChoice("expected either url, the address of a vLLM server, or llm, a vllm.LLM")
    if url is not None:
        return HTTPEngine(url, api_key=api_key, timeout=timeout)
    from vllm_invariant_rag.llm_engine import LLMEngine  # needs vLLM

    return LLMEngine(llm)


def _check_supported(lm: InvariantModel, choices: Choices) -> None:
    """Raise UnsupportedCombination for choices that vLLM cannot decode with."""
    check_cacheable(lm.model, choices.method, choices.intervention)
    check_method(choices.method)


def _request(prefilled: Prefilled, sampling: Sampling) -> EngineRequest:
    return EngineRequest(prefilled.token_ids, prefilled.cache_salt, prefilled.kv_transfer_params, sampling.fields)


def _finished(prepared: PreparedPrompt, completion: Completion, sampling: Sampling) -> Completion:
    """Return what vLLM wrote, without what it needs to end a grammar."""
    if sampling.structure is None:
        return completion
    end, most = sampling.structure.end(prepared.input_ids, completion.token_ids), sampling.max_new_tokens
    if end is None or end > most:
        reason = "length" if len(completion.token_ids) > most else completion.finish_reason
        return Completion(completion.token_ids[:most], completion.logprobs[:most], reason)
    return Completion(completion.token_ids[:end], completion.logprobs[:end], "stop")


def _step_request(prefilled: Prefilled, before: TokenIds, token: int) -> EngineRequest:
    """Return the request for the log-probability of one token. That of vLLM is taken before other tokens are masked."""
    fields = {
        "max_tokens": 1,
        "n": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "ignore_eos": True,
        "logprobs": 0,
    }
    token_ids = (*chain(prefilled.token_ids, before),)
    return EngineRequest(token_ids, prefilled.cache_salt, prefilled.kv_transfer_params, fields)
