"""The English tasks of LongBench: group, metric, prompt and longest output of each, from `tasks.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from invariant_rag.errors import UnknownName

_DATA = Path(__file__).with_name("tasks.toml")


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        group: Its column in table 2 of arXiv 2406.02536.
        metric: `f1`, `rouge_l`, `class`, `paragraph`, `count` or `edit_similarity`.
        max_new_tokens: Longest output.
        prefix: The prompt before the context.
        suffix: The prompt after the context; `{input}` stands for the question.
    """

    group: str
    metric: str
    max_new_tokens: int
    prefix: str
    suffix: str

    @property
    def is_continued(self) -> bool:
        """Whether the prompt is continued as text, without the chat template, as few-shot and code tasks are."""
        return self.group in {"few-shot", "code"}


@cache
def tasks() -> dict[str, Task]:
    """Return every task by its name."""
    with _DATA.open("rb") as file:
        return {name: Task(**fields) for name, fields in tomllib.load(file).items()}


def groups() -> dict[str, list[str]]:
    """Return the names of the tasks in each group."""
    found: dict[str, list[str]] = {}
    for name, task in tasks().items():
        found.setdefault(task.group, []).append(name)
    return found


def parse_tasks(described: str) -> list[str]:
    """Parse the `tasks` setting: `all`, a group, or comma-separated names.

    >>> parse_tasks("multi-doc")
    ['hotpotqa', '2wikimqa', 'musique']

    Raises:
        UnknownName: There is no such task.
    """
    if described == "all":
        return list(tasks())
    if described in groups():
        return groups()[described]
    names = [name.strip() for name in described.split(",")]
    for name in names:
        if name not in tasks():
            raise UnknownName("task of longbench", name, ["all", *groups(), *tasks()])
    return names
