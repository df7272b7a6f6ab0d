"""ModelText: one model's tokeniser and template as the TextService that the doors use.

Owns the threads that encode, so that a long text holds up neither the event loop, nor the short texts of others, nor
the steps of running streams: eight megabytes take seconds, and the thread for long texts leaves most to others. Does
not own encoding itself (tokenizer.py, chat.py) nor what a choice's tokens become (output.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from ai_engine.data.chat import encode_chat
from ai_engine.data.infill import encode_infill
from ai_engine.data.output import OutputPath
from ai_engine.data.template import JinjaTemplate
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.model import TokenizerData
from ai_engine.ports.text import ANY_CALL, TEXT_ONLY, Encoded, ReplyForm, ToolChoice

LONG_CHARS: Final = 1 << 16
"""Texts from here on, which take 50 ms or more, have a thread of their own."""
LONG_NICENESS: Final = 10
"""Of that thread: a tenth of a core that computes steps too; at 19 it would be a seventieth."""


class ModelText:
    """Implements ports.text.TextService. ``cache_dir`` keeps what is slow to derive from the vocabulary."""

    def __init__(self, data: TokenizerData, *, cache_dir: Path | None = None) -> None:
        self.tokenizer = ModelTokenizer(data, cache_dir)
        self.template = JinjaTemplate.from_tokenizer(data)
        self._short = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long", initializer=_stand_back)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id

    @property
    def template_source(self) -> str:
        return self.template.source

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = ANY_CALL,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> Encoded:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread(_num_chars([messages, tools or ()], LONG_CHARS)),
            lambda: encode_chat(
                self.template,
                self.tokenizer,
                messages,
                tools=tools,
                tool_choice=tool_choice,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                reasoning_effort=reasoning_effort,
            ),
        )

    async def encode_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        return await self._encode(
            len(text), lambda: self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        )

    async def encode_infill(self, prefix: str, suffix: str) -> Encoded:
        return await self._encode(len(prefix) + len(suffix), lambda: encode_infill(self.tokenizer, prefix, suffix))

    async def _encode(self, num_chars: int, encode: Callable[[], Encoded]) -> Encoded:
        return await asyncio.get_running_loop().run_in_executor(self._thread(num_chars), _stamped, encode)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.piece(token, skip_special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.piece, tokens)).decode("utf-8", "replace")

    def open_output(
        self,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        form: ReplyForm = TEXT_ONLY,
        call_ids: str = "",
    ) -> OutputPath:
        return OutputPath(
            self.tokenizer,
            stops,
            include_stop=include_stop,
            skip_special=skip_special,
            min_tokens=min_tokens,
            form=form,
            call_ids=call_ids,
        )

    def close(self) -> None:
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    def _thread(self, num_chars: int) -> ThreadPoolExecutor:
        return self._short if num_chars < LONG_CHARS else self._long


def _stamped(encode: Callable[[], Encoded]) -> Encoded:
    begun_s = time.monotonic()
    encoded = encode()
    return msgspec.structs.replace(encoded, stamps=(begun_s, begun_s, time.monotonic()))


def _stand_back() -> None:
    """A low priority for this thread: on a machine whose cores are all computing steps, a step waits for its slowest
    thread, and every time slice that encoding takes is added to it."""
    with contextlib.suppress(OSError, AttributeError):  # a system without it has other means
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LONG_NICENESS)


def _num_chars(value: Any, enough: int) -> int:
    """Characters of all strings in ``value``; counting ends at ``enough``."""
    if isinstance(value, str):
        return len(value)
    total = 0
    if isinstance(value, (Mapping, Sequence)):
        for item in value.values() if isinstance(value, Mapping) else value:
            total += 1 + _num_chars(item, enough - total)
            if total >= enough:
                break
    return total
