"""The grammar port: what an answer may be, as a value; and the matcher that turns it into masks of allowed tokens.

A Constraint travels from the door to the worker, where app.py has built a Grammars. Compiling is bounded in time and
size and happens before the request is queued: what cannot be enforced is refused, never ignored.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]

ConstraintKind = Literal["json_object", "json_schema", "regex", "lark", "gbnf"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is the schema as JSON text, the pattern, or the grammar; "" for json_object.

    ``after``: the constraint begins after this text (the end tag of a reasoning part); "" means at once. ``opens``:
    that part is there only if the text begins with this tag; "": it has begun.
    ``param`` is the request's field to name in an error.
    """

    kind: ConstraintKind
    text: str = ""
    after: str = ""
    opens: str = ""
    param: str = "response_format"


class Matcher(Protocol):
    """The state of one choice. Not thread-safe."""

    def fill(self, row: U32, tokens_left: int) -> None:
        """Write the allowed next tokens into a bitset row: bit t % 32 of word t // 32; end of sequence is allowed
        where the text may end. ``tokens_left``, with this one: when it is no more than what the shortest ending needs,
        only that ending is allowed. Raises EngineError when the grammar is too complex to go on."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token; False (and no change) when the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        ...

    @property
    def ended(self) -> bool:
        """The last token was an end of sequence; nothing can follow."""
        ...


class Grammar(Protocol):
    """A compiled constraint; shared by the choices of a request, and by requests."""

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest text that is known to match, with the end of sequence; 0: none is known."""
        ...

    def open(self) -> Matcher:
        """A matcher at the start. Safe from any thread."""
        ...


class Grammars(Protocol):
    """Implementation: data.grammar (llguidance). Thread-safe."""

    @property
    def nbytes(self) -> int:
        """About the memory that it holds: the vocabulary, once the first constraint has come."""
        ...

    def compile(self, constraint: Constraint) -> Grammar:
        """Bounded in time and memory. Raises InvalidRequest (code invalid_json_schema, unsupported_parameter) naming
        ``constraint.param`` and the keyword."""
        ...


def constraint_key(constraint: Constraint) -> Any:
    """Equal constraints have equal keys: what a cache of compiled grammars goes by."""
    return constraint.kind, constraint.text, constraint.after, constraint.opens
