"""What the runtime's tests share: small engines, and generation of one or several sequences by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ai_engine.kernels.reference.backend import ReferenceKernels
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.kernels import Kernels, SampleOut, StepBatch
from ai_engine.ports.model import DType, ModelConfig, ModelFile
from ai_engine.ports.runtime import SeqOutput, SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.runtime.passes import DEFAULT_PASSES, Pass
from ai_engine.runtime.plan import EngineOptions
from ai_engine.testing.arena import PlainArena
from ai_engine.testing.kernels import NullKernels, NullProgram
from ai_engine.testing.model import RandomModel

TINY = Path(__file__).parents[2] / "golden" / "tiny"
FREE_BYTES = 1 << 30

LLAMA = ModelConfig(
    arch="llama", name="tiny", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96, vocab_size=97,
    max_context=256, norm_eps=1e-5, rope_base=10000.0, rope_dim=16, rope_interleaved=True, tied_head=False,
)  # fmt: skip


def config(**changes: Any) -> ModelConfig:
    fields = {name: getattr(LLAMA, name) for name in LLAMA.__struct_fields__}
    return ModelConfig(**(fields | changes))


def make_engine(
    file: ModelFile | None = None,
    kernels: Kernels | None = None,
    *,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    warm_up: bool = False,
    **options: Any,
) -> Engine:
    fields = {"max_step_tokens": 48, "max_seqs": 8, "kv_memory": 1 << 20} | options
    return build_engine(
        file or RandomModel(LLAMA, dtype=DType.Q8_0), kernels or ReferenceKernels(), PlainArena, FREE_BYTES,
        SystemClock(), EngineOptions(**fields), passes=passes, warm_up=warm_up,
    )  # fmt: skip


def spec(seq_id: int, tokens: Sequence[int], *, prompt_len: int = 0, **fields: Any) -> SequenceSpec:
    """Greedy unless told otherwise; fields of SequenceSpec and of SamplingParams together."""
    own = {name: fields.pop(name) for name in ("namespace", "fork_of") if name in fields}
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 64} | fields))
    return SequenceSpec(seq_id=seq_id, tokens=list(tokens), prompt_len=prompt_len or len(tokens), params=params, **own)


def run_one(engine: Engine, seq_id: int, num_tokens: int, draft: tuple[int, ...] = ()) -> SeqOutput:
    output = engine.step(StepPlan(1, [Work(seq_id, num_tokens, draft)])).outputs[0]
    assert output.seq_id == seq_id
    return output


def prefill(engine: Engine, seq_id: int, num_tokens: int, chunk: int = 1000) -> list[int]:
    """Compute tokens in chunks; what the last chunk sampled."""
    tokens: list[int] = []
    while num_tokens:
        take = min(chunk, num_tokens)
        tokens = run_one(engine, seq_id, take).tokens
        num_tokens -= take
    return tokens


def generate(engine: Engine, request: SequenceSpec, count: int, chunk: int = 1000) -> list[int]:
    """The first ``count`` output tokens of a sequence alone; the sequence is released."""
    cached = engine.open(request)
    tokens = prefill(engine, request.seq_id, len(request.tokens) - cached, chunk)
    while len(tokens) < count:
        tokens += run_one(engine, request.seq_id, 1).tokens
    engine.step(StepPlan(1, release=[request.seq_id]))
    engine.check_integrity()
    return tokens


class ScriptedKernels(NullKernels):
    """Kernels whose tokens come from a function of (the row's own token, its position)."""

    def __init__(self, next_token: Callable[[int, int], int]) -> None:
        super().__init__()
        self.next_token = next_token

    def run(self, program: Any, batch: StepBatch) -> SampleOut:
        assert isinstance(program, NullProgram)
        out = super().run(program, batch)
        for row, at in enumerate(batch.logit_rows.tolist()):
            if batch.sample.forced[row] < 0:
                out.token[row] = self.next_token(int(batch.token_ids[at]), int(batch.positions[at]))
        return out
