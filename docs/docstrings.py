"""Docstrings for the site: doctests as blocks of code, and the fields of a class by the comments beside them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    """Puts every doctest, up to the empty line after it, into a fence."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence the doctests of a docstring, before it is parsed."""
        if obj.docstring is not None:
            fenced = r"```pycon\n\1\n```"
            obj.docstring.value = re.sub(r"(?m)^(>>> .*(?:\n(?!\s*$).+)*)", fenced, obj.docstring.value)


class FieldComments(griffe.Extension):
    """Describes the fields of a class by their comments: those in their line, and whole lines above it."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add a section of attributes to the docstring of a class that has none, before it is parsed."""
        described, above = "", ""
        for line in cls.source.splitlines() if cls.docstring and "Attributes:" not in cls.docstring.value else ():
            comment, field = re.fullmatch(r" +# (.*)", line), re.fullmatch(r" {4}([a-z]\w*): .*?(?:  # (.*))?", line)
            if field and (text := above or field[2]):
                described += f"\n    {field[1]}: {text[0].upper()}{text[1:].rstrip('.')}."
            above = f"{above} {comment[1]}".strip() if comment else ""
        if described and cls.docstring:
            before, raises, after = cls.docstring.value.partition("\n\nRaises:")
            cls.docstring.value = f"{before}\n\nAttributes:{described}{raises}{after}"
