"""Ordering by MonoT5, a T5 reranker that is trained to generate whether a document is relevant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from invariant_rag.cancellation import check_cancelled
from invariant_rag.checks import check_number, check_text
from invariant_rag.errors import ContextOverflow, UnsupportedModel
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.models.hub import hub_reachable
from invariant_rag.orderings.relevance import CHARACTERS_PER_TOKEN, Relevance, load_error

PUBLISHED = "castorini/monot5-base-msmarco-10k"
"""The checkpoint of the RoToR paper."""
EMBEDDED_NAME = "monot5-embedded"
"""What a server calls the embedded one, which is a toy: it was trained on synthetic documents."""


class MonoT5(Relevance):
    """Rank by MonoT5: log-softmax over the tokens `true` and `false`, most relevant first.

    Nogueira et al., https://arxiv.org/abs/2003.06713; used by RoToR (https://arxiv.org/abs/2502.08662).

    Args:
        model: A checkpoint id or local folder, or a loaded `T5ForConditionalGeneration`. None: the published
            checkpoint from the local cache or the hub, or else, with a warning, the embedded one.
        tokenizer: The tokenizer of a loaded model. Required with a loaded model, ignored otherwise.
        batch_size: Texts per forward pass.
        max_length: Maximum tokens per input. The document is truncated; the query and `Relevant:` are not.
        device: Device to load the model on; default: the GPU if there is one.
        true_word: The word whose token means "relevant". Some multilingual checkpoints use `yes`.
        false_word: The word whose token means "not relevant".

    Raises:
        UnsupportedModel: A loaded model comes without a tokenizer.
    """

    name: ClassVar[str] = "monot5"

    def __init__(
        self,
        model: object = None,
        tokenizer: object | None = None,
        *,
        batch_size: int = 32,
        max_length: int = 1024,
        device: str | None = None,
        true_word: str = "true",
        false_word: str = "false",
    ) -> None:
        super().__init__(PUBLISHED if model is None else model, batch_size=batch_size, device=device)
        check_number("max_length", max_length, 1)
        for name, word in (("true_word", true_word), ("false_word", false_word)):
            check_text(name, word)
        self._use_default = model is None
        if self.name_or_folder is None and tokenizer is None:
            raise UnsupportedModel(
                "expected the tokenizer of the loaded MonoT5 model, got None", hint="Use MonoT5(model, tokenizer)."
            )
        self.max_length = max_length
        self.true_word = true_word
        self.false_word = false_word
        if self.name_or_folder is None:
            self._loaded = (model, tokenizer)

    def score_texts(self, texts: Sequence[str], query: str) -> list[float]:
        """Return the log-probability of the true word against the false word for each text."""
        import torch

        model, tokenizer = self._load()
        label_ids = [_single_id(tokenizer, word) for word in (self.true_word, self.false_word)]
        if label_ids[0] == label_ids[1]:
            raise UnsupportedModel(
                f"expected two tokens; {self.true_word!r} and {self.false_word!r} are the same token",
                hint="Choose other words with true_word= and false_word=.",
            )
        inputs = self._tokenize(tokenizer, texts, query)
        # By length, to reduce padding. The sort is stable and the texts are sorted, so the batches depend on the set.
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        scores = [0.0] * len(inputs)
        start = model.config.decoder_start_token_id
        with torch.inference_mode():
            for first in range(0, len(order), self.batch_size):
                check_cancelled()
                batch = order[first : first + self.batch_size]
                rows = [inputs[index] for index in batch]
                lengths = torch.tensor([len(row) for row in rows])
                width = len(rows[-1])  # the longest
                padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]
                logits = model(
                    input_ids=torch.tensor(padded, device=model.device),
                    attention_mask=(torch.arange(width) < lengths[:, None]).to(model.device),
                    decoder_input_ids=torch.full((len(batch), 1), start, device=model.device),
                ).logits[:, 0, label_ids]  # [batch, 2]
                values = torch.log_softmax(logits.float(), dim=-1)[:, 0].tolist()
                for index, value in zip(batch, values, strict=True):
                    scores[index] = value
        return scores

    def probability(self, score: float) -> float:
        """Return the probability of the true word."""
        return math.exp(score)

    @property
    def model_name(self) -> str:
        """Name of the checkpoint; `monot5-embedded` for the one that comes with the package."""
        return EMBEDDED_NAME if self.name_or_folder == str(EMBEDDED["monot5"]) else super().model_name

    def _load(self) -> tuple[Any, Any]:
        """Return model and tokenizer; load them on the first call. The caller holds the lock."""
        if self._loaded is None:
            import torch
            from transformers import AutoTokenizer, T5ForConditionalGeneration

            name = default_checkpoint() if self._use_default else str(self.name_or_folder)
            if name == str(EMBEDDED["monot5"]) and self._use_default:
                warnings.warn(
                    f"{PUBLISHED} is not in the local cache and the hub cannot be reached: using the embedded MonoT5, "
                    "which was trained on synthetic documents. Use MonoT5(model=...) to choose another.",
                    stacklevel=2,
                )
            try:
                tokenizer = AutoTokenizer.from_pretrained(name)
                model: Any = T5ForConditionalGeneration.from_pretrained(name, dtype=torch.float32)
            except (OSError, ValueError) as error:
                raise load_error("the MonoT5 checkpoint", name, error) from error
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            self._loaded = (model.to(device).eval(), tokenizer)
        loaded: tuple[Any, Any] = self._loaded
        return loaded

    def _tokenize(self, tokenizer: Any, texts: Sequence[str], query: str) -> list[list[int]]:
        """Return the token ids of each input, at most `max_length` each."""
        most = CHARACTERS_PER_TOKEN * self.max_length
        if len(query) > most:
            raise self._overflow(f"{len(query):,} characters")
        texts = [text[:most] for text in texts]
        prompts = [f"Query: {query} Document: {text} Relevant:" for text in texts]
        inputs: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            check_cancelled()
            batch = prompts[first : first + self.batch_size]
            inputs += tokenizer(batch, truncation=False, verbose=False)["input_ids"]
        too_long = [index for index, ids in enumerate(inputs) if len(ids) > self.max_length]
        if too_long:
            head = tokenizer.encode(f"Query: {query} Document:", add_special_tokens=False)
            tail = tokenizer.encode("Relevant:")
            room = self.max_length - len(head) - len(tail)
            if room < 1:
                raise self._overflow(f"{len(head) + len(tail)} tokens with MonoT5's template")
            for index in too_long:
                check_cancelled()
                document = tokenizer.encode(texts[index], add_special_tokens=False, verbose=False)
                inputs[index] = [*head, *document[:room], *tail]
        return inputs

    def _overflow(self, size: str) -> ContextOverflow:
        return ContextOverflow(
            f"the query has {size}; with at least one token of the document there is room for {self.max_length} tokens",
            hint="Give the prompt a shorter `query`, or raise MonoT5(max_length=...).",
        )


def default_checkpoint() -> str:
    """Return the published checkpoint if it is in the local cache or the hub is reachable, else the embedded one."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(PUBLISHED, "config.json")
    return PUBLISHED if isinstance(cached, str) or hub_reachable() else str(EMBEDDED["monot5"])


def _single_id(tokenizer: Any, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise UnsupportedModel(
            f"MonoT5 expects a tokenizer with one token for {word!r}, got token ids {ids}",
            hint="Use a MonoT5 checkpoint, or set its label words with true_word= and false_word=.",
        )
    return int(ids[0])
