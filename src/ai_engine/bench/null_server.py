"""A server that thinks of nothing: it streams a fixed number of tokens at a fixed pace, to measure the client alone.

    python -m ai_engine.bench.null_server TOKENS GAP_MS     prints its port, runs until its standard input ends

Owns no model; the events look like a completion stream's.
"""

from __future__ import annotations

import asyncio
import json
import sys

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


def event(body: str) -> bytes:
    data = f"data: {body}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, gap_s: float) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(row[15:]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:")), 0)
    await reader.readexactly(length)
    writer.write(_HEAD)
    loop = asyncio.get_running_loop()
    start = loop.time()
    for i in range(tokens):
        await asyncio.sleep(max(0.0, start + (i + 1) * gap_s - loop.time()))
        writer.write(event(json.dumps({"choices": [{"index": 0, "text": " x", "finish_reason": None}]})))
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    writer.write(event(json.dumps({"choices": [], "usage": usage})) + event("[DONE]") + b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def serve(tokens: int, gap_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: answer(r, w, tokens, gap_s), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
