"""Nodes of LlamaIndex as segments, what a run retrieved, and what its LLMs report in the responses of engines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Finding, Outside, Retrieval, has_marks, report, without_marks
from invariant_rag.segments import Segment

_LABEL = re.compile(r"^Source (\d+):\n", re.MULTILINE)
_QUERIES = ("str_or_query_bundle", "query", "query_bundle", "query_str")
METADATA_KEY = "invariant_rag"
_NOTHING_READ: Mapping[str, Any] = {"sets": [], "order": [], "dropped": [], "trimmed": [], "invariant": None}


@dataclass(frozen=True)
class Retrieved:
    """What a retriever or postprocessor returned, or a synthesizer got."""

    query: str  # empty if that is not known
    nodes: Sequence[NodeWithScore]

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any], nodes: Sequence[NodeWithScore] | None = None) -> Retrieved:
        """Return the nodes that a call with these arguments returned; None: those, or the texts, that it got."""
        query = next((arguments[name] for name in _QUERIES if name in arguments), "")
        nodes = arguments.get("nodes") if nodes is None else nodes
        if nodes is None:
            texts = (each for each in arguments.get("text_chunks", ()) if isinstance(each, str))
            nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
        return cls(query.query_str if isinstance(query, QueryBundle) else query or "", list(nodes))

    @cached_property
    def forms(self) -> list[Retrieval]:
        """The nodes as segments, with the texts that LLMs are shown, and with those without metadata; also stripped."""
        by_texts: dict[tuple[str, ...], Retrieval] = {}
        contents = [
            [without_marks(each.node.get_content(mode)) for each in self.nodes]
            for mode in (MetadataMode.LLM, MetadataMode.NONE)
        ]
        for texts in (*contents, *([text.strip() for text in texts] for texts in contents)):  # synthesizers strip texts
            with_ids = len(set(texts)) == len(texts)  # equal texts differ only in what is written beside them
            pairs = zip(self.nodes, texts, strict=True)
            segments = [segment_of(each, text, with_id=with_ids) for each, text in pairs]
            by_texts.setdefault(tuple(texts), Retrieval(tuple(segments), self.query))
        return list(by_texts.values())


@dataclass
class Scope:
    """One span, in the run to which it belongs."""

    instance: object = None  # whose method it is
    around: Scope | None = None
    retrievals: list[Retrieved] = field(default_factory=list)  # of the whole run, the last ones last
    given: Retrieved | None = None  # what a synthesizer got; else that of the span around
    reports: Reports | None = None  # of LLMs below an engine
    outside: Outside | None = None  # of a run: where to note, when it ends, what it retrieved for no LLM
    is_asked: bool = False  # whether an LLM was called in a run
    ended: bool = False

    def path(self) -> Iterator[Scope]:
        """Yield this span and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.around

    def innermost(self, *kinds: type) -> Any:
        """Return the innermost object of these classes around, or None."""
        return next((each.instance for each in self.path() if isinstance(each.instance, kinds)), None)

    def known(self) -> list[Retrieval]:
        """Return what was retrieved in the run, the last one first, in every form in which LLMs are shown it."""
        inside = self.innermost(BaseRetriever) is not None
        return [replace(form, one_by_one=inside) for each in reversed(self.retrievals) for form in each.forms]


SCOPE: ContextVar[Scope | None] = ContextVar("invariant_rag_scope", default=None)


def current_scope() -> Scope:
    """Return the innermost span of now that has not ended; outside of any, an empty one."""
    inner = SCOPE.get() or Scope(ended=True)
    return next((each for each in inner.path() if not each.ended), Scope(ended=True))


def refuse_media(nodes: Sequence[NodeWithScore]) -> None:
    """Raise InvalidPrompt if a node holds other media than text."""
    names = ("image", "image_path", "image_url", "image_resource", "audio_resource", "video_resource")
    if media := [each.node_id for each in nodes if any(getattr(each.node, name, None) for name in names)]:
        raise InvalidPrompt(
            f"expected nodes of text, got an image, audio or video in {', '.join(media)}",
            hint="Segments are text. Give a TextNode with a description instead.",
        )


def segment_of(scored: NodeWithScore, text: str, *, with_id: bool = True) -> Segment:
    """Return a segment with this text, and with metadata and score of a node; its id is metadata, too."""
    score = None if scored.score is None or math.isnan(scored.score) else scored.score
    metadata: dict[str, Any] = {"node_id": scored.node.node_id} if with_id else {}
    metadata |= {str(key): value for key, value in scored.node.metadata.items()}
    return Segment(text, metadata=metadata, score=score)


