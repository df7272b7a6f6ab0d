"""How much a long text being tokenised delays the steps of a stream that runs: gaps of the stream, with and without.

Run as `python -m bench.encode_beside`. A stream of a real model over HTTP; beside it, in alternate windows, another
process sends texts of 200 kB one after another (each is encoded, then refused as longer than the context). Gaps are
taken where the client gets the events; the delay is the difference of their p99.9. Writes
bench/results/encode-beside.json.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import multiprocessing.synchronize
import time
from typing import Any
from urllib.parse import urlsplit

from ai_engine.testing.process import Server
from bench.machine import save, stolen_s

TEXT_CHARS = 200_000
STREAM_TOKENS = 600
WINDOW_S = 2.0
ENOUGH = 1000
WORDS = "The scheduler counts every token, 12 of them or 4,096; naïve readers say it's slow. ".encode()


def post(connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def send_texts(
    address: str, go: multiprocessing.synchronize.Event, busy: multiprocessing.synchronize.Event, times: Any
) -> None:
    """While ``go`` is set: one text after another. ``busy``: one is being encoded, or about to be."""
    connection = http.client.HTTPConnection(address, timeout=120)
    number = 0
    while True:
        go.wait()
        number += 1
        text = f"{number} " + (WORDS * (TEXT_CHARS // len(WORDS) + 1)).decode()[:TEXT_CHARS]
        busy.set()
        started = time.monotonic()
        reply = post(connection, {"prompt": text, "max_tokens": 4})
        answer = json.loads(reply.read())
        assert answer["error"]["code"] == "context_length_exceeded", answer
        times.append(time.monotonic() - started)
        busy.clear()


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    server = Server("smollm2", "--served-name", "smollm2")
    address = urlsplit(server.url).netloc
    context = multiprocessing.get_context("spawn")
    go, busy, times = context.Event(), context.Event(), context.Manager().list()
    sender = context.Process(target=send_texts, args=(address, go, busy, times), daemon=True)
    sender.start()
    gaps: dict[bool, list[float]] = {False: [], True: []}
    stolen = stolen_s()
    try:
        while min(len(part) for part in gaps.values()) < ENOUGH:
            read_stream(address, go, busy, gaps)
    finally:
        sender.kill()
        server.stop()
    quiet, beside = gaps[False], gaps[True]
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    result = {
        "text_chars": TEXT_CHARS,
        "text_s": round(sum(times) / len(times), 4),
        "texts": len(times),
        "gaps_quiet": len(quiet),
        "gaps_beside": len(beside),
        "quiet_ms": {name: round(1000 * quantile(quiet, share), 2) for name, share in shares.items()},
        "beside_ms": {name: round(1000 * quantile(beside, share), 2) for name, share in shares.items()},
        "delay_p99.9_ms": round(1000 * (quantile(beside, 0.999) - quantile(quiet, 0.999)), 2),
        "delay_p99.9_over_quiet_median_ms": round(1000 * (quantile(beside, 0.999) - quantile(quiet, 0.5)), 2),
        "stolen_s": round(stolen_s() - stolen, 2),
    }
    print(json.dumps(result, indent=1))
    save("encode-beside", result)


def read_stream(
    address: str,
    go: multiprocessing.synchronize.Event,
    busy: multiprocessing.synchronize.Event,
    gaps: dict[bool, list[float]],
) -> None:
    """One stream; windows of quiet and of texts take turns. A gap counts as beside a text when one is encoded at both
    its ends, as quiet when at none."""
    connection = http.client.HTTPConnection(address, timeout=120)
    body = {"prompt": "Once", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    reply = post(connection, body)
    last, was_busy, turned = 0.0, False, time.monotonic()
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        now, is_busy = time.monotonic(), busy.is_set()
        if last and is_busy == was_busy:
            gaps[is_busy].append(now - last)
        last, was_busy = now, is_busy
        if now - turned > WINDOW_S:
            turned = now
            go.clear() if go.is_set() else go.set()
    connection.close()


if __name__ == "__main__":
    main()
