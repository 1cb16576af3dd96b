"""How much the shortest text of a JSON schema holds, at least: counted characters and items, without any search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invariant_rag.server.patterns import pattern_size


def least_required(schema: Any) -> int:
    """Return how many characters and items a schema counts that each of its texts must have, siblings added up.

    What is optional counts nothing, and of alternatives the smallest counts.

    >>> text = {"type": "string", "minLength": 9}
    >>> least_required({"properties": {"a": text, "b": text, "c": text}, "required": ["a", "b"]})
    18
    >>> least_required({"minItems": 3, "items": {"$ref": "#/$defs/text"}, "$defs": {"text": text}})
    27
    >>> least_required({"anyOf": [text, {"type": "null"}]})
    0
    """
    return _Counter(schema).count(schema)


class _Counter:
    """Counts parts of one schema; each definition once, and a definition within itself as nothing."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[str, int] = {}

    def count(self, part: Any) -> int:
        """Return what a part of the schema requires."""
        if not isinstance(part, Mapping) or "enum" in part or "const" in part:
            return 0
        kinds = {"string": self._characters, "array": self._items, "object": self._properties}
        named = part.get("type")
        if isinstance(named, str) and named in kinds:
            found = [kinds[named](part)]
        elif named is None:
            found = [kind(part) for kind in kinds.values()]
        else:
            wanted = named if isinstance(named, list) and named else [None]
            found = [min(kinds[each](part) if isinstance(each, str) and each in kinds else 0 for each in wanted)]
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list):
                found.append(min(map(self.count, part[name]), default=0))
        found += map(self.count, _listed(part.get("allOf")))
        if isinstance(part.get("$ref"), str):
            found.append(self._referenced(part["$ref"]))
        return max(found)

    def _characters(self, part: Mapping[str, Any]) -> int:
        pattern = part.get("pattern")
        shortest = pattern_size(pattern).shortest if isinstance(pattern, str) else 0
        return max(_number(part.get("minLength")), shortest)

    def _items(self, part: Mapping[str, Any]) -> int:
        first = _listed(part.get("prefixItems")) or _listed(part.get("items"))
        further = max(_number(part.get("minItems")) - len(first), 0)
        return sum(map(self.count, first)) + further * max(self.count(part.get("items")), 1)

    def _properties(self, part: Mapping[str, Any]) -> int:
        properties, required = part.get("properties"), _listed(part.get("required"))
        parts = properties if isinstance(properties, Mapping) else {}
        named = {name for name in required if isinstance(name, str)}
        further = max(_number(part.get("minProperties")) - len(named), 0)
        return sum(self.count(parts.get(name)) for name in named) + further

    def _referenced(self, reference: str) -> int:
        if reference not in self._known:
            self._known[reference] = 0
            self._known[reference] = self.count(_at(self._schema, reference))
        return self._known[reference]


def _at(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference within it leads to; None if there is none."""
    for name in reference.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0
