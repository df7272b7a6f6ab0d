"""Speed of the attention and sampler kernels, single calls on warm data.

    python bench/attention_sampler.py [--target avx2] [--threads 1,2] [--rounds 30]

Each figure is the median and the best of its rounds, from the first thread's start to the last one's end. GFLOP/s
counts two per multiply-add of visible (row, key) pairs; GB/s the keys and values of each sequence once. ``--json`` adds
one line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import attention, build, sample
from ai_engine.kernels.cpu.executor import Harness
from ai_engine.kernels.cpu.formats import ActLayout
from ai_engine.kernels.cpu.kv import KvLayout, kv_lanes
from ai_engine.kernels.cpu.lang import TARGETS, Target
from ai_engine.ports.kernels import KvShape

Spans = list[tuple[int, int]]  # (first position, end) of each sequence

ATTENTION: dict[str, Spans] = {
    "1 row @ 128": [(127, 128)],
    "1 row @ 512": [(511, 512)],
    "1 row @ 2k": [(2047, 2048)],
    "1 row @ 8k": [(8191, 8192)],
    "4 rows @ 2k": [(2044, 2048)],
    "8 x 1 row @ 2k": [(2047, 2048)] * 8,
    "128 rows @ 384": [(384, 512)],
    "512 rows @ 0": [(0, 512)],
}
HEADS = ((9, 3, 64), (4, 1, 256))
SAMPLER: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 40, top_p 0.95, min_p 0.05": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "greedy, 20 logprobs": {"temperature": 0, "num_top": 20},
}


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def timed(harness: Harness, rounds: int, run: Callable[[], None]) -> tuple[float, float]:
    """(median, best) microseconds."""
    times = []
    for _ in range(rounds):
        run()
        last = np.array([harness.contexts.rings.read(t)[-1] for t in range(harness.contexts.num_threads)])
        times.append((last[:, 3].max() - last[:, 2].min()) / harness.clock.cycles_per_us())
    return float(np.median(times)), float(np.min(times))


def unpacked(harness: Harness, name: str, block: npt.NDArray[np.uint64]) -> dict[str, Any]:
    types = harness.definitions[name].args.types
    return {
        n: float(np.array([w]).view(np.float32)[0]) if types[n] == "f32" else int(w)
        for n, w in zip(types, block, strict=True)
    }


def attention_case(
    target: Target, harness: Harness, heads: int, kv_heads: int, head_dim: int, spans: Spans
) -> tuple[Callable[[], None], float, float]:
    """(one call, GFLOP, GB)."""
    rng = np.random.default_rng(0)
    shape = KvShape(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, page_tokens=32)
    layout = KvLayout.of(shape, kv_lanes(target))
    pages = -(-max(end for _, end in spans) // 32)
    kv = aligned(len(spans) * pages * layout.page_bytes)
    kv.view(np.float16)[:] = rng.standard_normal(kv.size // 2, dtype=np.float32)
    rows = [(s, p) for s, (first, end) in enumerate(spans) for p in range(first, end)]
    qkv = aligned(4 * len(rows) * (heads + 2 * kv_heads) * head_dim)
    qkv.view(np.float32)[:] = rng.standard_normal(qkv.size // 4, dtype=np.float32)
    arrays = {
        "positions": np.array([p for _, p in rows], np.int32),
        "row_seq": np.array([s for s, _ in rows], np.int32),
        "seq_start": np.cumsum([0] + [end - first for first, end in spans]).astype(np.int32),
        "context_len": np.array([end for _, end in spans], np.int32),
        "page_table": rng.permutation(len(spans) * pages).astype(np.int32),
    }
    sizes = {"max_tokens": len(rows), "max_seqs": len(spans), "max_context": pages * 32}
    work = aligned(attention.workspace_bytes(target, **sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim))
    out = aligned(ActLayout(heads * head_dim).nbytes(len(rows)))
    name, block = attention.attention_args(
        target,
        layout,
        qkv=qkv.ctypes.data,
        out=out.ctypes.data,
        out_is_act=True,
        kv=kv.ctypes.data,
        workspace=work.ctypes.data,
        layer=1,
        heads=heads,
        scale=head_dim**-0.5,
        window=0,
        **sizes,
    )
    header = {n: a.ctypes.data for n, a in arrays.items()} | {"T": len(rows), "S": len(spans), "page_stride": pages}
    args, keep = unpacked(harness, name, block), (kv, qkv, arrays, work, out)

    def run() -> None:
        assert keep
        harness.run(name, header, **args)

    flops = sum(4 * (p + 1) * head_dim * heads for _, p in rows)
    return run, flops / 1e9, sum(end for _, end in spans) * kv_heads * head_dim * 4 / 1e9


def sampler_case(
    target: Target, harness: Harness, vocab: int, rows: int, fields: dict[str, float]
) -> Callable[[], None]:
    """Logits like a model's: a normal bulk and a few dozen tokens well above it."""
    rng = np.random.default_rng(0)
    logits = aligned(4 * rows * (vocab + 16)).view(np.float32).reshape(rows, -1)
    logits[:] = rng.standard_normal(logits.shape) * 2.2
    for row in logits:
        row[rng.integers(0, vocab, 40)] += rng.uniform(4, 12, 40)
    values = {"top_p": 1.0, "repetition": 1.0, "forced": -1, "mask_row": -1, "num_top": -1, **fields}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        arrays[name] = np.full(rows, values.get(name, 0), np.float32)
    for name in ("top_k", "position", "forced", "num_top", "mask_row"):
        arrays[name] = np.full(rows, values.get(name, 0), np.int32)
    arrays["seed"] = np.arange(rows, dtype=np.uint64)
    for name in ("history_start", "bias_start"):
        arrays[name] = np.zeros(rows + 1, np.int32)
    for name in ("out_token", "out_logprob", "out_top_token", "out_top_logprob"):
        arrays[name] = np.zeros(rows * 20, np.int32)
    work = aligned(sample.workspace_bytes(target, rows, vocab))
    name, block = sample.sample_args(
        target,
        logits=logits.ctypes.data,
        logits_stride=vocab + 16,
        vocab_size=vocab,
        max_rows=rows,
        workspace=work.ctypes.data,
    )
    header = {n: a.ctypes.data for n, a in arrays.items()} | {"R": rows}
    args, keep = unpacked(harness, name, block), (logits, arrays, work)

    def run() -> None:
        assert keep
        harness.run(name, header, **args)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=list(TARGETS), default="")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    target = TARGETS[options.target] if options.target else build.host_target()
    results: list[dict[str, Any]] = []
    for threads in map(int, options.threads.split(",")):
        team = NativeTeam(threads) if threads > 1 else None
        harness = Harness([*attention.KERNELS, *sample.KERNELS], target, team)
        for heads, kv_heads, head_dim in HEADS:
            for label, spans in ATTENTION.items():
                run, gflop, gbytes = attention_case(target, harness, heads, kv_heads, head_dim, spans)
                median, best = timed(harness, options.rounds, run)
                what = f"attention {heads}/{kv_heads}x{head_dim} {label}"
                rate = f"{gflop / best * 1e6:7.1f} GFLOP/s {gbytes / best * 1e6:6.1f} GB/s"
                print(f"{target.name} {threads} threads  {what:34} {median:9.1f} us, best {best:9.1f}  {rate}")
                results.append({"threads": threads, "case": what, "median_us": median, "best_us": best})
        for vocab in (49_152, 262_144):
            for rows in (1, 16):
                for label, fields in SAMPLER.items():
                    median, best = timed(harness, options.rounds, sampler_case(target, harness, vocab, rows, fields))
                    what = f"sampler {vocab} x {rows}: {label}"
                    print(f"{target.name} {threads} threads  {what:54} {median:9.1f} us, best {best:9.1f}")
                    results.append({"threads": threads, "case": what, "median_us": median, "best_us": best})
        harness.close()
        if team:
            team.close()
    if options.json:
        print(json.dumps({"target": target.name, "results": results}))


if __name__ == "__main__":
    main()
