"""`invariant-rag models`, `methods`, `interventions` and `orderings`: list what can be chosen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from invariant_rag.cli import options
from invariant_rag.cli.console import print_json, print_table, print_text
from invariant_rag.cli.progress import progress_bar
from invariant_rag.methods import METHODS
from invariant_rag.models.hub import check_model
from invariant_rag.orderings import ORDERINGS

_HOSTILE_TEXTS, _SHOWN = 500, 20


def summary(cls: type) -> str:
    """Return the first line of the docstring of a class."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def method_rows() -> list[dict[str, Any]]:
    """Return the columns of `invariant-rag methods`."""
    facts = ("invariant", "fair", "cost", "stock_decoding")
    listed = [(name, each, {fact: getattr(each, fact) for fact in facts}) for name, each in METHODS.items()]
    return [
        {"method": name, **row, "ordering": each.default_ordering, "paper": each.paper} for name, each, row in listed
    ]


def intervention_rows() -> list[dict[str, Any]]:
    """Return the columns of `invariant-rag interventions`."""
    from invariant_rag.interventions import INTERVENTIONS

    return [
        {"intervention": name, "cost": each.cost, "paper": each.paper, "about": summary(each)}
        for name, each in INTERVENTIONS.items()
    ]


def ordering_rows() -> list[dict[str, Any]]:
    """Return the columns of `invariant-rag orderings`."""
    return [{"ordering": name, "invariant": each.invariant, "about": summary(each)} for name, each in ORDERINGS.items()]


def models(
    check_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead: put hostile texts into prompts for the tokenizer of this hub id or folder, and list which "
            "made control tokens. Exit code 1: some did.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Probe a tiny model of every known family, and list which can be run order-invariantly."""
    if check_tokens is not None:
        check_model(check_tokens, weights=False)
        _check_tokens(check_tokens, as_json)
        return
    from transformers.utils.logging import set_verbosity_error

    from invariant_rag.testing.families import FAMILIES, probe_families

    set_verbosity_error()  # hides transformers' warnings about tiny models
    with progress_bar("Probing", len(FAMILIES)) as advance:
        reports = []
        for report in probe_families():
            reports.append({"family": report.family, "supported": report.supported, "detail": report.detail})
            advance()
    print_table(reports, as_json)


def methods(as_json: options.Json = False) -> None:
    """List the methods: how segments attend to each other.

    \b
    invariant       with an ordering by content, the answer does not depend on the order of the segments
    fair            by construction, accuracy does not depend on the slot of a segment
    cost            computation beyond the plain model: attention in both directions between segments, of
                    which the plain model has one; rankings of segments for every head and new token
    stock_decoding  after the prefill, decoding is that of the plain model
    ordering        the default ordering
    """  # noqa: D301
    print_table(method_rows(), as_json)


def interventions(as_json: options.Json = False) -> None:
    """List the interventions: changes to the plain model's attention, which do not make it invariant."""
    print_table(intervention_rows(), as_json)


def orderings(as_json: options.Json = False) -> None:
    """List the orderings: rules that rank segments."""
    print_table(ordering_rows(), as_json)


def _check_tokens(model: str, as_json: bool) -> None:
    from invariant_rag.models.loading import load_tokenizer
    from invariant_rag.prompts import control_tokens, unprotected_tokens
    from invariant_rag.prompts.template_probes import LONGEST_PROBE
    from invariant_rag.testing.token_check import find_break_outs, hostile_texts

    with progress_bar("Checking", _HOSTILE_TEXTS) as advance:
        tokenizer = load_tokenizer(model)
        control, unprotected = control_tokens(tokenizer), unprotected_tokens(tokenizer)
        ids = {*control, *map(tokenizer.vocab.__getitem__, unprotected)}

        def counted() -> Iterator[str]:
            for text in hostile_texts(tokenizer, _HOSTILE_TEXTS):
                yield text
                advance()

        break_outs = find_break_outs(tokenizer, counted(), ids)
    rows = [{"place": each.place, "tokens": " ".join(each.tokens), "text": each.text} for each in break_outs]
    if as_json:
        report = {"control_tokens": sorted(control.values()), "unprotected": unprotected}
        print_json({"model": model, "texts": _HOSTILE_TEXTS, **report, "break_outs": rows})
    else:
        print_text(f"{len(control)} control tokens, {_HOSTILE_TEXTS} hostile texts: {len(rows)} broke out")
        print_text(f"This holds for what was rendered: conversations of every role, of up to {LONGEST_PROBE} turns.")
        if unprotected:
            print_text(f"look like roles, but no template writes them: {', '.join(unprotected)}")
        if rows:
            print_table([{key: repr(value)[:60] for key, value in row.items()} for row in rows[:_SHOWN]], as_json)
    if rows:
        raise typer.Exit(1)
