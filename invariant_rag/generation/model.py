"""InvariantModel: a Hugging Face causal LM whose output does not depend on the order of the segments.

Invariance is bitwise because segments are sorted into physical order before the input ids are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeAlias, overload

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.probe import check_config
from invariant_rag.checks import check_items, check_number, check_text, is_iterable
from invariant_rag.errors import ImmutableModel, InvalidChoice, InvalidOption, InvalidPrompt, ModelNotFound
from invariant_rag.generation.choices import Choices, check_before_loading, known_keywords, takes_choices
from invariant_rag.generation.decode import RowSampler, decode, samples_rows
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.options import check_options, check_seed, generation_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prefill import Prefiller, batch_caches
from invariant_rag.generation.prepare import Overflow, PreparedPrompt, prepare
from invariant_rag.generation.streaming import StopOnEvent, TextQueueStreamer, TextStream
from invariant_rag.interventions import Intervention
from invariant_rag.methods import Method
from invariant_rag.models.loading import check_model, load_config, load_model
from invariant_rag.orderings import Ordering
from invariant_rag.prompts import Message, Tool, question_messages, render_chat, tokenize_text
from invariant_rag.prompts.template_probes import warn_of_unprotected_tokens
from invariant_rag.segments import Prompt, Segment, SegmentSet, TokenIds
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.attention.base import Backend
    from invariant_rag.generation.choices import ResolvedChoices
    from invariant_rag.routing import RoutedModel

Seeds: TypeAlias = int | Sequence[int | None] | None


def _choice(name: str, doc: str, holder: str = "prefiller.choices") -> Any:
    return property(attrgetter(f"{holder}.{name}"), doc=doc)


class InvariantModel:
    """A causal LM whose output depends on the set of segments, not on their order.

    A wrapper is immutable: `with_method` and `with_cache` return another of the same weights. The wrapped model is
    probed once, never patched, and unchanged after every call. Calls from several threads are serialised per model.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer. None: prompts must be token ids.
        **choices: The fields of `Choices`: `method`, `ordering`, `backend`, `max_segment_tokens`, `overflow`,
            `intervention`, `cache`, `deterministic`.

    Raises:
        UnsupportedModel: The model failed the probe; the message gives the reason.
        UnknownName: Unknown method, ordering, backend, overflow or intervention; or no such choice.
        UnsupportedCombination: The choices do not go together, or not with the model.
    """

    prefiller: Prefiller  # runs forward passes with arranged attention; it owns the model and the choices
    tokenizer: PreTrainedTokenizerBase | None  # None: prompts must be token ids

    @takes_choices
    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **choices: Any
    ) -> None:
        check_model(model)
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InvalidChoice(f"tokenizer: expected one of transformers, or None, got {shown(tokenizer)}")
        prefiller = Prefiller.of(model, Choices(**known_keywords(choices)).resolve(model))
        vars(self).update(tokenizer=tokenizer, prefiller=prefiller)

    def __setattr__(self, name: str, *value: object) -> NoReturn:
        raise ImmutableModel(name)

    __delattr__ = __setattr__

    @classmethod
    @takes_choices
    def from_pretrained(
        cls,
        name: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: str | Mapping[str, Any] | None = "auto",
        **kwargs: Any,
    ) -> InvariantModel:
        """Load a model and its tokenizer. Without a tokenizer, prompts must be token ids; a warning is issued.

        Args:
            name: A hub id or a folder. None: the small model that is part of the package, which needs no network;
                `native`: the same model, fine-tuned with RoToR attention.
            dtype: As in transformers. For embedded models, `auto` is float32.
            device_map: As in transformers.
            **kwargs: The fields of `Choices`; others are passed to `AutoModelForCausalLM.from_pretrained` (`revision`,
                `quantization_config`...).

        Raises:
            ModelNotFound: The model does not exist, or is not a causal LM.
            UnsupportedModel: Its configuration, before the weights are loaded, or the probe shows that it is none.
        """
        choices, others = check_before_loading(dtype=dtype, device_map=device_map, **kwargs)
        with suppress(ModelNotFound):  # as `load_model` says in more words
            check_config(load_config(name, **others))
        model, tokenizer = load_model(name, dtype=dtype, device_map=device_map, **others)
        if tokenizer is not None:
            warn_of_unprotected_tokens(tokenizer)
        return cls(model, tokenizer, **vars(choices))

    def with_method(self, method: str | Method | None = None, **choices: Any) -> Self:
        """Return a wrapper of the same weights with other choices; cheap. What is omitted or None is unchanged.

        A new method resets the ordering to its default and removes the intervention, unless they are given too.
        """
        return self._with(**{name: each for name, each in {"method": method, **choices}.items() if each is not None})

    def with_cache(self, cache: KeyValueCache | None) -> Self:
        """Return a wrapper of the same weights that stores keys and values in a cache. None: no cache."""
        return self._with(cache=cache)

    def _with(self, **changes: Any) -> Self:
        other = object.__new__(type(self))
        prefiller = replace(self.prefiller, choices=self.choices.change(self.model, **changes))
        vars(other).update(vars(self), prefiller=prefiller)
        return other

    def with_routing(self, alpha: float = 0.2, *, plain_order: Literal["given", "canonical"] = "given") -> RoutedModel:
        """Return a model that runs this one and the plain model, with one answer; see `invariant_rag.routing`."""
        from invariant_rag.routing import RoutedModel  # routing imports this module

        return RoutedModel.over(self, alpha=alpha, plain_order=plain_order)

    method: Method = _choice("method", "Which segments each segment attends to.")
    ordering: Ordering = _choice("ordering", "How segments are ranked.")
    backend: Backend = _choice("backend", "The attention implementation.")
    intervention: Intervention | None = _choice("intervention", "A change to the plain model's attention.")
    cache: KeyValueCache | None = _choice("cache", "Where keys and values are cached. None: nowhere.")
    context_window: int | None = _choice("context_window", "Most tokens of prompt and answer together.")
    overflow: Overflow = _choice("overflow", "Strategy for prompts that are too long.")
    deterministic: bool = _choice("deterministic", "Whether the prompts of a batch are computed one by one.")
    max_segment_tokens: int | None = _choice("max_segment_tokens", "Most tokens of one segment.")
    choices: ResolvedChoices = _choice("choices", "All choices of this wrapper.", "prefiller")
    model: PreTrainedModel = _choice("model", "The wrapped model.", "prefiller")
    device: torch.device = _choice("device", "Device of the input ids.", "prefiller")

    batches_calls: ClassVar[bool] = False
    """Whether calls of several threads are batched anyhow, so that a `MicroBatcher` need not batch them."""

    @property
    def invariant(self) -> bool:
        """Whether permuting the input segments changes no bit of the output."""
        return self.ordering.invariant

    @property
    def name(self) -> str:
        """Hub id, folder, or family of the wrapped model."""
        config = self.model.config
        return str(config._name_or_path or config.model_type)

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
        tools: Iterable[Tool | Mapping[str, Any]] = (),
        **template_kwargs: Any,
    ) -> Prompt:
        """Render a question over documents, or a conversation, through the model's chat template.

        Args:
            question: The question.
            segments: The documents to answer from.
            system: The system message. None: the default.
            messages: Instead of the above: a conversation, as `render_chat` takes it, with segments in any turn: the
                content of a message is a string, a `SegmentSet`, or a list of strings, `Segment`s and `SegmentSet`s.
            tools: Tools that the model may call; see `invariant_rag.generation.structured` for the calls.
            **template_kwargs: Variables of the chat template, such as `enable_thinking`.

        Raises:
            InvalidPrompt: Neither or both of `question` and `messages` were given, a message is malformed, or the
                template has no such variable.
        """
        if (question is None) == (messages is None):
            raise InvalidPrompt("expected either a question or messages")
        if messages is None:
            chosen = segments if isinstance(segments, SegmentSet) else SegmentSet(segments)
            messages = question_messages(check_text("question", question, error=InvalidPrompt), chosen, system)
        elif segments or system is not None:
            hint = "Put segments into the content of a message, and the system message first."
            raise InvalidPrompt("expected messages alone, got segments or a system message beside them", hint=hint)
        return render_chat(messages, self.tokenizer, question, tools=tools, template_kwargs=template_kwargs)

    def prepare(self, prompt: Prompt, *, new_tokens: int = 0) -> PreparedPrompt:
        """Tokenise, order and arrange a prompt, reserving `new_tokens` of the context window for the answer.

        Raises:
            InvalidPrompt: The prompt has no token, or one outside of the vocabulary.
            ContextOverflow: The prompt is too long and `overflow` is `error`, or its texts alone are too long.
        """
        if not isinstance(prompt, Prompt):
            hint = "Build one: lm.chat_prompt(question, texts)."
            raise InvalidPrompt(f"expected a Prompt, got {shown(prompt)}", hint=hint)
        check_number("new_tokens", new_tokens, 0)
        prepared = prepare(prompt, self.tokenizer, self.prefiller.choices, new_tokens)
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
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: Seeds = None, **kwargs: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, seed: Seeds = None, **kwargs: Any
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None, seed: Seeds = None, **kwargs: Any
    ) -> Generation | list[Generation]:
        """Generate with the model's own `generate`, from an arranged prefill.

        Args:
            prompt: One prompt, or several, which are one batch.
            max_new_tokens: Maximum number of tokens to generate per prompt. None: that of `generation_config`, or 64.
            seed: Seed for sampling; the global random state is restored afterwards. None: sample from that state, which
                all threads share. A list sets a seed for each prompt, which then gets the tokens that it has alone.
            **kwargs: Those of transformers' `generate`: `do_sample`, `num_beams`, `stop_strings`... Decoding is greedy
                unless `do_sample` or `generation_config` enables sampling. With `top_logprobs=k`, the k most likely
                tokens of each step are recorded, too; not with beams.

        Returns:
            One generation for one prompt; a list for several, or with `num_return_sequences`, where the sequences of a
            prompt are consecutive.

        Raises:
            InvalidOption: There is no such keyword, or its value is of another kind or out of bounds.
            InvalidPrompt: A prompt has segments but no suffix, so there is no token to continue.
            UnsupportedCombination: A keyword needs another prefill or another cache; the message says which.
        """
        check_seed(seed)
        limit = resolve_max_new_tokens(max_new_tokens, kwargs)
        is_single = not isinstance(prompt, Sequence) or isinstance(prompt, str)
        prompts: Any = [prompt] if is_single else prompt
        if isinstance(seed, list | tuple) and len(seed) != len(prompts):
            raise InvalidOption(f"seed: expected one for each of {len(prompts)} prompts, got {len(seed)}")
        generations = self._generate(prompts, limit, seed, kwargs)
        return generations[0] if is_single and len(generations) == 1 else generations

    def _generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int, seed: Seeds, kwargs: dict[str, Any]
    ) -> list[Generation]:
        one_by_one = self.prefiller.one_by_one
        if isinstance(seed, list | tuple):
            one_by_one = one_by_one or not samples_rows(kwargs, self.model)
            if not one_by_one:
                kwargs, seed = {**kwargs, "watermarking_config": RowSampler(seed)}, 0  # transformers draws, too
        prepared = list(map(self.prepare_to_generate, prompts, repeat(max_new_tokens)))
        seeds = list(seed) if isinstance(seed, list | tuple) else [seed] * max(len(prepared), 1)
        batches = [[each] for each in prepared] if one_by_one and prepared else [prepared]
        generations: list[Generation] = []
        for batch, own in zip(batches, seeds, strict=False):
            stock = self.prefiller.stock_decoding(batch)
            options = generation_options(kwargs, self.model, self.tokenizer, stock)
            if not batch:
                return []
            with self.prefiller.exclusive(), nullcontext() if own is None else torch.random.fork_rng():
                if own is not None:
                    torch.manual_seed(own)
                generations += self._decode(batch, max_new_tokens, options)
        return generations

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> TextStream:
        """Generate in a background thread, and yield deltas of text. Joined, they are the text of `generate`.

        Closing the stream stops the generation, and errors are raised by the stream. After the last delta, its
        attribute `generation` is what `generate` returns. The keywords are those of `generate`, with a single sequence
        and no beams; and `keep_tokens`: special tokens that are part of the text.

        Raises:
            TokenizerRequired: The model has no tokenizer.
            UnsupportedCombination: Raised by the first delta within `arranged` or a callback of the same model, for
                which its thread would wait.
        """
        limit, closed, options = resolve_max_new_tokens(max_new_tokens, kwargs), Event(), {**kwargs, "seed": seed}
        streamer = TextQueueStreamer(self.tokenizer, options.pop("keep_tokens", None))
        check_options(options, self.model)
        criteria = [*(options.get("stopping_criteria") or ()), StopOnEvent(closed)]
        more = {"max_new_tokens": limit, "streamer": streamer, "stopping_criteria": criteria}
        generate = partial(self.generate, prompt, **{**options, **more})
        return TextStream(generate, streamer, closed, self.prefiller.shared.lock.check_new_thread)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Return the log-probability of each candidate, text or token ids, as the continuation of the prompt.

        Raises:
            InvalidPrompt: As for `candidate_ids`; or the prompt has segments but no suffix.
        """
        options = self.candidate_ids(candidates)
        if not options:
            return []
        return self._score(self.prepare_to_generate(prompt, max(map(len, options))), options)

    def _score(self, prepared: PreparedPrompt, options: Sequence[TokenIds]) -> list[float]:
        with self.prefiller.exclusive():
            logits = self.prefiller.continuation_logits(prepared, options)
            rows = zip(torch.log_softmax(logits.float(), dim=-1), options, strict=True)
            return [float(row[torch.arange(len(each)), torch.tensor(each)].double().sum()) for row, each in rows]

    def candidate_ids(self, candidates: Sequence[str | Sequence[int]]) -> list[TokenIds]:
        """Return the token ids of candidate continuations.

        Raises:
            InvalidPrompt: A candidate has no token or one outside of the vocabulary, or `candidates` is a single text.
            TokenizerRequired: A candidate is text, and the model has no tokenizer.
        """
        if isinstance(candidates, str) or not is_iterable(candidates):
            hint = "Give a list of texts, or of lists of token ids."
            raise InvalidPrompt(f"expected several candidates, got {shown(candidates)}", hint=hint)
        options = [tokenize_text(each, self.tokenizer) for each in candidates]
        for option in options:
            if not option:
                raise InvalidPrompt(f"expected candidates of at least one token, got none in {shown(candidates)}")
            self._check_vocabulary(option)
        return options

    def prepare_to_generate(self, prompt: Prompt | PreparedPrompt, new_tokens: int) -> PreparedPrompt:
        """Prepare a prompt for generation, which needs a suffix to continue; one that this prepared stays as it is."""
        if isinstance(prompt, PreparedPrompt):
            return prompt
        prepared = self.prepare(prompt, new_tokens=new_tokens)
        if not prepared.suffix_length and prepared.order:
            raise InvalidPrompt("expected a suffix of at least one token after the segments, got none")
        return prepared

    @contextmanager
    def arranged(self, prompts: Sequence[PreparedPrompt]) -> Iterator[None]:
        """Use arranged attention in the wrapped model's own forward pass, with gradients, for training.

        Tokens that follow those of a prompt are its answer. Their positions count on from the prompt's last. There is
        one prompt per row of the batch, from `prepare`, all of the same length.

        >>> with lm.arranged([prepared]):  # doctest: +SKIP
        ...     ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
        ...     everything = torch.ones_like(ids)  # else transformers takes shared positions for packed sequences
        ...     logits = lm.model(ids, everything, positions, use_cache=False).logits

        Raises:
            InvalidPrompt: They are no prepared prompts, or differ in length.
        """
        check_items("prompts", prompts, PreparedPrompt, error=InvalidPrompt)
        lengths = {len(prompt.input_ids) for prompt in prompts}
        if len(lengths) > 1:
            raise InvalidPrompt(f"expected prompts of the same length in a batch, got {sorted(lengths)} tokens")
        attention = self.prefiller.arranged_attention([PromptState(prompt.arrangement) for prompt in prompts])
        with self.prefiller.exclusive(gradients=torch.is_grad_enabled()), attention:
            yield

    def _check_vocabulary(self, ids: TokenIds) -> None:
        vocabulary, largest = self.model.config.get_text_config(decoder=True).vocab_size, max(ids)
        if largest >= vocabulary:
            raise InvalidPrompt(f"expected token ids below {vocabulary}, the model's vocabulary, got {largest}")

    def _decode(
        self, prepared: Sequence[PreparedPrompt], max_new_tokens: int, options: dict[str, Any]
    ) -> list[Generation]:
        prefiller, lengths = self.prefiller, list(map(len, map(attrgetter("input_ids"), prepared)))
        padding = [max(lengths) - length for length in lengths]
        copies = max(options["num_beams"], options["num_return_sequences"])
        # The first forward pass of `generate` prefills one prompt after what its cache has of it, or several without a
        # cache; others are prefilled here.
        prefills = copies == 1 and (len(prepared) == 1 or (self.cache is None and prefiller.shares_prefill(lengths)))
        prefilled = prefiller.load_cached_prefixes(prepared) if prefills else prefiller.prefill(prepared)
        cache: Cache = batch_caches(list(map(attrgetter("cache"), prefilled)), padding, copies)
        is_whole = prefills and not cache.get_seq_length()
        states = [replace(each.state, padding=by) for each, by in zip(prefilled, padding, strict=True)]
        cached = list(map(attrgetter("cached_tokens"), prefilled))
        with prefiller.attention(states, is_whole=is_whole):
            return decode(prefiller.model, self.tokenizer, prepared, cache, max_new_tokens, options, cached)
