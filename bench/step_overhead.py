"""The runtime's own time per step: everything but the kernels, which are replaced by ones that compute nothing.

Run as `python -m bench.step_overhead`. CPU time of the thread in microseconds, per batch size and kind of sampling;
prints a JSON line at the end.
"""

from __future__ import annotations

import gc
import json
import time

import numpy as np

from ai_engine.ports.clock import SystemClock
from ai_engine.ports.model import DType, ModelConfig
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.runtime.plan import EngineOptions
from ai_engine.testing.arena import PlainArena
from ai_engine.testing.kernels import NullKernels
from ai_engine.testing.model import RandomModel

CONFIG = ModelConfig(
    arch="llama", name="null", num_layers=2, hidden=64, num_heads=2, num_kv_heads=1, head_dim=32, ffn=64,
    vocab_size=512, max_context=4096, norm_eps=1e-5, rope_base=10000.0, rope_dim=32, rope_interleaved=False,
    tied_head=True,
)  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=4000),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1, max_tokens=4000),
    "penalties": SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.1, max_tokens=4000),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, max_tokens=4000),
}


def measure(
    engine: Engine, kernels: NullKernels, params: SamplingParams, batch: int, steps: int = 400
) -> dict[str, float]:
    ids = list(range(1, batch + 1))
    for seq_id in ids:
        engine.open(SequenceSpec(seq_id=seq_id, tokens=[seq_id] * 100, prompt_len=100, params=params))
        engine.step(StepPlan(0, [Work(seq_id, 100)]))
    plan = StepPlan(1, [Work(seq_id, 1) for seq_id in ids])
    taken = []
    for _ in range(steps):
        started = time.thread_time_ns()
        engine.step(plan)
        taken.append((time.thread_time_ns() - started) / 1e3)
        kernels.batches.clear()
    engine.step(StepPlan(2, release=ids))
    engine.pool.drop_cache()
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}


def main() -> None:
    kernels = NullKernels()
    options = EngineOptions(kv_memory=1 << 24)
    engine = build_engine(
        RandomModel(CONFIG, dtype=DType.F32), kernels, PlainArena, 1 << 32, SystemClock(), options, warm_up=False
    )
    gc.disable()
    results = {}
    for name, params in PARAMS.items():
        for batch in (1, 4, 16, 32):
            results[f"{name} {batch}"] = row = measure(engine, kernels, params, batch)
            print(f"{name:<10} batch {batch:<3} {row['p50_us']:>8} us  P99 {row['p99_us']:>8} us")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
