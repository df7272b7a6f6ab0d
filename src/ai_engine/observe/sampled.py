"""Kernel metrics from a sample of steps, and every op as a share of what the machine can do.

Owns which steps are decoded for metrics (two a second at most, in the collector's thread, while steps run) and the
roofline. Does not own decoding (steps.py), families (metrics.py) or measuring the machine (`ai-engine bench machine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from ai_engine.observe.steps import Op, StepStore, kernel_seconds
from ai_engine.ports.kernels import Call
from ai_engine.ports.telemetry import StepDone, StepSampled, Telemetry
from ai_engine.ports.trace import OpCost, ProgramInfo

EVERY_S = 0.5
UNKNOWN = "unknown, run `ai-engine bench machine`"


class Roofline(msgspec.Struct, frozen=True):
    """The most that this machine's compute threads can do together: bytes from memory, f32 operations, int8 operations,
    each a second."""

    bytes_per_s: float
    flops_per_s: float
    int_ops_per_s: float

    def shares(self, call: Call, program: ProgramInfo, cost: OpCost, seconds: float) -> tuple[float, float]:
        """(share of the memory's rate, share of the arithmetic's) that an op reached; 0 where no ceiling is known."""
        quantised = call.op == "matmul" and call.inputs[0].type.kind == "act"
        peak = self.int_ops_per_s if quantised else self.flops_per_s
        return _ratio(cost.nbytes, seconds * self.bytes_per_s), _ratio(cost.flops, seconds * peak)


def _ratio(amount: float, most: float) -> float:
    return amount / most if most > 0 else 0.0


class Sampler:
    """Called by the collector's thread after each period; emits a StepSampled now and then. A step is sampled a period
    after it ended, when its stamps are there."""

    def __init__(
        self,
        store: StepStore,
        telemetry: Telemetry,
        roofline: Roofline | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._telemetry, self._roofline, self._now_s = store, telemetry, roofline, now_s
        self._next_s = 0.0
        self._last: tuple[int, int] | None = None

    def __call__(self) -> None:
        now = self._now_s()
        if now < self._next_s:
            return
        found = self._store.newest(before_s=now - 0.02)
        if found is None or found[0] == self._last:
            return
        key, step = found
        self._next_s, self._last = now + EVERY_S, key
        for walk in self._store.ops(key):
            self._telemetry.emit(sample(step, walk, self._store.program, self._roofline))


def sample(step: StepDone, walk: Sequence[Op], program: ProgramInfo | None, roofline: Roofline | None) -> StepSampled:
    """What metrics want of a step that was decoded."""
    assert program is not None
    kernels = kernel_seconds(walk)
    threads = len(walk[0].threads)
    busy = sum(end - start for op in walk for _, start, end in op.threads)
    layers: dict[int, float] = {}
    for op in walk:
        layer = program.calls[op.slot].layer
        if layer >= 0:
            layers[layer] = layers.get(layer, 0.0) + op.seconds
    mbu = mfu = None
    if roofline is not None:
        moved = sum(op.cost.nbytes for op in walk)
        mbu = _ratio(moved, kernels * roofline.bytes_per_s)
        shares = [roofline.shares(program.calls[op.slot], program, op.cost, op.seconds)[1] * op.seconds for op in walk]
        mfu = _ratio(sum(shares), kernels)
    return StepSampled(
        step_s=step.ended_s - step.started_s,
        kernel_s=kernels,
        wait_s=max(0.0, kernels * threads - busy),
        late_passes=sum(start >= op.ended_s for op in walk[:-1] for _, start, _ in op.threads),
        layers_s=list(layers.values()),
        ops=[(program.calls[op.slot].op, op.seconds, op.cost.nbytes, op.cost.flops) for op in walk],
        mbu=mbu,
        mfu=mfu,
    )
