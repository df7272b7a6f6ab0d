"""JSON Schemas that answers must follow: what is refused before anything starts, and what is rewritten to be enforced.

Owns the walk over a schema (which values are schemas, what `$ref` names) and the rewriting that the grammar compiler
needs. Does not own the compiler (data/grammar.py), which refuses what it does not implement; here is refused what it
would pass over in silence.

Choices: only references within the document; drafts 4 to 2020-12 are read alike, where they differ the stricter reading
holds (siblings of `$ref` count). `oneOf` is enforced as `anyOf` where no value can match two branches: different types,
constants, ranges, a required property whose values differ, or one that the other branch forbids; otherwise it is
refused. Keywords without effect (`uniqueItems: false`, an empty `dependencies`, `if` alone) are dropped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from ai_engine.ports.errors import InvalidJsonSchema

Node = dict[str, Any]

MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 128
"""Bounds on what is walked: JSON values, and levels of them. A request's JSON has at most 64 levels."""

ONE: Final = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
MANY: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords whose value is a schema, a list of schemas, schemas by name. `$defs` counts where a `$ref` leads to it."""

SILENT: Final = frozenset({"disallow", "divisibleBy", "extends"})
"""Constraints of draft 3 that the compiler passes over."""

EVERY_TYPE: Final = frozenset({"object", "array", "string", "integer", "fraction", "boolean", "null"})
MAX_LOOK: Final = 6  # levels of properties that the proof of disjointness looks at


def refuse(keyword: str, pointer: str, reason: str, param: str) -> NoReturn:
    """Raises InvalidJsonSchema: names the keyword and where it stands."""
    raise InvalidJsonSchema(f"{param}: the schema's {keyword!r} at {pointer or '/'!r} {reason}", param=param)


def lowered(schema: Any, param: str) -> Node:
    """The schema, rewritten, for the compiler. ``schema`` is a decoded JSON value and stays as it is; ``param`` is
    the request's field. Raises InvalidJsonSchema."""
    if schema is True:
        return {}
    if schema is False:
        refuse("false", "", "matches nothing", param)
    if type(schema) is not dict:
        raise InvalidJsonSchema(f"{param}: found a {type(schema).__name__}, expected a JSON Schema object", param=param)
    root: Node = _copy(schema, [0], 0, param)
    root.pop("x-guidance", None)  # options of the compiler are ours
    document = Document(root)
    for pointer, node in document.reachable(param):
        _drop_idle(node)
        _check_silent(node, pointer, param)
    for pointer, node in document.reachable(param):
        _lower_one_of(document, node, pointer, param)
    return root


JSON_OPTIONS: Final = {
    "whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?", "lenient": False,
    "coerce_one_of": False,
}  # fmt: skip
"""Space at most once after a comma or a colon: a text cannot run into white space."""


