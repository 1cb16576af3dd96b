"""Nodes of LlamaIndex as documents that are known from a retrieval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, Node, NodeWithScore

from invariant_rag.prompts import KnownDocument, without_marks
from invariant_rag.segments import Segment

_LABEL = re.compile(r"^Source (\d+):\n", re.MULTILINE)
_MEDIA = ("image_resource", "audio_resource", "video_resource")
_IMAGE = ("image", "image_path", "image_url")


def has_media(node: BaseNode) -> bool:
    """Return whether a node holds something other than text."""
    names = _IMAGE if isinstance(node, ImageNode) else _MEDIA if isinstance(node, Node) else ()
    return any(getattr(node, name) for name in names)


def known_node(found: NodeWithScore) -> KnownDocument:
    """Return a node as a document whose text may be in a prompt with or without its metadata."""
    shown = (without_marks(found.node.get_content(mode)) for mode in (MetadataMode.LLM, MetadataMode.ALL))
    segment = _segment(found, without_marks(found.node.get_content(MetadataMode.NONE)))
    parent = found.node.parent_node
    source = found.node.ref_doc_id or (parent.node_id if parent else "")
    return KnownDocument.of(segment, *shown, source=source)


def known_sources(nodes: Sequence[NodeWithScore]) -> list[KnownDocument]:
    """Return the nodes that a `CitationQueryEngine` gives to its synthesizer, without their labels."""
    labelled = split_labels([each.node.get_content(MetadataMode.NONE) for each in nodes])
    if labelled is None:
        return [known_node(each) for each in nodes]
    return [KnownDocument.of(_segment(node, text)) for node, (_, text) in zip(nodes, labelled, strict=True)]


def _segment(found: NodeWithScore, text: str) -> Segment:
    score = None if found.score is None or math.isnan(found.score) else found.score
    metadata = {str(key): value for key, value in found.node.metadata.items()}
    return Segment(text, metadata={"node_id": found.node.node_id, **metadata}, score=score)


def split_labels(texts: Sequence[str]) -> list[tuple[str, str]] | None:
    r"""Split the labels off that `CitationQueryEngine` writes into texts: `Source 1:`, and so on, by place.

    >>> split_labels(["Source 1:\nOf boats.\n", "file: b.txt\n\nSource 2:\nOf mills.\n"])
    [('Source 1:\n', 'Of boats.'), ('Source 2:\n', 'file: b.txt\n\nOf mills.')]

    Returns:
        For each text its label and the rest; None if a text has no label of its place.
    """
    split = []
    for place, text in enumerate(texts, start=1):
        label = next((each for each in _LABEL.finditer(text) if each[1] == str(place)), None)
        if label is None:
            return None
        split.append((label[0], (text[: label.start()] + text[label.end() :]).strip()))
    return split
