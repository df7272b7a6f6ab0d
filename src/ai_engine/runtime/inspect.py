"""What a model file holds and would need, and its graph between passes, without loading anything.

`teacher_forced_logits` looks into an engine that is loaded, for tests and evaluations.

Owns the numbers behind `ai-engine inspect` and the text of `ai-engine graph`. The sums are plan.py's, the same that
the engine is built from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ai_engine.ports.errors import ConfigError
from ai_engine.ports.kernels import F32, Kernels
from ai_engine.ports.model import ModelFile, TensorInfo
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine
from ai_engine.runtime.ir import Graph, to_text
from ai_engine.runtime.lower import calls_table
from ai_engine.runtime.models import build_graph
from ai_engine.runtime.passes import DEFAULT_PASSES, Pass, compile_graph
from ai_engine.runtime.plan import EngineOptions, make_plan, mib, step_rows


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """``memory`` is bytes by category as the engine would take them; ``problem`` says why it could not start here."""

    name: str
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    model_context: int
    parameters: int
    file_bytes: int
    bytes_by_type: dict[str, int]
    kv_bytes_per_token: int
    max_context: int
    kv_tokens: int
    memory: dict[str, int]
    problem: str = ""


def inspect_model(file: ModelFile, kernels: Kernels, options: EngineOptions, free_bytes: int) -> Inspection:
    """Raises UnsupportedModel; a configuration that does not fit this machine is reported in ``problem``."""
    problem = ""
    try:
        plan = make_plan(file, kernels, options, free_bytes)
    except ConfigError as error:
        problem = error.message
        plan = make_plan(file, kernels, msgspec.structs.replace(options, max_context=0, kv_memory=0), 1 << 62)
    config, tensors = file.config, file.tensors
    types = sorted({info.dtype for info in tensors.values()})
    return Inspection(
        name=config.name,
        arch=config.arch,
        layers=config.num_layers,
        hidden=config.hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab_size,
        model_context=config.max_context,
        parameters=sum(math.prod(info.shape) for info in tensors.values()),
        file_bytes=file.nbytes,
        bytes_by_type={t.value: sum(i.nbytes for i in tensors.values() if i.dtype is t) for t in types},
        kv_bytes_per_token=plan.kv_bytes_per_token,
        max_context=plan.limits.max_context,
        kv_tokens=plan.kv_tokens,
        memory={
            "weights": plan.weight_bytes,
            "kv": plan.kv_bytes,
            "activations": plan.lowered.activation_bytes,
            "rope tables": plan.rope_bytes,
            "total": plan.total_bytes,
        },
        problem=problem,
    )


def inspection_text(found: Inspection, tensors: Sequence[TensorInfo] = ()) -> str:
    """A page to read; with ``tensors``, each of them on a line."""
    rows = [
        ("model", f"{found.name} ({found.arch}), {found.parameters / 1e6:.1f} M parameters"),
        ("shape", f"{found.layers} layers, hidden {found.hidden}, {found.heads} heads of {found.head_dim} sharing "
                  f"{found.kv_heads} K/V heads, feed-forward {found.ffn}, vocabulary {found.vocab}"),
        ("file", f"{mib(found.file_bytes)}: " + ", ".join(f"{t} {mib(n)}" for t, n in found.bytes_by_type.items())),
        ("context", f"{found.max_context} tokens a request here; the model takes {found.model_context}"),
        ("KV cache", f"{found.kv_bytes_per_token} bytes a token, room for {found.kv_tokens} tokens"),
        *((f"  {name}", mib(nbytes)) for name, nbytes in found.memory.items()),
    ]  # fmt: skip
    if found.problem:
        rows.append(("problem", found.problem))
    width = max((len(info.name) for info in tensors), default=0)
    listed = [f"{i.name:<{width}}  {i.dtype.value:<5} {list(i.shape)!s:<18} {mib(i.nbytes)}" for i in tensors]
    return "\n".join([*(f"{name:<14}{text}" for name, text in rows), *listed]) + "\n"


def describe_graph(
    file: ModelFile,
    kernels: Kernels,
    options: EngineOptions,
    *,
    every_pass: bool = False,
    num_layers: int = 0,
    passes: Sequence[Pass] = DEFAULT_PASSES,
) -> str:
    """The graph as MLIR text (after each pass, or the last only), then the program as a table. ``num_layers`` > 0 keeps
    only the first layers."""
    config = file.config
    if num_layers:
        config = msgspec.structs.replace(config, num_layers=min(num_layers, config.num_layers))
    stages: list[tuple[str, Graph]] = []
    graph = compile_graph(build_graph(config, file.tensors), passes, lambda name, graph: stages.append((name, graph)))
    rows, _, lowered = step_rows(graph, kernels, options)
    shown = stages if every_pass else stages[-1:]
    parts = [
        f"// {name}: {len(graph.ops)} ops, {len(graph.weights)} weights\n{to_text(graph)}" for name, graph in shown
    ]
    barriers = sum(call.barrier for call in lowered.calls)
    parts.append(
        f"// program: {len(lowered.calls)} calls, {barriers} barriers; buffers take {mib(lowered.activation_bytes)} "
        f"({mib(lowered.unshared_bytes)} without sharing) for {rows} rows\n{calls_table(lowered)}"
    )
    return "\n".join(parts)


def teacher_forced_logits(engine: Engine, ids: Sequence[int], chunk: int = 64) -> F32:
    """The logits f32[len(ids), vocab] of one sequence, ``chunk`` tokens a step at most: row i is the distribution of
    the token after ids[: i + 1]. The engine must be idle; it is idle again afterwards."""
    chunk = min(chunk, engine.limits.max_logit_rows, engine.limits.max_step_tokens)
    buffer = engine.plan.lowered.calls[-1].inputs[0]
    stride = 4 * buffer.type.cols
    out = np.empty((len(ids), engine.limits.vocab_size), np.float32)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    engine.open(SequenceSpec(seq_id=0, tokens=list(ids), prompt_len=len(ids), params=params, namespace="logits"))
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        engine.step(StepPlan(0, [Work(0, end - start)]))
        raw = engine.resources.activations[buffer.offset : buffer.offset + (end - start) * stride]
        out[start:end] = raw.view(np.float32).reshape(end - start, -1)[:, : engine.limits.vocab_size]
    engine.step(StepPlan(0, release=[0]))
    return out
