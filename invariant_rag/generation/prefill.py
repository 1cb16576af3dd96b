"""Reading prompts: the model's own forward, with the attention that a method arranges, from a cache where there is one.

Everything here expects to be called inside `Reader.running`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.attention.hook import Arranged, Memory, override_attention
from invariant_rag.attention.probe import input_device, probe
from invariant_rag.attention.rope import Rotation, pristine_frequencies
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.kv_cache import fingerprint
from invariant_rag.generation.prefix_cache import PrefixCache, head_of, last_logits
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.interventions import Intervention, Reading

if TYPE_CHECKING:
    from invariant_rag.attention.call import Backend
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.methods import Method


@dataclass
class SharedState:
    """What all wrappers of one model share: its rotary embeddings, and a lock that serialises its calls."""

    rotations: list[Rotation]
    lock: RLock = field(default_factory=RLock)
    probes: WeightVersion | None = None
    digest: tuple[object, str] | None = None

    def fingerprint(self, model: PreTrainedModel) -> str:
        """Return a digest of the model, taken again after its weights, or the adapters at work, were changed."""
        stored = [parameter.data_ptr() for parameter in model.parameters()]
        if self.probes is None or self.probes.stored != stored:
            self.probes = WeightVersion.of(model, stored)
        adapters = self.probes.adapters()
        state = (stored, self.probes.sampled(), adapters, [parameter._version for parameter in model.parameters()])
        if self.digest is None or self.digest[0] != state:
            self.digest = (state, fingerprint(model, adapters))
        return self.digest[1]


@dataclass(frozen=True)
class WeightVersion:
    """What tells, without reading all of them, that the weights of a model are others.

    In-place changes count up a tensor's version, but those made through `.data` (merged adapters) do not: there a
    weight out of the middle of each tensor tells.

    Attributes:
        stored: Addresses of the parameters.
        middles: A view of one weight of each, in groups that can be stacked.
        adapted: Layers with adapters, as PEFT has them.
    """

    stored: list[int]
    middles: list[list[torch.Tensor]]
    adapted: list[Any]

    @classmethod
    def of(cls, model: PreTrainedModel, stored: list[int]) -> WeightVersion:
        """Return the probes of a model."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for each in model.parameters():
            if each.numel():
                middle = each.detach()[tuple(size // 2 for size in each.shape)]
                groups.setdefault((each.device, each.dtype), []).append(middle)
        layers = [module for module in model.modules() if module is not model and hasattr(module, "active_adapters")]
        return cls(stored, list(groups.values()), layers)

    def sampled(self) -> list[float]:
        """Return the weights in the middle."""
        return [value for group in self.middles for value in torch.stack(group).tolist()]

    def adapters(self) -> list[tuple[Any, bool]]:
        """Return which adapters each layer applies, and whether they are switched off."""
        return [(each.active_adapters, getattr(each, "disable_adapters", False)) for each in self.adapted]


_hosts: WeakKeyDictionary[PreTrainedModel, SharedState] = WeakKeyDictionary()
_hosts_lock = RLock()


def shared_state(model: PreTrainedModel) -> SharedState:
    """Return what wrappers of a model share; the model is probed the first time.

    Raises:
        UnsupportedModel: It cannot be arranged; the message says why.
    """
    with _hosts_lock:
        if model not in _hosts:
            _hosts[model] = SharedState(probe(model))
        return _hosts[model]


@dataclass(frozen=True)
class Read:
    """What was read of a prompt.

    Attributes:
        cache: Keys and values.
        memory: What the layers keep.
        cached_tokens: How many tokens a cache knew.
    """

    cache: DynamicCache
    memory: Memory
    cached_tokens: int = 0

    @property
    def length(self) -> int:
        """How many tokens were read."""
        return self.cache.get_seq_length()


@dataclass(frozen=True)
class Reader:
    """A model that reads as a method says."""

    model: PreTrainedModel
    method: Method
    backend: Backend
    intervention: Intervention | None
    host: SharedState
    reuse: PrefixCache | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        method: Method,
        backend: Backend,
        intervention: Intervention | None,
        cache: KeyValueCache | None,
    ) -> Reader:
        """Return a reader, with its share of a cache.

        Raises:
            UnsupportedModel: The model cannot be arranged.
            UnsupportedCombination: The cache does not go with the intervention, or with the model.
        """
        host = shared_state(model)
        if cache is None:
            return cls(model, method, backend, intervention, host)
        if intervention is not None:
            raise UnsupportedCombination(f"expected no cache with the intervention {intervention.name!r}, got one")
        reuse = PrefixCache(cache, model, method, partial(host.fingerprint, model), backend.name)
        return cls(model, method, backend, None, host, reuse)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return input_device(self.model)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model, without gradients, with rotary frequencies that remember no earlier call."""
        with self.host.lock, torch.no_grad(), pristine_frequencies(self.model):
            yield

    @property
    def stock_decoding(self) -> bool:
        """Whether tokens behind a prompt that was read attend as in the plain model."""
        return self.method.stock_decoding and self.intervention is None

    def attending(
        self,
        prompts: Sequence[PreparedPrompt],
        padding: Sequence[int],
        memories: Sequence[Memory],
        *,
        whole: bool = False,
        once: bool = False,
    ) -> AbstractContextManager[None]:
        """Attend as the prompts are arranged; as the model does where all of them are plain and nothing intervenes.

        With `whole`, what comes out of the model holds for all tokens, and otherwise for those of the last text. With
        `once`, in one forward; an intervention does not end.
        """
        if self.intervention is not None:
            lengths = [len(prompt.input_ids) for prompt in prompts]
            return self.intervention.at_work(self.model, Reading(lengths, padding, self.host.rotations, memories))
        if all(prompt.arrangement.is_plain for prompt in prompts):
            return nullcontext()
        arrangements, rotations = [prompt.arrangement for prompt in prompts], self.host.rotations
        arranged = Arranged(arrangements, padding, self.backend, rotations, memories, whole)
        return override_attention(self.model, arranged, last=len(rotations) - 1 if once else None)

    def decoding(
        self, prompts: Sequence[PreparedPrompt], padding: Sequence[int], memories: Sequence[Memory]
    ) -> AbstractContextManager[None]:
        """Attend as tokens behind a prompt that was read do: with most methods, as the model does."""
        return nullcontext() if self.stock_decoding else self.attending(prompts, padding, memories)

    def generating(self, prepared: PreparedPrompt, known: Read) -> AbstractContextManager[None]:
        """Attend, in the forward that reads what is not known of a prompt, as it is arranged; then as decoding does."""
        if known.length or not self.stock_decoding:
            return self.decoding([prepared], [0], [known.memory])
        return self.attending([prepared], [0], [known.memory], once=True)

    def logits(self, prepared: PreparedPrompt, keep: int) -> torch.Tensor:
        """Return the logits of at least the last `keep` tokens of a prompt `[tokens, vocabulary]`."""
        if self.reuse is not None:
            return self._finish(prepared, self.known(prepared), keep)
        with self.attending([prepared], [0], [{}]):
            return self.forward(prepared, keep, use_cache=False)

    def forward(self, prepared: PreparedPrompt, keep: int, start: int = 0, **options: Any) -> torch.Tensor:
        """Run the model over a prompt from token `start` on; return logits of at least the last `keep` tokens."""
        options |= last_logits(self.model, max(keep, 1))
        ids = torch.tensor([prepared.input_ids[start:]], device=self.device)
        if start or not prepared.is_natural:
            options["position_ids"] = torch.tensor([prepared.positions[start:]], device=self.device)
        if not start and not prepared.is_natural:
            # With a mask, transformers does not take repeated positions for several packed sequences.
            options["attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = self.model(input_ids=ids, **options).logits[0]
        return logits

    def known(self, prepared: PreparedPrompt) -> Read:
        """Read of a prompt what a cache may hold, everything before its last text; without a cache, nothing."""
        layout = prepared.arrangement.layout
        if self.reuse is None or not layout.text_spans[-1].start or not layout.sets or not prepared.suffix_length:
            return Read(DynamicCache(), Memory())
        head, cold = head_of(prepared, self.method), replace(self, reuse=None)
        cache, cached_tokens = self.reuse.read(head, lambda part: cold.read(part).cache, self.device)
        return Read(cache, Memory(), cached_tokens)

    def read(self, prepared: PreparedPrompt) -> Read:
        """Run the model over a prompt, or over what a cache does not hold of it."""
        read = self.known(prepared)
        self._finish(prepared, read, keep=1)
        return read

    def _finish(self, prepared: PreparedPrompt, known: Read, keep: int) -> torch.Tensor:
        """Read the rest of a prompt; return logits of at least the last `keep` tokens `[tokens, vocabulary]`."""
        with self.generating(prepared, known):
            return self.forward(prepared, keep, known.length, past_key_values=known.cache, use_cache=True)

    def prefill(self, prepared: PreparedPrompt) -> Read:
        """Read all tokens but the last, with which decoding starts.

        The last token takes part and is then taken away, so that rotary scalings that depend on the length see all
        of it. Layers with a sliding window keep their full length too.
        """
        read = self.read(prepared)
        read.cache.crop(-1)
        return read
