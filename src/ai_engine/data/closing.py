"""The shortest way to end a JSON text that follows a schema: what a budget must hold, how to use its last tokens.

Owns smallest instances of a schema (`Closer.smallest`) and short endings of a text that has begun (`Closer.endings`).
They are proposals: data/grammar.py checks each with the matcher and uses none that it does not accept, so a keyword
read too simply here costs the guarantee for that schema, never a wrong answer. Texts are JSON without spaces; the
shortest is that of the fewest bytes.

Smallest instances are the least fixed point of the schema seen as a grammar (Knuth 1977, "A generalization of
Dijkstra's algorithm"); a text is read as the stack of its open containers, and each is ended at the least cost.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from ai_engine.contracts.json_schema import Document, Node

MAX_SHAPES: Final = 48
"""Alternatives of one schema that are looked at."""
MAX_NODES: Final = 20_000
MAX_ENDINGS: Final = 24
MAX_TEXT: Final = 1 << 14
"""Bytes of a smallest instance; one that is longer counts as not known."""

_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|"(?:[^"\\]|\\.)*\\?$|[^\s{}\[\],:"]+', re.DOTALL)


_ANY: Final[Node] = {}
"""What an absent schema allows; one object, so that it is looked at once."""


def dumps(value: Any) -> bytes:
    """Compact JSON, as the compiler spells constants."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Frame:
    """An open container of the text, or the scalar at its end. ``state`` is where in the container the text stands:
    "start", "key" (in a name), "colon" (after it), "value" (a value is due or begun), "done" (after it), "comma"."""

    __slots__ = ("count", "done", "key", "keys", "kind", "raw", "start", "state")

    def __init__(self, kind: str, start: int) -> None:
        self.kind = kind  # "{", "[" or "" for a scalar
        self.start = start
        self.state = "start"
        self.keys: list[str] = []  # names so far, with the one whose value is due
        self.key = b""  # the part of a name that stands at the end
        self.done: dict[str, bytes] = {}  # scalars of finished properties
        self.count = 0  # finished items
        self.raw = b""  # the scalar's text


def read(text: bytes) -> list[Frame] | None:
    """The containers that are open at the end of a JSON text, outermost first; the last may be a scalar that has begun.
    None when the text is a whole value, or no beginning of one."""
    frames: list[Frame] = []
    ended = 0
    whole = False
    for match in _TOKEN.finditer(text):
        token, at = match.group(), match.start()
        ended = match.end()
        if whole:
            return None
        top = frames[-1] if frames else None
        if token in (b"{", b"["):
            if top is not None:
                top.state = "value"
            frames.append(Frame(token.decode(), at))
        elif token in (b"}", b"]"):
            frames.pop()
            whole = not _finished(frames, b"")
        elif token == b",":
            assert top is not None
            top.state = "comma"
        elif token == b":":
            assert top is not None
            top.state = "value"
        elif top is not None and top.kind == "{" and top.state in ("start", "comma"):
            if _is_whole(token):
                top.keys.append(json.loads(token))
                top.state = "colon"
            else:
                top.key, top.state = token, "key"
        elif _is_whole(token) and (token[:1] == b'"' or ended < len(text)):
            whole = not _finished(frames, token)
        else:
            scalar = Frame("", at)
            scalar.raw = token
            if top is not None:
                top.state = "value"
            frames.append(scalar)
    return None if whole else frames


def _is_whole(token: bytes) -> bool:
    return token[:1] != b'"' or (len(token) > 1 and token[-1:] == b'"' and _backslashes(token[:-1]) % 2 == 0)


def _backslashes(token: bytes) -> int:
    return len(token) - len(token.rstrip(b"\\"))


def _finished(frames: list[Frame], scalar: bytes) -> bool:
    """A value has ended: note it in its container; False when it has none."""
    if not frames:
        return False
    top = frames[-1]
    top.state = "done"
    if top.kind == "[":
        top.count += 1
    elif scalar:
        top.done[top.keys[-1]] = scalar
    return True


class Ending(NamedTuple):
    """``text`` ends the value. ``word``: before it, the string that has begun must be ended as its pattern wants, which
    takes about so many tokens; ``hint`` is that pattern. ``steady``: it stays the shortest while the string goes on.
    ``jump``: how many tokens longer the shortest ending can become by one more token of the text (an estimate)."""

    text: bytes
    jump: int
    word: int = 0
    hint: bytes = b""
    steady: bool = False