def with_text(node: BaseNode, text: str, kind: type[TextNode] = TextNode, **fields: Any) -> TextNode:
    """Copy a node as a text node with another text and other fields."""
    shared = {name: getattr(node, name) for name in TextNode.model_fields if hasattr(node, name)}
    return kind(**{**shared, "text": text, **fields})


def relabelled(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return nodes of a `CitationQueryEngine`, sorted by content and labelled `Source 1:`... anew; others unchanged."""
    texts = [each.node.get_content(MetadataMode.NONE) for each in nodes]
    labels = [_LABEL.match(text) for text in texts]
    if any(label is None or label[1] != str(number) for number, label in enumerate(labels, start=1)):
        return list(nodes)
    bare = [text[label.end() :] for text, label in zip(texts, labels, strict=True) if label]
    ranking = sorted(range(len(nodes)), key=lambda i: segment_of(nodes[i], bare[i], with_id=False).canonical_key)
    return [
        NodeWithScore(node=with_text(nodes[i].node, f"Source {number}:\n{bare[i]}"), score=nodes[i].score)
        for number, i in enumerate(ranking, start=1)
    ]


# --- what LLMs report ---


def knows_segments(llm: object) -> bool:
    """Return whether an LLM is one of this package, or around one."""
    return hasattr(llm.llm if isinstance(llm, StructuredLLM) else llm, "require_segments")


def check_marks(llm: LLM, arguments: Mapping[str, Any]) -> None:
    """Warn if an LLM of another package gets marks of nodes, which it does not know."""
    passed = (*arguments.get("args", ()), *arguments.get("kwargs", {}).values(), *arguments.values())
    listed = [each for given in passed for each in (given if isinstance(given, list | tuple) else [given])]
    texts = [each.content if isinstance(each, ChatMessage) else each for each in listed]
    if any(isinstance(text, str) and has_marks(text) for text in texts):
        finding = Finding("marks", f"{type(llm).__name__} does not know segments, and gets text with segment markers.")
        report([finding], fixes={"marks": "Wrap it: canonical(llm)."})


class Reports:
    """What all LLMs below one engine report, in the metadata of its response.

    A response of an engine below has the ledger of its calls; but it is invariant only if all calls are, such as
    those of a reranker.
    """

    def __init__(self) -> None:
        self._noted: list[Mapping[str, Any]] = []
        self._response: Any = None
        self._is_own = True
        self._lock = Lock()

    def note(self, report: Mapping[str, Any]) -> None:
        """Add a report. Of a stream, it comes after the response."""
        with self._lock:
            self._noted.append(report)
            self._show()

    def show_in(self, response: Any, *, is_read: bool) -> None:
        """Write what is reported, now or later, into a response; `is_read` if an LLM of this package writes it."""
        with self._lock:
            response.metadata = getattr(response, "metadata", None) or {}
            self._is_own = METADATA_KEY not in response.metadata
            if self._is_own and is_read:
                response.metadata[METADATA_KEY] = dict(_NOTHING_READ)
            self._response = response
            self._show()

    def _show(self) -> None:
        if self._response is None or not self._noted:
            return
        metadata = self._response.metadata
        if self._is_own:
            metadata[METADATA_KEY] = _joined(self._noted)
        report = metadata[METADATA_KEY]
        report["invariant"] = _is_invariant([report["invariant"], *(each["invariant"] for each in self._noted)])


def _is_invariant(of_calls: Iterable[bool | None]) -> bool | None:
    """Return whether an answer is invariant: if all calls with documents are; None if none had any."""
    known = [each for each in of_calls if each is not None]
    return all(known) if known else None


def _joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several ledgers as one: all sets, all tokens; else the entries of the last one."""
    joined = dict(reports[-1])
    for name in ("sets", "order", "dropped", "trimmed"):
        joined[name] = [item for each in reports for item in each[name]]
    joined["cached_tokens"] = sum(each["cached_tokens"] for each in reports)
    if usages := [each["usage"] for each in reports if "usage" in each]:
        joined["usage"] = {count: sum(each[count] for each in usages) for count in usages[-1]}
    joined["invariant"] = _is_invariant(each["invariant"] for each in reports)
    return joined
