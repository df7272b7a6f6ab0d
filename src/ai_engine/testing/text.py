"""Bytes as tokens, and a template that reads like ChatML. Owns no vocabulary file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ai_engine.ports.errors import InvalidRequest
from ai_engine.ports.text import Encoded

SPECIALS: Final = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
BOS_ID: Final = 256
EOS_ID: Final = 257
IM_END_ID: Final = 259
_SPECIAL_IDS: Final = {text: 256 + i for i, text in enumerate(SPECIALS)}
_SPLIT: Final = re.compile("(" + "|".join(re.escape(text) for text in SPECIALS) + ")")


class ByteTokenizer:
    """Implements ports.text.Tokenizer: id b < 256 is that byte; 256.. are SPECIALS. Any split of any text occurs."""

    def __init__(self, *, add_bos: bool = False) -> None:
        self._add_bos = add_bos

    @property
    def vocab_size(self) -> int:
        return 256 + len(SPECIALS)

    @property
    def bos_id(self) -> int | None:
        return BOS_ID if self._add_bos else None

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset((EOS_ID, IM_END_ID))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        ids: list[int] = []
        for part in _SPLIT.split(text) if parse_special else [text]:
            special = _SPECIAL_IDS.get(part) if parse_special else None
            ids.extend(part.encode("utf-8", "surrogatepass") if special is None else [special])
        if add_special and self._add_bos and ids[:1] != [BOS_ID]:
            ids.insert(0, BOS_ID)
        return Encoded(ids)

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        if token < 256:
            return bytes((token,))
        return b"" if skip_special else SPECIALS[token - 256].encode()

    def is_special(self, token: int) -> bool:
        return token >= 256


class FakeTemplate:
    """Implements ports.text.ChatTemplate: ``<|im_start|>role\\ncontent<|im_end|>\\n`` for each message."""

    roles: Final = ("system", "user", "assistant", "tool")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        parts = []
        for message in messages:
            if message["role"] not in self.roles:
                known = ", ".join(self.roles)
                raise InvalidRequest(
                    f"messages: role {message['role']!r} is not known to this template; it knows {known}",
                    param="messages",
                )
            parts.append(f"<|im_start|>{message['role']}\n{_text(message.get('content'))}<|im_end|>\n")
        return "".join(parts) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
