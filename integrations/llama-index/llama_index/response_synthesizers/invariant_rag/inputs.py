"""What `InvariantSynthesizer` puts into a prompt: texts as segments, and images and other media behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import BaseContentBlock, ChatMessage, TextBlock
from llama_index.core.schema import BaseNode, MetadataMode

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import mark, without_marks
from invariant_rag.segments import Segment, document_rendering
from llama_index.llms.invariant_rag.messages import SegmentBlock
from llama_index.llms.invariant_rag.nodes import has_media, split_labels
from llama_index.llms.invariant_rag.tracking import is_cited

PLACEHOLDER = mark("")
"""Stands for the context while the prompt template is formatted."""

_OWN_VARIABLES = frozenset({"context_str", "query_str", "text_chunks", "scores"})


@dataclass(frozen=True)
class MediaNode:
    """A node that is not text alone, such as an image with its caption."""

    text: str
    blocks: tuple[BaseContentBlock, ...]

    @property
    def sort_key(self) -> tuple[str, str]:
        """The content, by which such nodes are listed."""
        return self.text, repr([sorted(block.model_dump(exclude_none=True).items()) for block in self.blocks])


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise InvalidPrompt for a variable of the template that the synthesizer sets itself."""
    if taken := sorted(_OWN_VARIABLES & set(variables)):
        raise InvalidPrompt(
            f"expected no keyword {', '.join(taken)}: the synthesizer sets it",
            hint="Give the variable of the template another name.",
        )


def media_of(node: BaseNode) -> MediaNode | None:
    """Return a node that is not text alone; None for one that is."""
    if not has_media(node):
        return None
    blocks = node.get_content_blocks(metadata_mode=MetadataMode.LLM)
    media = tuple(block for block in blocks if not isinstance(block, TextBlock))
    return MediaNode(without_marks(node.get_content(metadata_mode=MetadataMode.LLM)), media)


def _segments(texts: Sequence[str], scores: Sequence[float | None] | None) -> list[tuple[str, Segment]]:
    """Return one segment per text, each with the label of its place: empty but for a `CitationQueryEngine`."""
    plain = [without_marks(text) for text in texts]
    labelled = (split_labels(plain) if is_cited() else None) or [("", text) for text in plain]
    scores = [None] * len(texts) if scores is None else scores
    return [(label, Segment(text, score=score)) for (label, text), score in zip(labelled, scores, strict=True)]


def context_blocks(texts: Sequence[str], scores: Sequence[float | None] | None) -> list[BaseContentBlock]:
    """Return one block per text, behind the label of its place if it has one."""
    blocks: list[BaseContentBlock] = []
    for label, segment in _segments(texts, scores):
        if label:
            blocks.append(TextBlock(text=f"\n\n{label}" if blocks else label))
        blocks.append(SegmentBlock.of(segment))
    return blocks


def media_blocks(nodes: Sequence[MediaNode]) -> list[BaseContentBlock]:
    """Return the blocks of nodes that are not text alone, in the order of their content, each behind its text."""
    blocks: list[BaseContentBlock] = []
    for each in sorted(nodes, key=lambda node: node.sort_key):
        if each.text:
            blocks.append(TextBlock(text=document_rendering(Segment(each.text))))
        blocks += each.blocks
    return blocks


def joined(texts: Sequence[str], scores: Sequence[float | None] | None, *, marked: bool) -> str:
    """Return the nodes as one text, marked if the LLM parses markers."""
    segments = _segments(texts, scores)
    return "\n\n".join(label + (mark(each, len(texts)) if marked else each.text) for label, each in segments)


def insert_blocks(message: ChatMessage, inserted: Sequence[BaseContentBlock]) -> ChatMessage:
    """Replace every placeholder in a message by blocks."""
    blocks: list[Any] = []
    for block in message.blocks:
        if isinstance(block, TextBlock) and PLACEHOLDER in block.text:
            first, *following = block.text.split(PLACEHOLDER)
            blocks.append(TextBlock(text=first))
            for text in following:
                blocks += [*inserted, TextBlock(text=text)]
        else:
            blocks.append(block)
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)
