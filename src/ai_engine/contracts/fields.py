"""Declared fields and their checks: JSON values in, the same values out, or one error that says how to mend them.

Owns types, ranges, enums, nesting, item limits and what happens to a field that is known but not used, not supported,
or unknown. Does not own syntax (json_text.py) or what fields mean together (the door that declared them).

Nothing is coerced, cut or filled in, with two exceptions that lose nothing: a float with an integer value is that
integer (some clients write 1.0), and null is the same as absent where a field is optional (SDKs send nulls).
A boolean is never a number. A check appends to and pops from ``Checking.path``, so an error knows where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from ai_engine.ports.errors import InvalidRequest, InvalidValue, UnsupportedParameter

Schema = dict[str, Any]
JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@dataclass
class Checking:
    """One run of a check: where it stands, how strict it is, what it has to say to the caller."""

    strict: bool = False
    path: list[str | int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def where(self) -> str:
        """The path as people write it: ``messages[2].content``."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in self.path)
        return text.removeprefix(".")

    def fail(self, found: str, expected: str, fix: str = "", error: type[InvalidRequest] = InvalidValue) -> NoReturn:
        where = self.where()
        message = f"{where or 'The request body'}: found {found}, expected {expected}."
        raise error(f"{message} Fix: {fix}" if fix else message, param=where or None)

    def unsupported(self, reason: str) -> NoReturn:
        where = self.where()
        raise UnsupportedParameter(f"{where}: {reason}", param=where)

    def ignored(self, reason: str) -> None:
        """A field that changes nothing here: a warning, or an error for a strict caller."""
        where = self.where()
        if self.strict:
            raise UnsupportedParameter(f"{where}: {reason} Fix: leave it out.", param=where)
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{where}: {reason}")


MAX_WARNINGS = 32
"""More than this many ignored fields are not listed one by one."""


class Check(Protocol):
    """``check`` returns the value to use; ``expected`` says in words what it takes. A check may have a ``schema`` too,
    which says it in JSON Schema 2020-12 (as far as that can: what fields mean together only words say)."""

    @property
    def expected(self) -> str: ...

    def check(self, value: Any, at: Checking) -> Any: ...


def schema_of(check: Check) -> Schema:
    """The check's schema; one that has none says its words."""
    found: Schema | None = getattr(check, "schema", None)
    return {"description": check.expected} if found is None else found


def show(value: Any) -> str:
    """A found value, short enough for a message."""
    if isinstance(value, str):
        return f"the string {value[:40]!r}" + (f"... ({len(value)} characters)" if len(value) > 40 else "")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float):
        return str(value)
    return JSON_NAMES.get(type(value), f"a {type(value).__name__}")  # of Python's, where no JSON was parsed


@dataclass(frozen=True)
class Flag:
    expected: str = "true or false"

    @property
    def schema(self) -> Schema:
        return {"type": "boolean"}

    def check(self, value: Any, at: Checking) -> bool:
        if type(value) is not bool:
            at.fail(show(value), self.expected)
        return value


@dataclass(frozen=True)
class Integer:
    low: int = -(1 << 63)
    high: int = (1 << 63) - 1
    fix: str = ""

    @property
    def expected(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    @property
    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def check(self, value: Any, at: Checking) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            at.fail(show(value), self.expected, self.fix)
        return value

    def all_good(self, values: list[Any]) -> bool:
        """Whether every item passes as it is; much faster than one at a time."""
        return set(map(type, values)) == {int} and min(values) >= self.low and max(values) <= self.high


@dataclass(frozen=True)
class Number:
    low: float
    high: float

    @property
    def expected(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    def check(self, value: Any, at: Checking) -> float:
        if type(value) is not float and type(value) is not int:
            at.fail(show(value), self.expected)
        if not self.low <= value <= self.high:
            at.fail(show(value), self.expected)
        return float(value)


@dataclass(frozen=True)
class Text:
    min_chars: int = 0
    max_chars: int = 1 << 24

    @property
    def expected(self) -> str:
        return "a string" if not self.min_chars else f"a string of {self.min_chars} to {self.max_chars} characters"

    @property
    def schema(self) -> Schema:
        return {"type": "string", "minLength": self.min_chars, "maxLength": self.max_chars}

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is not str:
            at.fail(show(value), self.expected)
        if not self.min_chars <= len(value) <= self.max_chars:
            at.fail(f"a string of {len(value)} characters", f"{self.min_chars} to {self.max_chars} characters")
        return value


@dataclass(frozen=True)
class Choice:
    values: tuple[str, ...]

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(f'"{value}"' for value in self.values)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)}

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is not str or value not in self.values:
            at.fail(show(value), self.expected)
        return value