def json_block(schema: Node) -> str:
    """A schema that is `lowered` as a term of a Lark grammar of llguidance."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _copy(value: Any, count: list[int], depth: int, param: str) -> Any:
    count[0] += 1
    if count[0] > MAX_NODES or depth > MAX_DEPTH:
        raise InvalidJsonSchema(
            f"{param}: the schema has more than {MAX_NODES} values or {MAX_DEPTH} levels. Fix: send a smaller one.",
            param=param,
        )
    if type(value) is dict:
        return {key: _copy(item, count, depth + 1, param) for key, item in value.items()}
    if type(value) is list:
        return [_copy(item, count, depth + 1, param) for item in value]
    return value


# --- the walk


def pointer_part(key: str | int) -> str:
    """One step of a JSON Pointer (RFC 6901)."""
    return "/" + str(key).replace("~", "~0").replace("/", "~1")


def children(node: Node) -> Iterator[tuple[str, Any]]:
    """(pointer step, schema) of the schemas that stand directly in this one."""
    for keyword in ONE:
        if type(node.get(keyword)) in (dict, bool):
            yield pointer_part(keyword), node[keyword]
    for keyword in MANY:
        if type(node.get(keyword)) is list:
            for index, item in enumerate(node[keyword]):
                yield pointer_part(keyword) + pointer_part(index), item
    for keyword in NAMED:
        if type(node.get(keyword)) is dict:
            for name, item in node[keyword].items():
                if type(item) in (dict, bool):
                    yield pointer_part(keyword) + pointer_part(name), item


class Document:
    """A schema and what references in it mean."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self._anchors: dict[str, Node] | None = None

    def target(self, ref: str) -> Any:
        """What a reference names, or None."""
        base, _, fragment = ref.partition("#")
        if base and base != str(self.root.get("$id", self.root.get("id", ""))).rstrip("#"):
            return self._named().get(base) if not fragment else None
        if not fragment.startswith("/"):
            return self._named().get("#" + fragment) if fragment else self.root
        found: Any = self.root
        for part in unquote(fragment)[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if type(found) is dict and key in found:
                found = found[key]
            elif type(found) is list and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found

    def _named(self) -> dict[str, Node]:
        """Schemas by ``#anchor`` and by ``$id``."""
        if self._anchors is None:
            self._anchors = {}
            todo: list[Any] = [self.root]
            while todo:
                value = todo.pop()
                if type(value) is dict:
                    for name in (f"#{value.get('$anchor', '')}", value.get("$id"), value.get("id")):
                        if type(name) is str and name != "#":
                            self._anchors.setdefault(name, value)
                    todo += value.values()
                elif type(value) is list:
                    todo += value
        return self._anchors

    def reachable(self, param: str) -> Iterator[tuple[str, Node]]:
        """(pointer, schema) of all that counts, each once, outer before inner. Raises InvalidJsonSchema for a reference
        that leads out of the document."""
        seen: set[int] = set()
        todo: list[tuple[str, Any]] = [("", self.root)]
        while todo:
            pointer, node = todo.pop()
            if type(node) is not dict or id(node) in seen:
                continue
            seen.add(id(node))
            yield pointer, node
            todo += [(pointer + step, child) for step, child in children(node)]
            ref = node.get("$ref")
            if type(ref) is str:
                target = self.target(ref)
                if target is None:
                    reason = f"names {ref[:200]!r}, which is not in the schema. Fix: put it under '$defs'"
                    refuse("$ref", pointer + "/$ref", reason, param)
                todo.append((unquote(ref[1:]) if ref.startswith("#/") else pointer + "/$ref", target))


# --- what the compiler would not see, or does not need to see


_IDLE: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("uniqueItems", (False,)), ("dependencies", ({},)), ("dependentRequired", ({},)), ("dependentSchemas", ({},)),
    ("propertyNames", ({}, True)), ("not", (False,)), ("unevaluatedProperties", ({}, True)),
    ("unevaluatedItems", ({}, True)),
)  # fmt: skip


