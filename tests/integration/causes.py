"""Ten reasons why a request is slow, each planted on a real server; and the figure of its trace that tells each.

Owns the planting and the figures of docs/runbook.md. A plant returns (trace of a quick request, trace of the slow one);
a figure is a number of one trace, larger where its cause is at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ai_engine.testing.process import Server

Trace = dict[str, Any]  # the tree of one request
SHOWN_STEPS = 24
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "through", "an", "old",
    "forest", "until", "it", "finds", "water",
)  # fmt: skip


def words(count: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + index * 7 + index // 5) % len(WORDS)] for index in range(count))


class Door:
    """Requests to one server, and their traces."""

    def __init__(self, url: str) -> None:
        self.url = url

    def body(self, prompt: str, max_tokens: int, **more: Any) -> bytes:
        fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return json.dumps({**fields, **more}).encode()

    def send(self, prompt: str, max_tokens: int = 32, **more: Any) -> str:
        """Wait for the whole answer; its trace id."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", self.body(prompt, max_tokens, **more), headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()
            return str(reply.headers["x-ai-trace-id"])

    def trace(self, trace_id: str) -> Trace:
        """The trace, once its last event has come, with the ops of up to ``SHOWN_STEPS`` of its own steps."""
        deadline = time.monotonic() + 10
        while not (found := self._read(trace_id)) or not (found["choices"] and found["steps"]):
            assert time.monotonic() < deadline, f"no trace {trace_id}"
            time.sleep(0.05)
        own = [str(step["step"]) for step in found["steps"] if is_own(step)]
        return self._read(trace_id, ",".join(own[:: len(own) // SHOWN_STEPS + 1])) or found

    def _read(self, trace_id: str, steps: str = "") -> Trace | None:
        try:
            with urllib.request.urlopen(f"{self.url}/traces/{trace_id}?step={steps}", timeout=60) as reply:
                found: Trace = json.load(reply)["requests"][0]
                return found
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def traced(self, prompt: str, max_tokens: int = 32, **more: Any) -> Trace:
        return self.trace(self.send(prompt, max_tokens, **more))

    @contextmanager
    def opened(
        self, prompt: str, max_tokens: int, *, pause_s: float = 0, asleep_s: float = 0, **more: Any
    ) -> Iterator[str]:
        """A request that has its first token; its trace id. At the end its answer is waited for. The body takes
        ``pause_s`` to come, the client reads nothing for ``asleep_s``."""
        link, trace_id = connect(self.url, self.body(prompt, max_tokens, **more), pause_s)
        reader = threading.Thread(target=drain, args=(link, asleep_s))
        reader.start()
        yield trace_id
        reader.join()


# --- figures: of one trace


def part(name: str) -> Callable[[Trace], float]:
    """Seconds of a part."""
    return lambda trace: sum(float(each["seconds"]) for each in trace["parts"] if each["name"] == name)


def others_rows(trace: Trace) -> float:
    """Rows of other requests in a decode step, on average over its time."""
    decodes = [step for step in trace["steps"] if step["part"] == "decode"]
    seconds = sum(float(step["seconds"]) for step in decodes)
    rows = sum(float(step["all_rows"] - own_rows(step)) * float(step["seconds"]) for step in decodes)
    return rows / max(seconds, 1e-9)


def own_rows(step: Trace) -> int:
    return sum(int(rows) for rows in step["rows"].values())


def prompt_rows(trace: Trace) -> float:
    """Rows of its prompt that the cache did not have."""
    return float(sum(choice["prompt_tokens"] - choice["cached_tokens"] for choice in trace["choices"]))


def repeated_rows(trace: Trace) -> float:
    """Rows computed again after the request's pages were taken away."""
    return sum(float(step["rows"]["prefill"]) for step in trace["steps"]) - prompt_rows(trace)


def is_own(step: Trace) -> bool:
    """A decode step of one row, which is this request's: such steps of two requests can be compared."""
    return bool(step["part"] == "decode" and step["all_rows"] == 1)


def own_ops(trace: Trace) -> list[dict[str, list[float]]]:
    """Of each step that is its own, and shown: the seconds of its ops, by kind."""
    steps = []
    for step in trace["steps"]:
        if is_own(step) and "runs" in step:
            ops: dict[str, list[float]] = defaultdict(list)
            for op in (op for run in step["runs"] for layer in run for op in layer["ops"]):
                ops[op["op"]].append(op["seconds"])
            steps.append(ops)
    return steps


def op_share(kind: str) -> Callable[[Trace], float]:
    """Of the time of all ops of a step of its own, the share of one kind; the median of steps."""

    def share(trace: Trace) -> float:
        shares = [sum(ops[kind]) / sum(map(sum, ops.values())) for ops in own_ops(trace)]
        return statistics.median(shares or [0.0])

    return share


def matmul_seconds(trace: Trace) -> float:
    """A matmul of its own steps, on average: the same bytes in every trace of a model."""
    return statistics.fmean([seconds for ops in own_ops(trace) for seconds in ops["matmul"]] or [0.0])


# --- plants


def long_neighbour(door: Door) -> tuple[Trace, Trace]:
    """A long prompt comes while this request is written."""
    quick = door.traced(words(20), 60)
    with door.opened(words(20), 60) as slow:
        door.send(words(1500, start=3), 1)
    return quick, door.trace(slow)


def cold_prefix(door: Door) -> tuple[Trace, Trace]:
    """The same text, with a word before it."""
    door.send(words(800), 4)
    return door.traced(words(800), 4), door.traced("Now " + words(800), 4)


def tokeniser_busy(door: Door) -> tuple[Trace, Trace]:
    """Others' megabytes are encoded where this request's 70 kB wait to be."""
    text = " " * 70_000  # few tokens
    quick = door.traced(text, 4)

    def megabytes() -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # longer than the context: refused once it is counted
            door.send(words(400_000), 1)

    others = [threading.Thread(target=megabytes) for _ in range(3)]
    for other in others:
        other.start()
    time.sleep(0.2)
    slow = door.traced(text, 4)
    for other in others:
        other.join()
    return quick, slow


def cpu_stolen(door: Door) -> tuple[Trace, Trace]:
    """Other processes want every core."""
    quick = door.traced(words(20), 20)
    loop = [sys.executable, "-c", "while True: pass"]
    thieves = [subprocess.Popen(loop) for _ in range(4 * len(os.sched_getaffinity(0)))]
    try:
        time.sleep(0.3)  # they are up
        return quick, door.traced(words(20), 20)
    finally:
        for thief in thieves:
            thief.kill()
            thief.wait()


def queue_full(door: Door) -> tuple[Trace, Trace]:
    """Two seats, both taken for long."""
    quick = door.traced(words(20), 8)
    with door.opened(words(30, start=1), 200), door.opened(words(30, start=2), 200):
        slow = door.traced(words(20), 8)
    return quick, slow


def slow_sampling(door: Door) -> tuple[Trace, Trace]:
    """So flat a distribution, and so many tokens to keep of it, that drawing takes longer than a layer."""
    flat = {"temperature": 2.0, "top_p": 0.9999, "top_k": 40_000, "seed": 1}
    return door.traced(words(20), 40), door.traced(words(20), 40, **flat)


def preempted(door: Door) -> tuple[Trace, Trace]:
    """Two that grow share a pool that holds one of them and a half."""
    quick = door.traced(words(200), 240)
    with door.opened(words(200, start=5), 320):
        return quick, door.traced(words(200), 240)


def slow_reader(door: Door) -> tuple[Trace, Trace]:
    """A client that lets the answer lie."""
    quick = door.traced(words(20), 150, logprobs=5, n=4)
    with door.opened(words(20), 150, logprobs=5, n=4, asleep_s=1 + 1.5 * quick["seconds"]) as slow:
        pass
    return quick, door.trace(slow)


def slow_sender(door: Door) -> tuple[Trace, Trace]:
    """A client whose body takes a second to come."""
    quick = door.traced(words(200), 4)
    with door.opened(words(200), 4, pause_s=1.0) as slow:
        pass
    return quick, door.trace(slow)


def deep_context(door: Door) -> tuple[Trace, Trace]:
    """A long conversation: even where the cache has it, every token looks at all of it."""
    door.send(words(1800), 1)
    return door.traced(words(20), 40), door.traced(words(1800), 40)


# --- a client by hand, for the slow ones


def connect(url: str, body: bytes, pause_s: float) -> tuple[socket.socket, str]:
    """An answer that has begun, and its trace id. Its pipe is thin: what is not read soon holds the server up."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the loopback's 64 kB make buffers of megabytes
    link.settimeout(120)
    parts = urlsplit(url)
    link.connect((parts.hostname, parts.port))
    link.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:50]
    )
    time.sleep(pause_s)
    link.sendall(body[50:])
    seen = b""
    while b"data: " not in seen:
        got = link.recv(256)
        assert got, seen
        seen += got
    lines = seen.decode("latin-1").split("\r\n")
    return link, next(line.split(": ")[1] for line in lines if line.startswith("x-ai-trace-id"))


def drain(link: socket.socket, asleep_s: float) -> None:
    time.sleep(asleep_s)
    while link.recv(1 << 16):
        pass
    link.close()


class Cause(NamedTuple):
    """Where the cause is at work, ``figure`` is at least ``least`` and at least ``times`` that of a quick request."""

    name: str
    plant: Callable[[Door], tuple[Trace, Trace]]
    figure: Callable[[Trace], float]
    times: float
    least: float
    small: bool = False  # planted on a server with two seats and few KV pages

    @property
    def title(self) -> str:
        return self.name[0].upper() + self.name[1:]

    def tells(self, quick: Trace, slow: Trace) -> bool:
        return self.figure(slow) >= max(self.least, self.times * self.figure(quick))


CAUSES = (
    Cause("long neighbour", long_neighbour, others_rows, 10, 8),
    Cause("cold prefix", cold_prefix, prompt_rows, 10, 500),
    Cause("tokeniser busy", tokeniser_busy, part("encode_wait"), 10, 0.1),
    Cause("CPU stolen", cpu_stolen, matmul_seconds, 3, 1e-6),
    Cause("slow sampling", slow_sampling, op_share("sample"), 4, 0.03),
    Cause("slow reader", slow_reader, part("send"), 5, 0.5),
    Cause("slow sender", slow_sender, part("receive"), 20, 0.9),
    Cause("deep context", deep_context, op_share("attention"), 4, 0.1),
    Cause("queue full", queue_full, part("queue"), 20, 0.2, small=True),
    Cause("preempted", preempted, repeated_rows, 1, 64, small=True),
)
KV_BYTES = 30 * 2 * 3 * 64 * 2  # of a token of SmolLM2: layers, keys and values, heads, width, f16
SMALL_TOKENS = 768  # of the small server's KV pages


def serve(model: str, *, small: bool) -> Server:
    """A server for plants; one token a step, so that steps can be compared."""
    flags = ["--speculation", "off", "--offline"]
    if small:
        flags += ["--max-seqs", "2", "--max-context", str(SMALL_TOKENS), "--kv-memory", str(SMALL_TOKENS * KV_BYTES)]
    return Server(model, *flags)
