"""How long the page pool's operations take, as percentiles, with prefix sharing and eviction going on.

CPU time of the thread, so that a busy machine's other work does not count. Run as `python -m bench.kv_ops`; prints one
line per operation and a JSON line.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ai_engine.runtime.eviction import make_policy
from ai_engine.runtime.kv import PagePool

PAGE_TOKENS = 32
NUM_PAGES = 4096


class Stopwatch:
    """Nanoseconds of each named operation."""

    def __init__(self) -> None:
        self.taken_ns: dict[str, list[int]] = {}

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        started = time.thread_time_ns()
        result = call(*args, **options)
        self.taken_ns.setdefault(name, []).append(time.thread_time_ns() - started)
        return result


def append(pool: PagePool, handle: int, tokens: np.ndarray) -> None:
    pool.extend(handle, 1)
    pool.commit(handle, tokens, 1)


def run(policy: str, rounds: int = 4000) -> dict[str, dict[str, float]]:
    """A chat-like history: shared system prompts, prompts of 16 to 512 tokens, 64 output tokens, 32 open sequences."""
    draw, watch = random.Random(0), Stopwatch()
    pool = PagePool(NUM_PAGES, PAGE_TOKENS, 256, make_policy(policy), lambda source, target: None)
    systems = [np.array([draw.randrange(50_000) for _ in range(128)], np.int32) for _ in range(8)]
    running: list[tuple[int, np.ndarray, int]] = []
    for _ in range(rounds):
        user = np.array([draw.randrange(50_000) for _ in range(draw.randint(16, 512))], np.int32)
        tokens = np.concatenate([draw.choice(systems), user, np.zeros(64, np.int32)])
        known = len(tokens) - 64
        handle, cached = watch("open", pool.open, "", tokens[:known], expect_tokens=known + 64)
        watch("extend (prompt)", pool.extend, handle, known - cached)
        watch("commit (prompt)", pool.commit, handle, tokens[:known], known - cached)
        running.append((handle, tokens, known))
        for at, (open_handle, all_tokens, length) in enumerate(running):
            watch("append", append, pool, open_handle, all_tokens)
            running[at] = (open_handle, all_tokens, length + 1)
        if len(running) == 32:
            done, _, _ = running.pop(0)
            watch("release", pool.release, done)
    pool.check_integrity()
    print(f"{policy}: {pool.num_evicted} pages evicted, {pool.num_hit_tokens} tokens found in the cache")
    return {name: percentiles(taken) for name, taken in watch.taken_ns.items()}


def percentiles(taken_ns: list[int]) -> dict[str, float]:
    p50, p99, p999 = np.percentile(np.array(taken_ns) / 1e3, [50, 99, 99.9])
    return {"count": len(taken_ns), "p50_us": round(p50, 2), "p99_us": round(p99, 2), "p999_us": round(p999, 2)}


def main() -> None:
    gc.disable()
    results = {policy: run(policy) for policy in ("lru", "fifo", "hybrid")}
    for policy, rows in results.items():
        for name, row in rows.items():
            figures = "".join(f"{row[key]:>9} {key[:-3]}" for key in ("p50_us", "p99_us", "p999_us"))
            print(f"{policy:<8}{name:<17}{figures} us")
    print(json.dumps({"page_tokens": PAGE_TOKENS, "num_pages": NUM_PAGES, "results": results}))


if __name__ == "__main__":
    main()