def _drop_idle(node: Node) -> None:
    """Keywords that constrain nothing as they stand."""
    for keyword, idle in _IDLE:
        if keyword in node and any(type(node[keyword]) is type(value) and node[keyword] == value for value in idle):
            del node[keyword]
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
    elif "then" not in node and "else" not in node:
        del node["if"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if node.get("maxItems") in (0, 1) and type(node["maxItems"]) is int and node.get("uniqueItems") is True:
        del node["uniqueItems"]


def _check_silent(node: Node, pointer: str, param: str) -> None:
    for keyword in SILENT & node.keys():
        refuse(keyword, pointer + pointer_part(keyword), "is not enforced. Fix: use its successor of draft 4", param)
    least, required = node.get("minProperties", 0), node.get("required", [])
    if type(least) in (int, float) and type(required) is list and least > len(set(map(str, required))) + 1:
        reason = (
            "asks for two or more names of the answer's own choice, which could be equal. Fix: list them as required"
        )
        refuse("minProperties", pointer + "/minProperties", reason, param)


# --- oneOf


def _lower_one_of(document: Document, node: Node, pointer: str, param: str) -> None:
    """`oneOf` as `anyOf`; beside an `anyOf`, as one more of `allOf`."""
    branches = node.get("oneOf")
    if type(branches) is not list or not branches:
        return
    for (i, first), (j, second) in itertools.combinations(enumerate(branches), 2):
        if not disjoint(document, first, second):
            reason = f"cannot be enforced: branches {i} and {j} may match the same value. Fix: use anyOf, or give each"
            refuse("oneOf", pointer + "/oneOf", reason + " branch a required property with its own const", param)
    del node["oneOf"]
    if "anyOf" in node:
        node["allOf"] = [*node.get("allOf", []), {"anyOf": branches}]
    else:
        node["anyOf"] = branches


def disjoint(document: Document, first: Any, second: Any, look: int = MAX_LOOK) -> bool:
    """True when it is certain that no value matches both."""
    if first is False or second is False:
        return True
    if type(first) is not dict or type(second) is not dict or look == 0:
        return False
    a, b = _parts(document, first), _parts(document, second)
    common = _types(document, a, look) & _types(document, b, look)
    if not common:
        return True
    for x, y in itertools.product(a, b):
        for these, other in ((x, second), (y, first)):
            for keyword in ("anyOf", "oneOf"):
                branches = these.get(keyword)
                if (
                    type(branches) is list
                    and branches
                    and all(disjoint(document, s, other, look - 1) for s in branches)
                ):
                    return True
        values, others = _values(x), _values(y)
        if values is not None and others is not None and not values & others:
            return True
    if common == {"object"}:
        return _objects_differ(document, a, b, look) or _objects_differ(document, b, a, look)
    sizes = (("minLength", "maxLength", {"string"}), ("minItems", "maxItems", {"array"}),
             ("minimum", "maximum", {"integer", "fraction"}))  # fmt: skip
    for low, high, types in sizes:
        if common <= types and (_most(a, high) < _least(b, low) or _most(b, high) < _least(a, low)):
            return True
    return False


def _parts(document: Document, schema: Node) -> list[Node]:
    """The schemas that all hold where this one does: itself, what it refers to, its allOf."""
    parts: list[Node] = []
    todo: list[Any] = [schema]
    while todo and len(parts) < 64:
        part = todo.pop()
        if type(part) is not dict or any(part is other for other in parts):
            continue
        parts.append(part)
        if type(part.get("$ref")) is str:
            todo.append(document.target(part["$ref"]))
        if type(part.get("allOf")) is list:
            todo += part["allOf"]
    return parts


def _types(document: Document, parts: list[Node], look: int) -> frozenset[str]:
    found = EVERY_TYPE
    for part in parts:
        stated = part.get("type")
        if type(stated) is str:
            stated = [stated]
        if type(stated) is list:
            found &= {"fraction" if name == "number" else name for name in stated if type(name) is str} | (
                {"integer"} if "number" in stated else set()
            )
        values = _values(part)
        if values is not None:
            found &= {_type_of(value) for value in _listed(part)}
        for keyword in ("anyOf", "oneOf"):
            branches = part.get(keyword)
            if type(branches) is list and branches and look > 1:
                union: frozenset[str] = frozenset()
                for branch in branches:
                    union |= (
                        _types(document, _parts(document, branch), look - 1) if branch is not False else frozenset()
                    )
                found &= union
    return found


def _listed(part: Node) -> list[Any]:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if type(part.get("enum")) is list else []


def _values(part: Node) -> set[str] | None:
    """The constants that it allows, spelt so that equal values (1, 1.0) are equal texts."""
    return {_spelt(v) for v in _listed(part)} if "const" in part or type(part.get("enum")) is list else None


def _spelt(value: Any) -> str:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is list:
        return f"[{','.join(map(_spelt, value))}]"
    if type(value) is dict:
        return f"{{{','.join(f'{key!r}:{_spelt(value[key])}' for key in sorted(value))}}}"
    return f"{type(value).__name__}:{value!r}"


def _type_of(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", int: "integer", bool: "boolean", type(None): "null"}
    if type(value) is float:
        return "integer" if value.is_integer() else "fraction"
    return names[type(value)]


def _objects_differ(document: Document, a: list[Node], b: list[Node], look: int) -> bool:
    """A property that ``a`` requires is forbidden by ``b``, or both require it and its values differ."""
    for name in _required(a):
        in_a = [part["properties"][name] for part in a if name in _properties(part)]
        in_b = [part["properties"][name] for part in b if name in _properties(part)]
        if any(schema is False for schema in in_b) or any(_forbids(part, name) for part in b):
            return True
        if name in _required(b) and any(disjoint(document, x, y, look - 1) for x in in_a for y in in_b):
            return True
    return False


def _properties(part: Node) -> Node:
    found = part.get("properties")
    return found if type(found) is dict else {}


def _forbids(part: Node, name: str) -> bool:
    return (
        part.get("additionalProperties") is False
        and name not in _properties(part)
        and not part.get("patternProperties")
    )


def _required(parts: list[Node]) -> list[str]:
    lists = [part["required"] for part in parts if type(part.get("required")) is list]
    return [name for names in lists for name in names if type(name) is str]


def _least(parts: list[Node], keyword: str) -> float:
    return max(_numbers(parts, keyword), default=-math.inf)


def _most(parts: list[Node], keyword: str) -> float:
    return min(_numbers(parts, keyword), default=math.inf)


def _numbers(parts: list[Node], keyword: str) -> list[float]:
    return [float(part[keyword]) for part in parts if type(part.get(keyword)) in (int, float)]