@dataclass(frozen=True)
class Anything:
    """Any JSON value: for fields whose content is passed on or ignored."""

    expected: str = "any value"

    @property
    def schema(self) -> Schema:
        return {}

    def check(self, value: Any, at: Checking) -> Any:
        return value


@dataclass(frozen=True)
class AnyObject:
    """An object of any fields: a JSON Schema, the arguments of a call."""

    expected: str = "an object"

    @property
    def schema(self) -> Schema:
        return {"type": "object"}

    def check(self, value: Any, at: Checking) -> dict[str, Any]:
        if type(value) is not dict:
            at.fail(show(value), self.expected)
        return value


@dataclass(frozen=True)
class ListOf:
    item: Check
    min_items: int = 0
    max_items: int = 1 << 20

    @property
    def expected(self) -> str:
        return "an array"

    @property
    def schema(self) -> Schema:
        limits = {"minItems": self.min_items, "maxItems": self.max_items}
        return {"type": "array", "items": schema_of(self.item), **limits}

    def check(self, value: Any, at: Checking) -> list[Any]:
        if type(value) is not list:
            at.fail(show(value), self.expected)
        if not self.min_items <= len(value) <= self.max_items:
            at.fail(f"{len(value)} items", f"{self.min_items} to {self.max_items}")
        if isinstance(self.item, Integer) and value and self.item.all_good(value):
            return value
        checked = []
        at.path.append(0)
        for index, item in enumerate(value):
            at.path[-1] = index
            checked.append(self.item.check(item, at))
        at.path.pop()
        return checked


@dataclass(frozen=True)
class TokenKeys:
    """An object from token ids, written as strings, to numbers."""

    value: Number
    vocab_size: int
    max_items: int = 1024
    expected: str = "an object from token ids to numbers"

    @property
    def schema(self) -> Schema:
        keys = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
        limits = {"maxProperties": self.max_items, "propertyNames": keys}
        return {"type": "object", "additionalProperties": schema_of(self.value), **limits}

    def check(self, value: Any, at: Checking) -> dict[int, float]:
        if type(value) is not dict:
            at.fail(show(value), self.expected)
        if len(value) > self.max_items:
            at.fail(f"{len(value)} entries", f"at most {self.max_items}")
        checked = {}
        for key, item in value.items():
            at.path.append(key)
            token = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
            if not 0 <= token < self.vocab_size or str(token) != key:  # "07" and "7" would be one key twice
                at.fail(show(key), f"a token id from 0 to {self.vocab_size - 1}", "keys are token ids, not text.")
            checked[token] = self.value.check(item, at)
            at.path.pop()
        return checked


@dataclass(frozen=True)
class ByType:
    """One check per JSON type: a string or an array of strings, say."""

    options: Mapping[type, Check]

    @property
    def expected(self) -> str:
        return " or ".join(option.expected for option in self.options.values())

    @property
    def schema(self) -> Schema:
        return {"anyOf": [schema_of(option) for option in self.options.values()]}

    def check(self, value: Any, at: Checking) -> Any:
        option = self.options.get(type(value))
        if option is None:
            at.fail(show(value), self.expected)
        return option.check(value, at)


