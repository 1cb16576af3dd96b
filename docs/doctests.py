"""Doctests of docstrings as blocks of code on the site."""

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
