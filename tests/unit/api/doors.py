"""A door with fakes behind it: scripted serving, bytes as tokens, and a client that speaks ASGI without a socket
(or uvicorn in a thread, where the socket matters).

Owns the text service that the doors' tests use; app.py's is built in the same way from data's pieces.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn

from ai_engine.api.app import ROUTES, Api
from ai_engine.api.http import ApiConfig
from ai_engine.api.keys import Keys
from ai_engine.api.limits import Limiter
from ai_engine.api.openai_types import ServedModel
from ai_engine.data.output import OutputPath
from ai_engine.ports.clock import Clock
from ai_engine.ports.serving import GenerateRequest, Serving
from ai_engine.ports.text import ANY_CALL, TEXT_ONLY, Encoded, OutputStream, ReplyForm, ToolChoice
from ai_engine.testing import ByteTokenizer, FakeTemplate, MemoryTelemetry, ScriptedServing, VirtualClock, answer

MODEL = ServedModel(id="m", max_context=512, vocab_size=260, created=1_700_000_000, aliases=("org/name", "gpt-4o"))
Body = Mapping[str, Any] | bytes | None


class ByteText:
    """Implements ports.text.TextService over bytes. ``form`` is how every chat's answer is written; its calls are read
    when the request has tools."""

    def __init__(self, *, add_bos: bool = False, form: ReplyForm = TEXT_ONLY) -> None:
        self.tokenizer = ByteTokenizer(add_bos=add_bos)
        self.form = form
        self.template_calls: list[dict[str, Any]] = []

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids

    @property
    def template_source(self) -> str:
        return "{% for m in messages %}{{ m.content }}{% endfor %}"

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
        self.template_calls.append(
            {"messages": messages, "add_generation_prompt": add_generation_prompt, "kwargs": template_kwargs}
            | {"tools": tools, "tool_choice": tool_choice, "reasoning_effort": reasoning_effort}
        )
        renamed = [{**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in messages]
        prompt = FakeTemplate().render(renamed, add_generation_prompt=add_generation_prompt)
        form = msgspec.structs.replace(
            self.form,
            calls=self.form.calls if tools and tool_choice.mode != "none" else "",
            names=tuple(tool["function"]["name"] for tool in tools or ()),
            one_call=bool(tool_choice.only) or not tool_choice.parallel,
        )
        return Encoded(self.tokenizer.encode(prompt).ids, form)

    async def encode_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    async def encode_infill(self, prefix: str, suffix: str) -> Encoded:
        return self.tokenizer.encode(f"<bos>{prefix}<eos>{suffix}<|im_end|>")

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
    ) -> OutputStream:
        return OutputPath(
            self.tokenizer,
            stops,
            include_stop=include_stop,
            skip_special=skip_special,
            min_tokens=min_tokens,
            form=form,
            call_ids=call_ids,
        )


def counting_entropy() -> Callable[[int], bytes]:
    """The first draw is all ...01, the next ...02: ids that a golden file can hold."""
    counter = itertools.count(1)
    return lambda n: next(counter).to_bytes(n, "big")


def api_config(**config: Any) -> ApiConfig:
    """What `serve` starts with, unless told otherwise."""
    fields: dict[str, Any] = {
        "strict": False, "max_body_bytes": 8 << 20, "request_timeout_s": None, "cors_origins": ()
    }  # fmt: skip
    return ApiConfig(**fields | config)


def make_api(
    serving: Serving | None = None,
    *,
    text: ByteText | None = None,
    model: ServedModel = MODEL,
    telemetry: MemoryTelemetry | None = None,
    clock: Clock | None = None,
    metrics: Callable[[], bytes] = lambda: b"# EOF\n",
    on_startup: Callable[[], Awaitable[None]] | None = None,
    on_shutdown: Callable[[], Awaitable[None]] | None = None,
    keys: Keys | None = None,
    limiter: Limiter | None = None,
    routes: Mapping[str, Any] = ROUTES,
    **config: Any,
) -> Api:
    return Api(
        serving=serving or ScriptedServing(),
        text=text or ByteText(),
        model=model,
        telemetry=telemetry or MemoryTelemetry(),
        metrics=metrics,
        config=api_config(**config),
        keys=keys,
        limiter=limiter,
        routes=routes,
        clock=clock or VirtualClock(),
        entropy=counting_entropy(),
        on_startup=on_startup,
        on_shutdown=on_shutdown,
    )


def saying(text: str, **options: Any) -> ScriptedServing:
    """Serving that says ``text``, a byte a token, in every choice of every prompt."""

    def script(request: GenerateRequest) -> list[Any]:
        return [c for i in range(request.n) for c in answer(request, tuple(text.encode()), index=i, **options)]

    return ScriptedServing(script)


class Reply:
    """A response as a client sees it."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, writes: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.writes = writes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of each event but [DONE], which must be the last."""
        events = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert all(event.startswith(("data: {", ": ")) for event in events[:-1]), events
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event.startswith("data: ")]

    def text(self, index: int = 0) -> str:
        """The streamed text of one choice."""
        choices = [c for event in self.events() for c in event.get("choices", []) if c["index"] == index]
        return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


class Client:
    """Calls an ASGI app. ``chunks`` splits the body; ``hang_up`` (an event) is when the client leaves; ``sending``
    is awaited for each message, as a slow connection would be."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def __call__(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        *,
        chunks: Sequence[bytes | float] | None = None,
        hang_up: asyncio.Event | None = None,
        on_write: Callable[[bytes], None] | None = None,
        sending: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        query: str = "",
    ) -> Reply:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pending: list[bytes | float] = list(chunks if chunks is not None else [raw])
        given = {k.lower(): v for k, v in (headers or {}).items()}
        if body is not None and not isinstance(body, bytes):
            given.setdefault("content-type", "application/json")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in given.items()],
        }
        left = hang_up or asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            while pending:
                item = pending.pop(0)
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    return {"type": "http.request", "body": item, "more_body": bool(pending)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if sending is not None:
                await sending(message)
            if on_write is not None and message.get("body"):
                on_write(message["body"])

        await self.api(scope, receive, send)
        if not sent:
            return Reply(0, {}, b"", [])
        assert sent[0]["type"] == "http.response.start"
        assert all(message["type"] == "http.response.body" for message in sent[1:])
        assert not sent[-1].get("more_body"), "the response was not ended"
        writes = [message["body"] for message in sent[1:]]
        reply_headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in sent[0]["headers"]]
        assert len(reply_headers) == len(dict(reply_headers)), f"a header is there twice: {reply_headers}"
        assert all(name == name.lower() for name, _ in reply_headers)
        return Reply(sent[0]["status"], dict(reply_headers), b"".join(writes), writes)

    async def chat(self, *, sending: Callable[[dict[str, Any]], Awaitable[None]] | None = None, **fields: Any) -> Reply:
        fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return await self("POST", "/v1/chat/completions", {"model": "m", **fields}, sending=sending)

    async def complete(self, **fields: Any) -> Reply:
        return await self("POST", "/v1/completions", {"model": "m", "prompt": "Hi", **fields})


def client(serving: Serving | None = None, **options: Any) -> Client:
    return Client(make_api(serving, **options))


class InThread:
    """uvicorn with an app on a free port of the loopback, in a thread of this process."""

    def __init__(self, app: Api) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="on", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