class Closer:
    """``word(shape)``: the shortest string, with quotes, that matches pattern, format and lengths; None: not known.
    ``size(text)``: its tokens."""

    def __init__(self, schema: Node, word: Callable[[Node], bytes | None], size: Callable[[bytes], int]) -> None:
        self._size = size
        self._schema = schema
        self._document = Document(schema)
        self._word = word
        self._shapes: dict[int, list[Node]] = {}
        self._held: list[Any] = []  # what ids in the tables belong to
        self._smallest: dict[int, bytes] = {}
        self._known: set[int] = set()
        self._others: dict[int, Node] = {}
        self._level: list[Any] = [schema]  # what may stand in as many containers as there are bounds
        self._bounds: list[int] = []
        self._largest_option: dict[tuple[int, int], int] = {}

    # --- smallest instances

    def smallest(self, schema: Any = None) -> bytes | None:
        """The shortest instance; None: there is none, or it is not known."""
        schema = self._schema if schema is None else schema
        if type(schema) is not dict:
            return b"0" if schema is True else None
        if id(schema) not in self._known:
            self._solve(schema)
        return self._smallest.get(id(schema))

    def _solve(self, schema: Node) -> None:
        order: list[Node] = []
        todo = [schema]
        seen = {id(schema)}
        while todo and len(order) < MAX_NODES:
            node = todo.pop()
            order.append(node)
            for shape in self.shapes(node):
                for child in self._within(shape):
                    if type(child) is dict and id(child) not in seen and id(child) not in self._known:
                        seen.add(id(child))
                        todo.append(child)
        changed = True
        while changed:
            changed = False
            for node in reversed(order):
                fitting = (text for text in map(self._smallest_of, self.shapes(node)) if text and len(text) <= MAX_TEXT)
                best = min(fitting, key=len, default=None)
                old = self._smallest.get(id(node))
                if best is not None and (old is None or len(best) < len(old)):
                    self._smallest[id(node)] = best
                    changed = True
        self._known |= seen

    def bound(self, depth: int) -> int:
        """Tokens that a text with ``depth`` open containers can need at most, jump included."""
        while len(self._bounds) < depth + 2 and self._level:
            worst, deeper = 0, dict[int, Any]()
            for node in self._level:
                self.smallest(node)
                for shape in self.shapes(node):
                    worst = max(worst, self._worst(shape))
                    deeper |= {id(child): child for child in self._within(shape) if type(child) is dict}
            self._bounds.append(worst + (self._bounds[-1] if self._bounds else 0))
            self._level = list(deeper.values())
        return self._bounds[min(depth + 1, len(self._bounds) - 1)]

    def _worst(self, shape: Node) -> int:
        size = self._size(self._smallest_of(shape) or b"")
        return (2 if "pattern" in shape or "format" in shape else 1) * size + self._option(shape) + 8

    def _within(self, shape: Node) -> Iterator[Any]:
        yield from shape.get("properties", {}).values()
        yield from shape.get("patternProperties", {}).values()
        yield self._other(shape)
        items = shape.get("items")
        yield from items if type(items) is list else [items]
        yield from shape.get("prefixItems", ())
        yield shape.get("additionalItems")

    def _least(self, schema: Any) -> bytes | None:
        """The smallest instance as far as `_solve` has come."""
        if type(schema) is not dict:
            return b"0" if schema is not False else None
        if id(schema) in self._smallest:
            return self._smallest[id(schema)]
        return b"0" if not schema else None

    def _smallest_of(self, shape: Node) -> bytes | None:
        if "enum" in shape:
            return min((dumps(value) for value in shape["enum"]), key=len, default=None)
        kind = shape["type"]
        if kind == "object":
            rest = self._object_rest(shape, [], self._least)
            return None if rest is None else b"{" + rest.lstrip(b",")
        if kind == "array":
            rest = self._array_rest(shape, 0, self._least)
            return None if rest is None else b"[" + rest.lstrip(b",")
        if kind == "string":
            return self._smallest_string(shape)
        if kind in ("integer", "number"):
            return _smallest_number(shape)
        return b"true" if kind == "boolean" else b"null"

    def _smallest_string(self, shape: Node) -> bytes | None:
        if "pattern" in shape or "format" in shape:
            return self._word(shape)
        return b'"' + b"a" * min(int(shape.get("minLength", 0)), MAX_TEXT) + b'"'

    # --- shapes: a schema as alternatives without $ref, allOf, anyOf and lists of types

    def shapes(self, schema: Any) -> list[Node]:
        if type(schema) is not dict:
            schema = {} if schema else {"enum": []}
            self._held.append(schema)
        found = self._shapes.get(id(schema))
        if found is None:
            self._held.append(schema)
            found = self._shapes[id(schema)] = [typed for shape in self._flat(schema, ()) for typed in _by_type(shape)][
                :MAX_SHAPES
            ]
        return found

    def _flat(self, schema: Any, above: tuple[int, ...]) -> list[Node]:
        if schema is False or id(schema) in above or len(above) > 64:
            return []
        if type(schema) is not dict:
            return [{}]
        above = (*above, id(schema))
        own = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions")}
        if "const" in own:
            own["enum"] = [own.pop("const")]
        results = [own]
        factors: list[list[Node]] = []
        if type(schema.get("$ref")) is str:
            factors.append(self._flat(self._document.target(schema["$ref"]), above))
        factors += [self._flat(part, above) for part in schema.get("allOf", ())]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                factors.append([shape for branch in schema[keyword] for shape in self._flat(branch, above)])
        for factor in factors:
            merged = (_merged(a, b) for a, b in itertools.product(results, factor))
            results = list(itertools.islice((shape for shape in merged if shape is not None), MAX_SHAPES))
        return results

    # --- endings

    def endings(self, text: bytes) -> list[Ending] | None:
        """Ways to end a text that has begun, shortest first. None: not known; [Ending(b"", 0)]: it is whole."""
        frames = read(text)
        if frames is None:
            return [Ending(b"", 0)]
        return self._end(self._schema, frames, 0, text)

    def _end(self, schema: Any, frames: list[Frame], depth: int, text: bytes) -> list[Ending] | None:
        """Endings of the value that begins with ``frames[depth]``, or of one that has not begun."""
        if depth == len(frames):
            least = self.smallest(schema)
            return None if least is None else [Ending(least, self._entry(schema))]
        frame = frames[depth]
        found: list[Ending] = []
        for shape in self.shapes(schema):
            if "enum" in shape:
                found += self._end_constant(shape, text[frame.start :])
            elif frame.kind == "{" and shape["type"] == "object":
                found += self._end_object(shape, frames, depth, text)
            elif frame.kind == "[" and shape["type"] == "array":
                found += self._end_array(shape, frames, depth, text)
            elif not frame.kind:
                found += self._end_scalar(shape, frame.raw)
        if not found:
            return None
        found.sort(key=lambda ending: len(ending.text))
        spread = self._size(found[-1].text) - self._size(found[0].text)
        spread = max(spread, *(ending.jump for ending in found))
        unique = {(ending.text, ending.word): ending._replace(jump=spread) for ending in found}
        return list(unique.values())[:MAX_ENDINGS]

    def _entry(self, schema: Any) -> int:
        """Bytes by which a value that is due may grow over the smallest when a token begins it."""
        least = self.smallest(schema) or b""
        worst = 0
        for shape in self.shapes(schema):
            own = self._smallest_of(shape) or b""
            worst = max(worst, self._size(own) - self._size(least) + self._option(shape))
        return worst

    def _option(self, shape: Node, after: int = -1) -> int:
        """The most that one optional part of a container adds: a property that comes after place ``after``, an item."""
        key = (id(shape), after)
        if key not in self._largest_option:
            self._held.append(shape)
            worst = 0
            if shape.get("type") == "object":
                names = list(shape.get("properties", {}))
                for name in names[after + 1 :]:
                    least = self.smallest(shape["properties"][name])
                    worst = max(worst, self._size(dumps(name)) + 2 + self._size(least or b""))
                for other in (*shape.get("patternProperties", {}).values(), shape.get("additionalProperties", _ANY)):
                    worst = max(worst, 6 + self._size(self.smallest(other) or b""))
            elif shape.get("type") == "array":
                worst = max([1 + self._size(self.smallest(item) or b"") for item in self._items(shape)], default=0)
            self._largest_option[key] = worst
        return self._largest_option[key]

    def _items(self, shape: Node) -> list[Any]:
        items = shape.get("items", _ANY)
        first = items if type(items) is list else shape.get("prefixItems", [])
        rest = shape.get("additionalItems", _ANY) if type(items) is list else items
        return [*first, rest]

    def _end_constant(self, shape: Node, raw: bytes) -> list[Ending]:
        raw = raw.replace(b", ", b",").replace(b": ", b":")
        texts = [dumps(value) for value in shape["enum"]]
        fitting = [text[len(raw) :] for text in texts if text.startswith(raw)]
        longest = max(map(self._size, fitting), default=0)
        return [Ending(text, longest - self._size(text)) for text in sorted(fitting, key=len)[:MAX_ENDINGS]]

    def _end_scalar(self, shape: Node, raw: bytes) -> list[Ending]:
        kind = shape["type"]
        if raw[:1] == b'"':
            if kind != "string":
                return []
            if "pattern" in shape or "format" in shape:
                size = self._size(self._word(shape) or b"0123456789abcdef")
                return [Ending(b"", 2, word=max(1, size), hint=str(shape.get("pattern", "")).encode())]
            least = int(shape.get("minLength", 0))
            return [Ending(ending, 2, steady=least == 0) for ending in _string_ends(raw, least)]
        if kind == "boolean" or kind == "null":
            words = (b"true", b"false") if kind == "boolean" else (b"null",)
            return [Ending(word[len(raw) :], 0) for word in words if word.startswith(raw)]
        if kind in ("integer", "number") and raw[:1] in b"-0123456789":
            jump = 2 + max([len(str(shape[k])) for k in ("minimum", "maximum", "multipleOf") if k in shape], default=0)
            number = _smallest_number(shape) or b""
            own = [number[len(raw) :]] if number.startswith(raw) else []
            return [Ending(ending, jump) for ending in (*own, *_NUMBER_ENDS)]
        return []

    def _end_array(self, shape: Node, frames: list[Frame], depth: int, text: bytes) -> list[Ending]:
        frame = frames[depth]
        items = self._items(shape)
        jump = self._option(shape)
        if frame.state in ("start", "done"):
            rest = self._array_rest(shape, frame.count, self.smallest)
            if rest is None:
                return []
            return [Ending(rest.lstrip(b",") if frame.state == "start" else rest, jump + self._entry(items[-1]))]
        item = items[min(frame.count, len(items) - 1)]
        inner = self._end(item, frames, depth + 1, text)
        rest = self._array_rest(shape, frame.count + 1, self.smallest)
        if inner is None or rest is None:
            return []
        return [ending._replace(text=ending.text + rest, jump=max(ending.jump, jump)) for ending in inner]

    def _array_rest(self, shape: Node, count: int, least: Callable[[Any], bytes | None]) -> bytes | None:
        """From the end of an item: what ``minItems`` still wants, and the bracket."""
        items = self._items(shape)
        texts = []
        for index in range(count, min(int(shape.get("minItems", 0)), 4096)):
            item = least(items[min(index, len(items) - 1)])
            if item is None:
                return None
            texts.append(b"," + item)
        return b"".join(texts) + b"]"

    def _end_object(self, shape: Node, frames: list[Frame], depth: int, text: bytes) -> list[Ending]:
        frame = frames[depth]
        properties = shape.get("properties", {})
        for name, scalar in frame.done.items():
            if name in properties and not self._may_be(properties[name], scalar):
                return []
        names = list(properties)
        last = max((names.index(key) for key in frame.keys if key in properties), default=-1)
        if any(key not in properties for key in frame.keys):
            last = len(names)  # names of the answer's own choice come last
        jump = self._option(shape, last)
        if frame.state in ("start", "done"):
            rest = self._object_rest(shape, frame.keys, self.smallest)
            if rest is None:
                return []
            return [Ending(rest.lstrip(b",") if frame.state == "start" else rest, jump)]
        if frame.state in ("key", "comma"):
            return self._end_key(shape, frame, names[last + 1 :], jump)
        key = frame.keys[-1]
        if frame.state == "colon":
            inner: list[Ending] | None = self._end(self._property(shape, key), [], 0, text)
            inner = inner and [ending._replace(text=b":" + ending.text) for ending in inner]
        else:
            inner = self._end(self._property(shape, key), frames, depth + 1, text)
        rest = self._object_rest(shape, frame.keys, self.smallest)
        if inner is None or rest is None:
            return []
        return [ending._replace(text=ending.text + rest, jump=max(ending.jump, jump)) for ending in inner]

    def _end_key(self, shape: Node, frame: Frame, left: list[str], jump: int) -> list[Ending]:
        """A name has begun, or is due: each that it may become, with the smallest value."""
        begun = frame.key if frame.state == "key" else b""
        found: list[Ending] = []
        names = [name for name in (*left, *self._pattern_names(shape)) if dumps(name).startswith(begun)]
        free = [b'a"', b'_"', b'x1"'] if not begun else [b'"', b'a"', b'_"', b'1"']
        if shape.get("additionalProperties", True) is not False or shape.get("patternProperties"):
            for end in free:
                written = begun + end if begun else b'"' + end
                with_key = self._with_key(shape, frame.keys, written, begun)
                if with_key is not None:
                    found.append(with_key)
        for name in names:
            with_key = self._with_key(shape, frame.keys, dumps(name), begun)
            if with_key is not None:
                found.append(with_key)
        return [ending._replace(jump=max(ending.jump, jump)) for ending in found]

    def _pattern_names(self, shape: Node) -> list[str]:
        """A name for each of patternProperties."""
        words = (self._word({"type": "string", "pattern": p}) for p in list(shape.get("patternProperties", {}))[:8])
        return [json.loads(word) for word in words if word is not None]

    def _with_key(self, shape: Node, keys: list[str], written: bytes, begun: bytes) -> Ending | None:
        try:
            name = json.loads(written)
        except ValueError:
            return None
        schema = self._property(shape, name)
        value, rest = self.smallest(schema), self._object_rest(shape, [*keys, name], self.smallest)
        if value is None or rest is None or name in keys:
            return None
        return Ending(written[len(begun) :] + b":" + value + rest, self._entry(schema))

    def _property(self, shape: Node, name: str) -> Any:
        if name in shape.get("properties", {}):
            return shape["properties"][name]
        return self._other(shape)

    def _other(self, shape: Node) -> Any:
        """What a property that is not listed may be. Patterns are the matcher's to tell apart: a backtracking one could
        take for ever here."""
        rest = shape.get("additionalProperties", _ANY)
        patterns = list(shape.get("patternProperties", {}).values())
        if not patterns:
            return rest
        if id(shape) not in self._others:
            self._held.append(shape)
            self._others[id(shape)] = {"anyOf": [*patterns, *([] if rest is False else [rest])]}
        return self._others[id(shape)]

    def _may_be(self, schema: Any, scalar: bytes) -> bool:
        """Whether a finished scalar can be of that schema; tells the branches of a union apart."""
        value = json.loads(scalar)
        kinds = {
            bool: ("boolean",),
            str: ("string",),
            type(None): ("null",),
            int: ("integer", "number"),
            float: ("number", "integer"),
        }
        for shape in self.shapes(schema):
            if "enum" in shape:
                if any(type(v) is type(value) and v == value for v in shape["enum"]):
                    return True
            elif shape["type"] in kinds[type(value)]:
                return True
        return False

    def _object_rest(self, shape: Node, keys: list[str], least: Callable[[Any], bytes | None]) -> bytes | None:
        """From the end of a property: the required ones that are missing, in the schema's order, and the brace."""
        properties = shape.get("properties", {})
        required = shape.get("required", ())
        missing = [name for name in properties if name in required and name not in keys]
        missing += [name for name in dict.fromkeys(required) if name not in properties and name not in keys]
        short = int(shape.get("minProperties", 0)) - len(keys) - len(missing)
        if short > 0:
            others = [name for name in properties if name not in keys and name not in missing]
            sized = sorted((len(dumps(n)) + len(v), n) for n in others if (v := least(properties[n])) is not None)
            chosen = {name for _, name in sized[:short]}
            missing = [name for name in properties if name in missing or name in chosen] + [
                name for name in missing if name not in properties
            ]
            free = [name for name in self._pattern_names(shape) if name not in keys and name not in properties]
            free += [chr(97 + index) for index in range(26)] if shape.get("additionalProperties") is not False else []
            missing += free[: short - len(chosen)]
        texts = []
        for name in missing:
            value = least(self._property(shape, name))
            if value is None:
                return None
            texts.append(b"," + dumps(name) + b":" + value)
        return b"".join(texts) + b"}"


