"""The graph: printed as MLIR, parsed back, verified."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func
from xdsl.parser import Parser

from ai_engine.ports.errors import UnsupportedModel
from ai_engine.ports.kernels import BufferType
from ai_engine.ports.model import DType, ModelConfig
from ai_engine.runtime.ir import Graph, Op, Stage, Value, from_text, to_text, verify
from ai_engine.runtime.models import build_graph
from ai_engine.runtime.passes import DEFAULT_PASSES, PLAIN_PASSES, compile_graph
from ai_engine.testing.model import RandomModel
from tests.unit.runtime.support import config

CONFIGS = {
    "llama": config(),
    "untied window": config(tied_head=False, sliding_window=24),
    "qwen2": config(arch="qwen2", rope_interleaved=False),
    "qwen3": config(arch="qwen3", rope_interleaved=False),
    "gemma3": config(
        arch="gemma3", num_layers=3, window_pattern=2, sliding_window=24, rope_base_local=1e4, norm_offset=1.0,
        embed_scale=8.0, rope_interleaved=False, attn_scale=1e-05,
    ),
}  # fmt: skip


def build(model: ModelConfig, dtype: DType = DType.Q8_0) -> Graph:
    return build_graph(model, RandomModel(model, dtype=dtype).tensors)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("passes", [DEFAULT_PASSES, PLAIN_PASSES], ids=["default", "plain"])
def test_every_stage_prints_and_parses_back(name: str, passes: tuple[object, ...]) -> None:
    seen: list[Graph] = []
    compile_graph(build(CONFIGS[name]), passes, lambda _, graph: seen.append(graph))  # type: ignore[arg-type]
    assert len(seen) == len(passes) + 1
    for graph in seen:
        assert from_text(to_text(graph)) == graph


@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_mlir(name: str) -> None:
    context = Context(allow_unregistered=True)
    context.load_dialect(Builtin)
    context.load_dialect(Func)
    for graph in (build(CONFIGS[name]), compile_graph(build(CONFIGS[name]))):
        module = Parser(context, to_text(graph)).parse_module()
        module.verify()
        ops = [op for op in module.walk() if op.name == "builtin.unregistered"]
        assert len(ops) == len(graph.ops) + len(graph.weights)


def test_line_of_text() -> None:
    text = to_text(build(CONFIGS["llama"]))
    assert (
        '%2 = "ai.matmul"(%1) {weights = ["blk.0.attn_q.weight"], accumulate = false, layer = 0} : '
        "(tensor<?x64xf32>) -> tensor<?x64xf32>"
    ) in text


@pytest.mark.parametrize(
    "line", ['%0 = "ai.embed" {} : () -> ()', '%1 = "ai.add"(%0, %0) : (tensor<?x2xf32>, tensor<?x2xf32>) -> ()']
)
def test_parser_names_the_line(line: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        from_text(line)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(UnsupportedModel, match="gemma3, llama, qwen2, qwen3"):
        build_graph(config(arch="mamba"), {})


def changed(graph: Graph, at: int, **fields: object) -> Graph:
    ops = list(graph.ops)
    ops[at] = replace(ops[at], **fields)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


def test_verifier_finds_what_is_wrong() -> None:
    graph = build(CONFIGS["llama"])
    at = {op.name: index for index, op in reversed(list(enumerate(graph.ops)))}
    matmul, add = at["matmul"], at["add"]
    stranger = Value(999, BufferType("f32", 64))
    act = Value(1, BufferType("act", 64))
    wrong: list[tuple[Graph, Stage, str]] = [
        (changed(graph, matmul, operands=(stranger,)), "model", "before its definition"),
        (changed(graph, add, result=graph.ops[0].result), "model", "again"),
        (changed(graph, matmul, weights=("nothing",)), "model", "unknown weight"),
        (changed(graph, matmul, weights=("blk.0.ffn_down.weight",)), "model", "columns"),
        (changed(graph, matmul, result=Value(999, BufferType("f32", 7))), "model", "result type"),
        (changed(graph, matmul, attrs={}), "model", "misses attribute"),
        (changed(graph, at["rms_norm"], result=act), "model", "quantised"),
        (changed(graph, at["glu"], attrs={"act": "relu", "interleave": 0}), "model", "relu"),
        (changed(graph, at["rope_store"], attrs={**graph.ops[at["rope_store"]].attrs, "heads": 3}), "model", "width"),
        (changed(graph, add, name="quantize"), "model", "not legal"),
        (graph, "quantised", "operand is not for it"),
    ]  # fmt: skip
    for bad, stage, problem in wrong:
        with pytest.raises(AssertionError, match=problem):
            verify(bad, stage)


def test_a_buffer_is_not_read_after_it_was_overwritten() -> None:
    graph = compile_graph(build(CONFIGS["llama"]))
    at = next(index for index, op in enumerate(graph.ops) if op.attrs.get("accumulate"))
    late = Op("rms_norm", (graph.ops[at].operands[1],), Value(999, BufferType("f32", 64)),
              ("output_norm.weight",), {"eps": 1e-5})  # fmt: skip
    with pytest.raises(AssertionError, match="overwritten"):
        verify(replace(graph, ops=(*graph.ops[: at + 1], late, *graph.ops[at + 1 :])), "quantised")
