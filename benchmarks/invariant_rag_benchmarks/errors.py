"""Errors of benchmarks; those of `invariant_rag.errors` come as well."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError


class DatasetUnavailable(InvariantRAGError, OSError):
    """A benchmark's data file that is neither on this machine nor downloadable."""

    hint = "Download it on a machine with a network, and give the file, or the folder that holds it, with --data."


class InvalidDataset(InvariantRAGError, ValueError):
    """A benchmark's data file that is not in the format of the benchmark's page."""

    hint = "The benchmark's page (tasks/NAME.md) shows a record; compare it with the one that the message names."


class RunExists(InvariantRAGError, FileExistsError):
    """A run with the same settings exists in the output folder; runs are never overwritten."""

    hint = "Continue it with --resume, or write elsewhere with --out."


class InvalidRun(InvariantRAGError, ValueError):
    """A run folder whose records cannot be parsed."""

    hint = "Only the last line of records.jsonl may be torn. Repair the line that the message names, or run elsewhere."