_TYPES: Final = ("null", "boolean", "integer", "string", "array", "object", "number")
_NUMBER_ENDS: Final = (
    b"", b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"00", b"10", b".5", b"000", b"100", b"0000",
    b"e1",
)  # fmt: skip


def _by_type(shape: Node) -> list[Node]:
    """One shape per type; a shape with constants is one."""
    if "enum" in shape:
        if type(shape["enum"]) is not list:
            return []
        return [shape]
    kinds = shape.get("type", _TYPES)
    return [{**shape, "type": kind} for kind in ((kinds,) if type(kinds) is str else kinds) if kind in _TYPES]


def _merged(a: Node, b: Node) -> Node | None:
    """Both at once; None when their types or constants exclude each other."""
    result = dict(a)
    for keyword, value in b.items():
        if keyword not in result:
            result[keyword] = value
            continue
        mine = result[keyword]
        if keyword == "type":
            ours, theirs = ({x} if type(x) is str else set(x) for x in (mine, value))
            both = (ours & theirs) | ({"integer"} if {"integer", "number"} <= (ours | theirs) and
                                      ("integer" in ours or "integer" in theirs) else set())  # fmt: skip
            if not both:
                return None
            result["type"] = sorted(both)
        elif keyword == "enum":
            result["enum"] = [item for item in mine if item in value]
        elif keyword in ("properties", "patternProperties"):
            result[keyword] = {**mine, **{k: {"allOf": [mine[k], v]} if k in mine else v for k, v in value.items()}}
        elif keyword == "required":
            result["required"] = [*mine, *(name for name in value if name not in mine)]
        elif keyword in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            result[keyword] = max(mine, value)
        elif keyword in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            result[keyword] = min(mine, value)
        elif keyword == "items" and type(mine) is dict and type(value) is dict:
            result["items"] = {"allOf": [mine, value]}
        elif keyword == "additionalProperties":
            result[keyword] = False if False in (mine, value) else {"allOf": [mine, value]}
    return result


