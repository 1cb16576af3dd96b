"""YAML from outside: plain data, no alias within what has an alias, and errors that name the line."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads plain data. Aliases of aliases are refused: a few lines of them can stand for a billion values."""

    _anchored = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and watch for an alias within a node that has an anchor."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) and self._anchored:
            raise yaml.composer.ComposerError(
                None, None, "expected no alias within what an alias stands for", event.start_mark
            )
        inside = getattr(event, "anchor", None) is not None and not isinstance(event, yaml.AliasEvent)
        self._anchored += inside
        try:
            return super().compose_node(parent, index)
        finally:
            self._anchored -= inside

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node. PyYAML fails in many ways for a tag such as `!!int` before another text."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"expected a value of {node.tag}: {error}", node.start_mark
            ) from error


def parse_yaml(text: str) -> Any:
    """Parse a document of YAML into plain data.

    Raises:
        ValueError: It is none, is nested too deeply, or has aliases of aliases.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except RecursionError:
        raise ValueError("expected YAML nested less deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
