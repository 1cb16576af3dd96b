"""Command-line options that several commands share, each defined once, and options that are fields of dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from invariant_rag.checks import MOST_CALLS
from invariant_rag.methods import METHODS, check_method_and_ordering
from invariant_rag.models import devices
from invariant_rag.orderings import ORDERINGS, CrossEncoder, Embedding, resolve_ordering

_OFFERED: Mapping[str, Any] = {"method": METHODS, "methods": METHODS, "ordering": ORDERINGS, "orderings": ORDERINGS}


def option_of(name: str, about: str, *flags: str, **more: Any) -> Any:
    """Return an option whose values are names of a registry, which the Tab key completes."""
    return typer.Option(*flags, help=about, autocompletion=lambda: [*_OFFERED[name]], **more)


Model = Annotated[str | None, typer.Option(help="Model id or folder.", show_default="the embedded model")]
Method = Annotated[str, option_of("method", "See `invariant-rag methods`.")]
Ordering = Annotated[
    str | None, option_of("ordering", "See `invariant-rag orderings`.", show_default="the method's default")
]
DType = Annotated[devices.DType, typer.Option(help="As in transformers.")]
DeviceMap = Annotated[str, typer.Option(help="As in transformers: auto spreads a large model over all devices.")]
Overflow = Annotated[
    Literal["error", "drop_last", "trim_segments"],
    typer.Option(help="What to do with prompts that are longer than the context window."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer of a model, in tokens.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at a document that cannot be read, instead of skipping it.")
]
Retriever = Annotated[
    str, typer.Option(help="For --docs: bm25, faiss, or faiss:MODEL with that sentence-transformers model.")
]
Question = Annotated[
    str | None, typer.Argument(help="The question. It is also the search query.", show_default="an example")
]
Documents = Annotated[
    list[Path] | None,
    typer.Option("--docs", help="File or folder: .txt, .md, .jsonl, .pdf. Repeatable.", show_default="an example"),
]
MoreDocuments = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[PATH]...", help="More documents, as in --docs atlas/*.md.", show_default=False),
]
MaxChars = Annotated[int, typer.Option(min=1, help="Longest chunk, in characters.")]
TopK = Annotated[int, typer.Option("--k", min=1, help="Segments to retrieve.")]
_AGAIN = "Ask again in N random document orders, and compare the answers."
CheckOrder = Annotated[int, typer.Option(min=0, max=MOST_CALLS, metavar="N", help=_AGAIN)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_REPEATABLE = (frozenset[str], tuple[str, ...] | None, Mapping[str, str])  # whose options may be given several times


def check_model_options(model: str | None, method: Any, ordering: Any, device_map: Any = "auto") -> None:
    """Find out what can be wrong with the options of a model, before transformers is imported: that takes seconds."""
    from invariant_rag.models.devices import check_device
    from invariant_rag.models.embedders import check_embedder
    from invariant_rag.models.hub import check_model

    check_method_and_ordering(method, ordering)
    check_model(model)
    chosen = resolve_ordering(ordering) if ordering is not None else None
    if isinstance(chosen, CrossEncoder | Embedding) and chosen.name_or_folder is not None:
        check_embedder(chosen.name_or_folder, f"a model for the ordering {ordering}")
    check_device(device_map)


def with_fields(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**fields` by one option for each documented field of dataclasses.

    The metadata of such a field has `about`; `min`, `max` and `metavar`; `option`, if it has another name; `shown`, how
    help shows the default; and `argument`, for a field that is no option.
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [_parameter(each, get_type_hints(kind)[each.name]) for kind in kinds for each in option_fields(kind)]
        parameters = sorted([*added, *own], key=lambda each: each.kind)  # what is not by keyword comes first
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
        return function

    return decorated


def option_fields(kind: type[Any]) -> Iterable[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are options."""
    return [each for each in dataclasses.fields(kind) if "about" in each.metadata]


def from_options(kind: type[Any], given: Mapping[str, Any], **more: Any) -> Any:
    """Build a dataclass from the options of a command line, and further fields."""
    values = {each.name: given[each.name] for each in option_fields(kind)}
    sets = {name: frozenset(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**{name: value for name, value in {**values, **sets}.items() if value is not None}, **more)


def _parameter(each: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    about = each.metadata
    is_repeatable, is_flag = kind in _REPEATABLE, kind is bool
    if kind is Any:
        kind = str if each.default else str | None
    names = [about.get("option", f"--{each.name.replace('_', '-')}")]
    bounds = {name: about[name] for name in ("min", "max", "metavar") if name in about}
    shown: dict[str, Any] = {"help": about["about"], "show_default": about.get("shown", not is_flag), **bounds}
    shown |= {"autocompletion": lambda: [*_OFFERED[each.name]]} if each.name in _OFFERED else {}
    parameter = typer.Argument(**shown) if about.get("argument") else typer.Option(*names, **shown)
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if is_repeatable else each.default,
        annotation=Annotated[list[str] | None if is_repeatable else kind, parameter],
    )