@dataclass(frozen=True)
class Unused:
    """A field we know and do nothing with. A neutral value (what we do anyway) passes in silence."""

    reason: str = "accepted and not used."
    neutral: tuple[Any, ...] = ()
    expected: str = "any value"

    @property
    def schema(self) -> Schema:
        return {"description": f"Not used: {self.reason}"}

    def check(self, value: Any, at: Checking) -> None:
        if not _is_one_of(value, self.neutral):
            at.ignored(self.reason)


@dataclass(frozen=True)
class Unsupported:
    """A field that would change the answer and that we do not enforce: refused, unless its value asks for nothing."""

    reason: str = "not supported by this server. Fix: leave it out."
    neutral: tuple[Any, ...] = ()
    expected: str = "nothing"

    @property
    def schema(self) -> Schema:
        return {"description": f"Refused: {self.reason}", "enum": [*self.neutral, None]}

    def check(self, value: Any, at: Checking) -> None:
        if not _is_one_of(value, self.neutral):
            at.unsupported(self.reason)


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    return any(type(value) is type(item) and value == item for item in allowed)


@dataclass(frozen=True)
class Record:
    """An object with declared fields. The checked dict holds only fields that were there and are used."""

    fields: Mapping[str, Check]
    required: frozenset[str] = frozenset()
    expected: str = "an object"

    @property
    def schema(self) -> Schema:
        """Unknown fields are allowed: they are ignored with a warning, or refused for a strict caller."""
        properties = {
            name: schema_of(check) if name in self.required else nullable(schema_of(check))
            for name, check in self.fields.items()
        }
        return {"type": "object", "properties": properties, "required": sorted(self.required)}

    def check(self, value: Any, at: Checking) -> dict[str, Any]:
        if type(value) is not dict:
            at.fail(show(value), self.expected)
        checked: dict[str, Any] = {}
        for name, item in value.items():
            if item is None and name not in self.required:
                continue
            at.path.append(name)
            declared = self.fields.get(name)
            if declared is None:
                at.ignored("unknown field, ignored.")
            else:
                result = declared.check(item, at)
                if result is not None:
                    checked[name] = result
            at.path.pop()
        if self.required - value.keys():
            missing = next(name for name in self.fields if name in self.required and name not in value)
            at.path.append(missing)
            at.fail("nothing", self.fields[missing].expected, "add this required field.")
        return checked


@dataclass(frozen=True)
class Tagged:
    """An object whose ``type`` says which of several it is; ``default`` is the type of one that does not say. Types
    in ``refused`` are known and not supported: why not."""

    kinds: Mapping[str, Check]
    refused: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    expected: str = "an object with a type"

    @property
    def schema(self) -> Schema:
        return {"anyOf": [self._tagged(kind, schema_of(check)) for kind, check in self.kinds.items()]}

    def _tagged(self, kind: str, schema: Schema) -> Schema:
        is_optional = kind == self.default
        properties = {**schema["properties"], "type": {"enum": [kind, None] if is_optional else [kind]}}
        required = sorted({*schema["required"], *(() if is_optional else ("type",))})
        return {**schema, "properties": properties, "required": required}

    def check(self, value: Any, at: Checking) -> dict[str, Any]:
        if type(value) is not dict:
            at.fail(show(value), self.expected)
        kind = value.get("type")
        if kind is None:
            kind = self.default
        found = self.kinds.get(kind) if type(kind) is str else None
        if found is None:
            at.path.append("type")
            if type(kind) is str and kind in self.refused:
                at.unsupported(f'"{kind}" {self.refused[kind]}')
            at.fail(show(value["type"]) if "type" in value else "nothing", Choice(tuple(self.kinds)).expected)
        checked: dict[str, Any] = found.check(value, at)
        checked["type"] = kind
        return checked


def nullable(schema: Schema) -> Schema:
    """The schema, or null: an optional field that is null counts as absent."""
    if not schema.keys() - {"description"} or None in schema.get("enum", ()):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}
