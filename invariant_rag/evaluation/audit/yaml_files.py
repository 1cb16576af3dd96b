"""YAML from outside: plain data, aliases up to a size, and errors that name the line."""

from __future__ import annotations

from typing import Any

import yaml

MAX_ALIASED = 1_000_000
"""Most values and characters that the aliases of a document may stand for: a few lines of them can stand for 10**9."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads plain data, and refuses aliases of too much."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._size = self._aliased = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and count what it and its aliases stand for."""
        before, event = self._size, self.peek_event()
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if isinstance(event, yaml.AliasEvent):
            size = self._sizes.get(node, MAX_ALIASED)  # the alias of what is not at its end is a circle
            self._size += size
            self._aliased += size
            if self._aliased >= MAX_ALIASED:
                raise yaml.composer.ComposerError(
                    None, None, f"expected aliases of at most {MAX_ALIASED:,} values and characters", event.start_mark
                )
        else:
            self._size += 1 + len(node.value) if isinstance(node, yaml.ScalarNode) else 1
            self._sizes[node] = self._size - before
        return node

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
        ValueError: It is none, is nested too deeply, or its aliases stand for too much.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except RecursionError:
        raise ValueError("expected YAML nested less deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
