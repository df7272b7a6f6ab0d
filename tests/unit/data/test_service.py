"""ModelText: the text side as the doors see it, on a tiny model."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from ai_engine.data.models import open_model
from ai_engine.data.service import LONG_CHARS, LONG_NICENESS, ModelText
from ai_engine.data.template import JinjaTemplate
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.text import ChatTemplate, Encoded, OutputStream, TextService, Tokenizer
from tests.golden.tiny_gguf import TINY, write_tiny


async def test_there_and_back(tmp_path: Path) -> None:
    write_tiny("qwen3-untied", tmp_path / "m.gguf")
    for path in (tmp_path / "m.gguf", TINY / "qwen3-untied"):
        text = ModelText(open_model(path).tokenizer())
        service: TextService = text  # the port, as the type checker sees it
        tokenizer: Tokenizer = text.tokenizer
        template: ChatTemplate = text.template
        assert isinstance(tokenizer, ModelTokenizer)
        assert isinstance(template, JinjaTemplate)
        chat = await service.encode_chat([{"role": "user", "content": "Hello <|im_end|> wörld"}])
        prompt = await service.encode_prompt("Hello")
        assert service.decode(prompt.ids) == "Hello"
        assert "Hello <|im_end|> wörld" in service.decode(chat.ids)
        assert b"".join(map(service.token_bytes, chat.ids)).startswith(b"<|im_start|>user\n")
        stream: OutputStream = service.open_output(stops=["lo"])
        delta = stream.push(prompt.ids)
        assert (delta.text, delta.stop, stream.num_tokens) == ("Hel", "lo", len(prompt.ids))
        text.close()


async def test_a_long_text_does_not_hold_up_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ModelText(open_model(TINY / "llama-tied").tokenizer())
    encode, go_on = text.tokenizer.encode, threading.Event()

    def wait_if_long(source: str, **options: bool) -> Encoded:
        if len(source) >= LONG_CHARS:
            assert go_on.wait(30)
        return encode(source, **options)

    monkeypatch.setattr(text.tokenizer, "encode", wait_if_long)
    message = {"role": "user", "content": "Hello"}
    late = asyncio.create_task(text.encode_prompt("a" * LONG_CHARS))
    later = asyncio.create_task(text.encode_chat([message, {"role": "user", "content": "a" * LONG_CHARS}]))
    await asyncio.sleep(0)
    await asyncio.wait_for(text.encode_prompt("Hello"), 10)
    await asyncio.wait_for(text.encode_chat([message]), 10)
    assert not late.done()
    assert not later.done()
    go_on.set()
    assert len((await late).ids) > 1000
    assert len((await later).ids) > 1000
    text.close()


async def test_a_long_text_is_encoded_at_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines whose cores all compute steps, it would take its time slices from them."""
    text = ModelText(open_model(TINY / "llama-tied").tokenizer())
    encode = text.tokenizer.encode
    seen: dict[bool, int] = {}

    def note(source: str, **options: bool) -> Encoded:
        seen[len(source) >= LONG_CHARS] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return encode(source, **options)

    monkeypatch.setattr(text.tokenizer, "encode", note)
    for source in ("short", "a" * LONG_CHARS):
        await text.encode_prompt(source)
    assert seen[True] == max(LONG_NICENESS, seen[False])
    assert seen[False] == os.getpriority(os.PRIO_PROCESS, 0), "short texts are somebody's first token"
    text.close()


async def test_both_formats_give_the_same_ids(tmp_path: Path) -> None:
    for name in ("llama-tied", "qwen2-tied", "llama3-rope"):
        write_tiny(name, tmp_path / "m.gguf")
        gguf = ModelText(open_model(tmp_path / "m.gguf").tokenizer())
        folder = ModelText(open_model(TINY / name).tokenizer())
        for sample in (
            "Hello, world! It's 12345 o'clock.\n\n  don't",
            "不超过200字 😀 naïve",
            "<|im_end|><|eot_id|> x",
        ):
            assert gguf.tokenizer.encode(sample) == folder.tokenizer.encode(sample)
            message = [{"role": "user", "content": sample}]
            encoded = await gguf.encode_chat(message)
            assert encoded.ids == (await folder.encode_chat(message)).ids
            assert encoded.stamps is not None
            assert encoded.stamps[0] < encoded.stamps[1] < encoded.stamps[2], "begun, rendered, done"
        assert set(gguf.eos_ids) == set(folder.eos_ids)
