"""`invariant-rag methods`, `interventions` and `orderings`: what there is, by name."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from invariant_rag.cli.console import print_table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def about(described: type) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(described) or "").partition("\n")[0]


def method_rows() -> list[dict[str, Any]]:
    """Return what there is to say of each method."""
    from invariant_rag.methods import METHODS

    return [
        {
            "method": name,
            "invariant": each.invariant,
            "fair": each.fair,
            "training_free": each.training_free,
            "cost": each.cost,
            "stock_decoding": each.stock_decoding,
            "ordering": each.default_ordering,
            "paper": each.paper,
        }
        for name, each in METHODS.items()
    ]


def intervention_rows() -> list[dict[str, Any]]:
    """Return what there is to say of each intervention."""
    from invariant_rag.interventions import INTERVENTIONS

    return [
        {"intervention": name, "cost": each.cost, "paper": each.paper, "about": about(each)}
        for name, each in INTERVENTIONS.items()
    ]


def ordering_rows() -> list[dict[str, Any]]:
    """Return what there is to say of each ordering."""
    from invariant_rag.orderings import ORDERINGS

    return [{"ordering": name, "invariant": each.invariant, "about": about(each)} for name, each in ORDERINGS.items()]


def methods(as_json: AsJson = False) -> None:
    """List the methods: how segments see each other.

    \b
    invariant       the answer ignores the order of the segments, given an ordering by content
    fair            so does accuracy, by construction: no segment has a place of its own
    training_free   it works with a model's own weights
    cost            what it computes beyond the plain model: attention both ways between segments, which
                    the plain model has one way; rankings of segments, for every head and new token
    stock_decoding  after the prefill, the model decodes as it does anyway
    ordering        the one that is used where none is chosen
    """  # noqa: D301
    print_table(method_rows(), as_json)


def interventions(as_json: AsJson = False) -> None:
    """List the interventions: changes to the plain model's attention. They make nothing invariant."""
    print_table(intervention_rows(), as_json)


def orderings(as_json: AsJson = False) -> None:
    """List the orderings: rules that rank segments."""
    print_table(ordering_rows(), as_json)