def _string_ends(raw: bytes, min_length: int) -> list[bytes]:
    """Ways to end a string that has begun: an open escape or character is completed first."""
    if _backslashes(raw) % 2:
        heads = [b"n"]
    else:
        tail = raw[-3:]
        missing = 0
        for back in range(1, len(tail) + 1):
            byte = tail[-back]
            if byte >= 0xC0:
                missing = max(0, (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) - back)
                break
            if byte < 0x80:
                break
        heads = [first * (missing > 0) + b"\x80" * (missing - 1) for first in (b"\x80", b"\xa0", b"\x90")]
        heads = heads if missing else [b""]
        hex_digits = re.search(rb"(?<!\\)(?:\\\\)*\\u([0-9a-fA-F]{0,3})$", raw)
        if hex_digits:
            heads = [b"0" * (4 - len(hex_digits.group(1)) - 1) + b"1", b"0" * (4 - len(hex_digits.group(1)))]
    ends = []
    for head in heads:
        try:
            length = len(json.loads(raw + head + b'"'))
        except ValueError:
            length = 0
        ends.append(head + b"a" * max(0, min_length - length) + b'"')
    return ends


def _smallest_number(shape: Node) -> bytes | None:
    def fits(value: float) -> bool:
        low, high = shape.get("minimum", -math.inf), shape.get("maximum", math.inf)
        above, below = shape.get("exclusiveMinimum", False), shape.get("exclusiveMaximum", False)
        if type(above) is bool:  # draft 4
            low_ok = value > low if above else value >= low
        else:
            low_ok = value >= low and value > above
        if type(below) is bool:
            high_ok = value < high if below else value <= high
        else:
            high_ok = value <= high and value < below
        step = shape.get("multipleOf")
        return low_ok and high_ok and (not step or math.isclose(value / step, round(value / step), abs_tol=1e-9))

    ends = [shape[k] for k in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if
            type(shape.get(k)) in (int, float)]  # fmt: skip
    step = shape.get("multipleOf") or 1
    candidates: list[float] = [0, 1, 5, 9, step]
    for end in ends:
        whole = math.floor(end / step) * step
        candidates += [end, whole, whole + step, whole - step, math.floor(end), math.ceil(end)]
    if shape["type"] == "number" and len(ends) >= 2:
        candidates.append((min(ends) + max(ends)) / 2)
    if shape["type"] == "integer":
        candidates = [int(value) for value in candidates if value == int(value)]
    fitting = [int(v) if float(v).is_integer() else v for v in candidates if fits(v)]
    texts = [repr(value).encode() for value in fitting]
    return min(texts, key=len, default=None)
