"""InvariantModel: a Hugging Face causal LM whose answer is a function of the set of segments.

Invariance is bitwise because memory order is canonical: segments are put into physical order before the input ids are
built, so every permutation of the input enters the model as the same tensor.

One generation: `prepare`, load the cached prefix, run the model's own `generate` with arranged attention, collect the
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import torch
from transformers import PreTrainedModel

from invariant_rag.attention import resolve_backend
from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.probe import input_device
from invariant_rag.attention.rope import reset_dynamic_rope
from invariant_rag.errors import ImmutableModel, InvalidChoice, InvalidPrompt
from invariant_rag.generation.choices import Choices
from invariant_rag.generation.decode import decode
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.options import generation_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation, to_generations
from invariant_rag.generation.overflow import Overflow, TokenLimits
from invariant_rag.generation.padding import batch_caches, left_pad
from invariant_rag.generation.prefill import Prefiller
from invariant_rag.generation.prefix_cache import check_cacheable
from invariant_rag.generation.prepare import PreparedPrompt, prepare
from invariant_rag.generation.shared_state import shared_state
from invariant_rag.generation.streaming import TextStream, stream_text
from invariant_rag.interventions import Intervention, resolve_intervention
from invariant_rag.methods import Method, resolve_method
from invariant_rag.models.loading import context_window, load_model
from invariant_rag.orderings import Ordering, resolve_ordering
from invariant_rag.prompts import Message, question_messages, render_chat, tokenize_text
from invariant_rag.segments import Prompt, Segment, SegmentSet, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.attention.call import Backend
    from invariant_rag.routing import RoutedModel


class InvariantModel:
    """A causal LM whose answer is a function of the set of segments, not of their order.

    A wrapper is immutable: `with_method` and `with_cache` return another one of the same weights. The wrapped model is
    probed once, never patched, and unchanged after every call. Calls from several threads are serialised per model;
    other code may call the same model meanwhile.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer. None: prompts must be token ids.
        method: How segments see each other: a name from `invariant-rag methods`, or a `Method`.
        ordering: Which segment goes where: a name from `invariant-rag orderings`, or an `Ordering`. None: the
            method's own default (`lexical`, but `given` for `sequential`).
        backend: What computes the attention: `auto`, `sdpa`, `flex` or `reference`.
        max_segment_tokens: Tokens that one segment may have. None: no limit.
        overflow: What happens to a prompt that is too long: `error`, `drop_last` or `trim_segments`.
        intervention: A change to the plain model's attention that lessens its position bias, for the method
            `sequential` only: a name from `invariant_rag.interventions.INTERVENTIONS`, or an `Intervention`. It makes
            nothing invariant; the ordering does.
        cache: Keeps keys and values of sets and segments for later prompts, in any order. None: nothing is kept.

    Raises:
        UnsupportedModel: Its attention cannot be arranged; the message says why.
        UnknownName: No such method, ordering, backend, overflow or intervention.
        UnsupportedCombination: The intervention does not go with the method or the model, or the cache with either.
    """

    prefiller: Prefiller
    """Runs the model over prompts with arranged attention. It owns the model and all choices."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method = "rotor",
        ordering: str | Ordering | None = None,
        backend: str | Backend = "auto",
        max_segment_tokens: int | None = None,
        overflow: Overflow = "error",
        intervention: str | Intervention | None = None,
        cache: KeyValueCache | None = None,
    ) -> None:
        method = resolve_method(method)
        choices = Choices(
            method=method,
            ordering=resolve_ordering(ordering, method.default_ordering),
            backend=resolve_backend(backend),
            limits=TokenLimits(context_window(model.config), max_segment_tokens, overflow),
            intervention=resolve_intervention(intervention, method, model),
            cache=cache,
        )
        self._set(tokenizer, Prefiller(model, choices, shared_state(model)))

    def _set(self, tokenizer: PreTrainedTokenizerBase | None, prefiller: Prefiller) -> None:
        """Set the state of a new wrapper: all else is derived from it."""
        cache = prefiller.choices.cache
        if not isinstance(cache, KeyValueCache | None):
            raise InvalidChoice(
                f"expected a KeyValueCache, got {type(cache).__name__}", hint="For a folder: KeyValueCache(folder=...)."
            )
        if cache is not None:
            check_cacheable(prefiller.model, prefiller.choices)
        vars(self).update(_tokenizer=tokenizer, prefiller=prefiller)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ImmutableModel(name)

    def __delattr__(self, name: str) -> NoReturn:
        raise ImmutableModel(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.model, self.tokenizer, self.choices)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | None = None,
        *,
        method: str | Method = "rotor",
        ordering: str | Ordering | None = None,
        backend: str | Backend = "auto",
        dtype: str | torch.dtype = "auto",
        device_map: str | Mapping[str, Any] | None = "auto",
        max_segment_tokens: int | None = None,
        overflow: Overflow = "error",
        intervention: str | Intervention | None = None,
        cache: KeyValueCache | None = None,
        **kwargs: Any,
    ) -> InvariantModel:
        """Load a model and its tokenizer. One that has no tokenizer takes token ids only, and a warning says so.

        Args:
            name: A hub id or a folder. None: the small model that comes with the package, which needs no network;
                `native`: the same model, fine-tuned with RoToR attention.
            method: As for `InvariantModel`, and so are the next two and the two about length.
            ordering: Which segment goes where.
            backend: What computes the attention.
            dtype: As in transformers. An embedded model computes in float32 where this is `auto`.
            device_map: As in transformers.
            max_segment_tokens: Tokens that one segment may have.
            overflow: What happens to a prompt that is too long.
            intervention: As for `InvariantModel`.
            cache: As for `InvariantModel`.
            **kwargs: Passed on to `AutoModelForCausalLM.from_pretrained` (`revision`, `quantization_config`...).

        Raises:
            ModelNotFound: There is no such model, or it is no causal LM.
            UnknownName: No such method, ordering, backend, overflow or intervention.
            UnsupportedModel: It cannot be arranged; the message says why.
        """
        method, backend = resolve_method(method), resolve_backend(backend)  # before anything is loaded
        ordering = resolve_ordering(ordering, method.default_ordering)
        model, tokenizer = load_model(name, dtype=dtype, device_map=device_map, **kwargs)
        return cls(
            model,
            tokenizer,
            method=method,
            ordering=ordering,
            backend=backend,
            max_segment_tokens=max_segment_tokens,
            overflow=overflow,
            intervention=intervention,
            cache=cache,
        )

    def with_method(
        self,
        method: str | Method | None = None,
        *,
        ordering: str | Ordering | None = None,
        backend: str | Backend | None = None,
        max_segment_tokens: int | None = None,
        overflow: Overflow | None = None,
        intervention: str | Intervention | None = None,
    ) -> Self:
        """Return a wrapper of the same weights with other choices; cheap. What is not given stays as it is.

        A new method without an ordering brings its default ordering, and without an intervention none.
        """
        changes: dict[str, Any] = {}
        resolved = self.method
        if method is not None:
            resolved = resolve_method(method)
            default = resolve_ordering(resolved.default_ordering)
            changes |= {"method": resolved, "ordering": default, "intervention": None}
        if ordering is not None:
            changes["ordering"] = resolve_ordering(ordering)
        if backend is not None:
            changes["backend"] = resolve_backend(backend)
        if max_segment_tokens is not None or overflow is not None:
            longest = self.max_segment_tokens if max_segment_tokens is None else max_segment_tokens
            changes["limits"] = TokenLimits(self.context_window, longest, overflow or self.overflow)
        if intervention is not None:
            changes["intervention"] = resolve_intervention(intervention, resolved, self.model)
        return self._with(**changes)

    def with_cache(self, cache: KeyValueCache | None) -> Self:
        """Return a wrapper of the same weights that keeps the keys and values it computes; None: that keeps none.

        Raises:
            InvalidChoice: It is no cache.
            UnsupportedCombination: The model's rotary frequencies grow with the prompt, or there is an intervention.
        """
        return self._with(cache=cache)

    def _with(self, **changes: Any) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._set(self.tokenizer, replace(self.prefiller, choices=replace(self.choices, **changes)))
        return other

    def with_routing(self, alpha: float = 0.2, *, plain_order: Literal["given", "canonical"] = "given") -> RoutedModel:
        """Return a model that asks this one and the plain model, and keeps one answer: see `invariant_rag.routing`.

        Args:
            alpha: How much more confident the invariant answer has to be.
            plain_order: The order in which the plain model reads the segments. With `given`, an answer may depend on
                it; with `canonical`, it does not.

        Raises:
            InvalidChoice: `alpha` is no finite number.
            UnknownName: No such order.
        """
        from invariant_rag.routing import RoutedModel  # routing imports this module

        return RoutedModel.over(self, alpha=alpha, plain_order=plain_order)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model."""
        return self.prefiller.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; None for one that takes token ids only."""
        tokenizer: PreTrainedTokenizerBase | None = vars(self)["_tokenizer"]
        return tokenizer

    @property
    def choices(self) -> Choices:
        """Everything that this wrapper was asked for."""
        return self.prefiller.choices

    @property
    def method(self) -> Method:
        """How segments see each other."""
        return self.choices.method

    @property
    def ordering(self) -> Ordering:
        """Which segment goes where."""
        return self.choices.ordering

    @property
    def backend(self) -> Backend:
        """What computes the attention."""
        return self.choices.backend

    @property
    def intervention(self) -> Intervention | None:
        """The change to the plain model's attention, if any."""
        return self.choices.intervention

    @property
    def cache(self) -> KeyValueCache | None:
        """Keeps keys and values of sets and segments, if any does."""
        return self.choices.cache

    @property
    def invariant(self) -> bool:
        """Whether the order in which segments are given changes no bit of the output."""
        return self.ordering.invariant

    @property
    def name(self) -> str:
        """Hub id, folder, or family of the wrapped model."""
        return str(self.model.config._name_or_path or self.model.config.model_type)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return input_device(self.model)

    @property
    def context_window(self) -> int | None:
        """Tokens that prompt and answer may have together; None where the model states no limit."""
        return self.choices.limits.context_window

    @property
    def overflow(self) -> Overflow:
        """What happens to a prompt that is too long."""
        return self.choices.limits.overflow

    @property
    def max_segment_tokens(self) -> int | None:
        """Tokens that one segment may have; None: no limit."""
        return self.choices.limits.max_segment_tokens

    def __repr__(self) -> str:
        return (
            f"InvariantModel({self.name!r}, method={self.method.name!r}, ordering={self.ordering.name!r}, "
            f"backend={self.backend.name!r})"
        )

    def chat_prompt(
        self,
        question: str | None = None,
        segments: Iterable[Segment | str] = (),
        system: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
    ) -> Prompt:
        """Render a question over documents, or a conversation, through the model's chat template.

        Args:
            question: What to ask.
            segments: The documents to answer from.
            system: The system message; None for the default.
            messages: Instead of the above: a conversation with segments in any turn. A content is a string, a
                `SegmentSet`, or a list of strings, `Segment`s and `SegmentSet`s.

        Raises:
            InvalidPrompt: Neither or both were given, or a message is not understood.
            TokenizerRequired: The model has no tokenizer.
        """
        if (question is None) == (messages is None):
            raise InvalidPrompt("expected either a question or messages")
        if messages is not None:
            return render_chat(messages, self.tokenizer)
        chosen = segments if isinstance(segments, SegmentSet) else SegmentSet(segments)
        return render_chat(question_messages(str(question), chosen, system), self.tokenizer, question)

    def prepare(self, prompt: Prompt, *, new_tokens: int = 0) -> PreparedPrompt:
        """Tokenise, order and arrange a prompt, with room for `new_tokens` in the context window.

        Raises:
            InvalidPrompt: The prompt has no token, or one that the model does not know.
            ContextOverflow: It is too long, and `overflow` is `error`.
        """
        prepared = prepare(prompt, self.tokenizer, self.method, self.ordering, self.choices.limits, new_tokens)
        self._check_vocabulary(prepared.input_ids)
        return prepared

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Return the logits at every token of the suffix: float32 `[suffix length, vocabulary]`."""
        prepared = self.prepare(prompt)
        with self.prefiller.exclusive():
            logits = self.prefiller.logits(prepared, prepared.suffix_length)
            suffix: torch.Tensor = logits[logits.shape[0] - prepared.suffix_length :].float().clone()
            return suffix

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
        """Generate with the model's own `generate`, from an arranged prefill.

        Args:
            prompt: One prompt, or several, which are decoded as one batch.
            max_new_tokens: The most tokens to generate for each prompt. None: what a `generation_config` says, or 64.
            seed: Seed for sampling; the global random state is put back afterwards. It is one for the whole process, so
                answers repeat as long as no other thread draws from it meanwhile. None: sample from the global state.
            **kwargs: The keywords of transformers' `generate`: `do_sample`, `num_beams`, `stop_strings`,
                `logits_processor`... Decoding is greedy unless `do_sample` or a `generation_config` says otherwise.

        Returns:
            One generation for one prompt, and a list for several. With `num_return_sequences`, a list in which those
            of the same prompt follow each other.

        Raises:
            InvalidPrompt: A prompt ends with a segment: the tokens to generate follow a suffix.
            UnsupportedCombination: Assisted decoding was asked for, `token_healing`, `use_cache=False` or
                `prefill_chunk_size`; `guidance_scale` with a method without stock decoding; or the model gave its
                cache up on the way.
        """
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        prompts = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else [prompt]
        prepared = [self.prepare_to_generate(each, wanted) for each in prompts]
        if not prepared:
            return []
        options = generation_options(kwargs, self.model, self.tokenizer, stock_decoding=self.choices.stock_decoding)
        with self.prefiller.exclusive(), nullcontext() if seed is None else torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            generations = self._generate(prepared, wanted, options)
        return generations[0] if isinstance(prompt, Prompt) and len(generations) == 1 else generations

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> TextStream:
        """Generate, and yield pieces of text as they come. Joined, they are the text that `generate` returns.

        Closing the stream stops the generation. An error during generation is raised from it. Once it has ended,
        its `generation` is what `generate` would have returned.

        Args:
            prompt: The prompt.
            max_new_tokens: The most tokens to generate. None: as for `generate`.
            seed: Seed for sampling.
            **kwargs: As for `generate`; one sequence, no beams.

        Raises:
            TokenizerRequired: The model has no tokenizer.
        """

        def generate(**more: Any) -> Generation:
            return self.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, **more)

        return stream_text(generate, self.tokenizer, kwargs)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Return the log-probability of each candidate as the continuation of the prompt.

        Args:
            prompt: The prompt.
            candidates: Continuations, as text or token ids. They are scored in one batch.

        Raises:
            InvalidPrompt: A candidate has no token or one that the model does not know, there is no list of them, or
                the prompt ends with a segment.
        """
        options = self.candidate_ids(candidates)
        if not options:
            return []
        longest = max(map(len, options))
        prepared = self.prepare_to_generate(prompt, longest)
        last = prepared.input_ids[-1]
        rows = [[last, *option[:-1]] + [option[-1]] * (longest - len(option)) for option in options]
        with self.prefiller.exclusive():
            prefilled = self.prefiller.prefill(prepared)
            cache = batch_caches([prefilled.cache], [0], len(options))
            with self.prefiller.decoding_attention([prefilled.state]):
                ids = torch.tensor(rows, device=self.device)
                first = prepared.positions[-1]
                positions = torch.arange(first, first + longest, device=self.device).expand(len(options), -1)
                logits = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            return [
                float(logprobs[row, torch.arange(len(option)), torch.tensor(option)].double().sum())
                for row, option in enumerate(options)
            ]

    def candidate_ids(self, candidates: Sequence[str | Sequence[int]]) -> list[TokenIds]:
        """Return the token ids of continuations to score.

        Raises:
            InvalidPrompt: A candidate has no token or one that the model does not know, or there is no list of them.
            TokenizerRequired: One is text, and the model has no tokenizer.
        """
        if isinstance(candidates, str):
            raise InvalidPrompt(
                f"expected several candidates, got one text: {candidates!r}", hint="Put it into a list."
            )
        options = [tokenize_text(each, self.tokenizer) for each in candidates]
        if not all(options):
            raise InvalidPrompt(f"expected candidates of at least one token, got none in {candidates!r}")
        for option in options:
            self._check_vocabulary(option)
        return options

    def prepare_to_generate(self, prompt: Prompt, new_tokens: int) -> PreparedPrompt:
        """Prepare a prompt that ends with a token to continue.

        Raises:
            InvalidPrompt: It has segments and no suffix.
        """
        prepared = self.prepare(prompt, new_tokens=new_tokens)
        if not prepared.suffix_length and prepared.order:
            raise InvalidPrompt("expected a suffix of at least one token behind the segments, got none")
        return prepared

    @contextmanager
    def arranged(self, prompts: Sequence[PreparedPrompt]) -> Iterator[None]:
        """Give the wrapped model's own forward the attention of these prompts, with gradients: for training.

        >>> with lm.arranged([prepared]):  # doctest: +SKIP
        ...     ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
        ...     logits = lm.model(ids, position_ids=positions, use_cache=False).logits
        ...     loss = cross_entropy(logits[0, -prepared.suffix_length : -1], answer_ids)

        Args:
            prompts: One per row of the batch, from `prepare`, all of one length.

        Raises:
            InvalidPrompt: Their lengths differ.
        """
        lengths = {len(prompt.input_ids) for prompt in prompts}
        if len(lengths) > 1:
            raise InvalidPrompt(f"expected prompts of one length in a batch, got {sorted(lengths)} tokens")
        attention = self.prefiller.arranged_attention([PromptState(prompt.arrangement) for prompt in prompts])
        with self.prefiller.shared.lock, reset_dynamic_rope(self.model), attention:
            yield

    def _check_vocabulary(self, ids: TokenIds) -> None:
        vocabulary, largest = self.model.config.get_text_config(decoder=True).vocab_size, max(ids)
        if largest >= vocabulary:
            raise InvalidPrompt(f"expected token ids below {vocabulary}, the model's vocabulary, got {largest}")

    def _generate(
        self, prepared: Sequence[PreparedPrompt], max_new_tokens: int, options: dict[str, Any]
    ) -> list[Generation]:
        prefiller = self.prefiller
        batch = left_pad(prepared, options["pad_token_id"], prefiller.device)
        if batch.positions is not None:
            options["position_ids"] = batch.positions
        copies = max(options["num_beams"], options["num_return_sequences"])
        if len(prepared) == copies == 1:  # the first forward pass of `generate` prefills what the cache lacks
            prefilled = [prefiller.load_cached_prefix(prepared[0])]
            cache, attention = prefilled[0].cache, prefiller.generation_attention(prefilled[0])
        else:  # every prompt is prefilled by itself
            prefilled = [prefiller.prefill(each) for each in prepared]
            cache = batch_caches([each.cache for each in prefilled], batch.padding, copies)
            padded = zip(prefilled, batch.padding, strict=True)
            attention = prefiller.decoding_attention([replace(each.state, padding=by) for each, by in padded])
        with attention:
            decoded = decode(self.model, batch.ids, batch.mask, cache, max_new_tokens, options)
        return to_generations(decoded, prepared, [each.cached_tokens for each in prefilled], self.tokenizer, options)


def _unpickled(
    kind: type[InvariantModel], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, choices: Choices
) -> InvariantModel:
    lm = object.__new__(kind)
    lm._set(tokenizer, Prefiller(model, choices, shared_state(model)))
    return lm
