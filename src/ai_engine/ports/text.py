"""The text ports: strings to ids, ids to bytes, messages to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    ids: list[int]


class Tokenizer(Protocol):
    """Implementation: data.tokenizer.ModelTokenizer. Thread-safe; encode may take long, call it off the event loop."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        """Ids of ``text``. ``add_special`` prepends BOS where the model wants one (never a second one);
        ``parse_special`` turns the text of control tokens into those tokens."""
        ...

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        """The exact bytes this token stands for in a running text; b"" for control tokens when skipped."""
        ...

    def is_special(self, token: int) -> bool: ...


class ChatTemplate(Protocol):
    """Implementation: data.template.JinjaTemplate."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text, special tokens included. Raises InvalidRequest when the template refuses the messages."""
        ...
