"""Ordering by MonoT5, a sequence-to-sequence model trained to say whether a document is relevant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from invariant_rag.errors import ContextOverflow, UnsupportedModel
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.models.hub import hub_reachable
from invariant_rag.orderings.relevance import Relevance, unloadable

PUBLISHED = "castorini/monot5-base-msmarco-10k"
"""The checkpoint that RoToR used."""


class MonoT5(Relevance):
    """Relevance by MonoT5: the log-probability of `true` against `false`, best first.

    Nogueira et al., https://arxiv.org/abs/2003.06713; used by RoToR.

    Args:
        model: A checkpoint id or local folder, or a loaded `T5ForConditionalGeneration`. None: the published
            checkpoint from the local cache or the hub; where neither has it, the embedded one, and a warning says so.
        tokenizer: The tokenizer of a loaded model. Required with one, and not used otherwise.
        batch_size: Texts per forward pass.
        max_length: Tokens per input. A longer document is cut; the query and the closing `Relevant:` stay.
        device: Where to load the model; the GPU if there is one, unless told.
        true_word: The word whose token means "relevant". Some multilingual checkpoints use `yes`.
        false_word: The word whose token means "not relevant".
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
        self._may_fall_back = model is None
        if self.name_or_folder is None and tokenizer is None:
            raise UnsupportedModel(
                "MonoT5 got a loaded model without its tokenizer", hint="Use MonoT5(model, tokenizer)."
            )
        self.max_length = max_length
        self.true_word = true_word
        self.false_word = false_word
        self._loaded: tuple[Any, Any] | None = (model, tokenizer) if self.name_or_folder is None else None

    def score_texts(self, texts: Sequence[str], query: str) -> list[float]:
        """Return log P(true) against false for each text."""
        import torch

        model, tokenizer = self._load()
        answers = [self._single_id(tokenizer, word) for word in (self.true_word, self.false_word)]
        if answers[0] == answers[1]:
            raise UnsupportedModel(f"{self.true_word!r} and {self.false_word!r} are the same token", hint="")
        rows = self._rows(tokenizer, texts, query)
        # By length, so that little is padded. Stable, so still a function of the set of texts.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        scores = [0.0] * len(rows)
        start = model.config.decoder_start_token_id
        with torch.inference_mode():
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                chosen = [rows[index] for index in batch]
                lengths = torch.tensor([len(row) for row in chosen])
                width = len(chosen[-1])  # the longest comes last
                padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in chosen]
                logits = (
                    model(
                        input_ids=torch.tensor(padded, device=model.device),
                        attention_mask=(torch.arange(width) < lengths[:, None]).to(model.device),
                        decoder_input_ids=torch.full((len(batch), 1), start, device=model.device),
                    )
                    .logits[:, 0, answers]
                    .float()
                )  # [batch, 2]
                values = torch.log_softmax(logits, dim=-1)[:, 0].tolist()
                for index, value in zip(batch, values, strict=True):
                    scores[index] = value
        return scores

    def _load(self) -> tuple[Any, Any]:
        """Return model and tokenizer, loaded on the first call. Called under the lock."""
        if self._loaded is None:
            import torch
            from transformers import AutoTokenizer, T5ForConditionalGeneration

            name = self._place() if self._may_fall_back else str(self.name_or_folder)
            try:
                tokenizer = AutoTokenizer.from_pretrained(name)
                model: Any = T5ForConditionalGeneration.from_pretrained(name, dtype=torch.float32)
            except (OSError, ValueError) as error:
                raise unloadable("the MonoT5 checkpoint", name, error) from error
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            self._loaded = (model.to(device).eval(), tokenizer)
        return self._loaded

    def _place(self) -> str:
        """Return where the default checkpoint is: the published one if it can be had, else the embedded one."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(PUBLISHED, "config.json")
        if isinstance(cached, str) or hub_reachable():
            return PUBLISHED
        warnings.warn(
            f"{PUBLISHED} is not in the local cache and the hub cannot be reached: ordering by the embedded MonoT5, "
            "which was trained on made-up documents. Give MonoT5(model=...) to choose another.",
            stacklevel=2,
        )
        return str(EMBEDDED["monot5"])

    def _single_id(self, tokenizer: Any, word: str) -> int:
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            raise UnsupportedModel(
                f"MonoT5 needs a tokenizer with one token for {word!r}; this one gives {ids}",
                hint="Use a MonoT5 checkpoint, or name its answer words with true_word= and false_word=.",
            )
        return int(ids[0])

    def _rows(self, tokenizer: Any, texts: Sequence[str], query: str) -> list[list[int]]:
        """Return the token ids of every input, each at most `max_length` long."""
        whole = [f"Query: {query} Document: {text} Relevant:" for text in texts]
        rows: list[list[int]] = tokenizer(whole, truncation=False, verbose=False)["input_ids"]
        too_long = [index for index, row in enumerate(rows) if len(row) > self.max_length]
        if too_long:
            head = tokenizer.encode(f"Query: {query} Document:", add_special_tokens=False)
            tail = tokenizer.encode("Relevant:")
            room = self.max_length - len(head) - len(tail)
            if room < 1:
                raise ContextOverflow(
                    f"the query takes {len(head) + len(tail)} tokens with MonoT5's template, and there is room for "
                    f"{self.max_length} with at least one token of the document",
                    hint="Give a shorter `query` to the prompt, or MonoT5(max_length=...).",
                )
            for index in too_long:
                document = tokenizer.encode(texts[index], add_special_tokens=False, verbose=False)
                rows[index] = [*head, *document[:room], *tail]
        return rows
