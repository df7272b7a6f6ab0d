"""What each pass does to the graph, and what lowering makes of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ai_engine.ports.kernels import BufferType, Call
from ai_engine.ports.model import DType, ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.lower import Lowered, calls_table, lower
from ai_engine.runtime.models import build_graph
from ai_engine.runtime.passes import (
    DEFAULT_PASSES,
    PLAIN_PASSES,
    FuseProjections,
    FuseQuantize,
    FuseResidual,
    QuantiseActivations,
    compile_graph,
)
from ai_engine.testing.model import RandomModel
from tests.unit.runtime.support import config


def build(model: ModelConfig, **dtypes: DType) -> Graph:
    """Q8_0 weights, but for tensors whose short name is in ``dtypes``."""
    tensors = {}
    for name, info in RandomModel(model, dtype=DType.Q8_0).tensors.items():
        dtype = dtypes.get(name.split(".")[-2], info.dtype)
        tensors[name] = TensorInfo(name, dtype, info.shape, info.nbytes)
    return build_graph(model, tensors)


def names(graph: Graph) -> Counter[str]:
    return Counter(op.name for op in graph.ops)


def lowered(graph: Graph, *, share: bool = True) -> Lowered:
    return lower(graph, lambda type, rows: rows * type.cols * 4, 16, 8, share=share)


def test_calls_of_a_layer() -> None:
    graph = compile_graph(build(config(num_layers=3)))
    first = [(op.name, op.weights) for op in graph.ops if op.layer == 0]
    assert first == [
        ("rms_norm", ("blk.0.attn_norm.weight",)),
        ("matmul", ("blk.0.attn_q+attn_k+attn_v.weight",)),
        ("rope_store", ()),
        ("attention", ()),
        ("matmul", ("blk.0.attn_output.weight",)),
        ("rms_norm", ("blk.0.ffn_norm.weight",)),
        ("matmul", ("blk.0.ffn_gate+ffn_up.weight",)),
        ("glu", ()),
        ("matmul", ("blk.0.ffn_down.weight",)),
    ]
    assert names(graph)["add"] == 0


def test_gemma_norms_add_to_the_residual() -> None:
    model = config(arch="gemma3", rope_base_local=1e4, sliding_window=8, window_pattern=2)
    graph = compile_graph(build(model))
    assert names(graph)["rms_norm_add"] == 2 * model.num_layers
    tables = [op.attrs["rope_table"] for op in graph.ops if op.name == "rope_store"]
    windows = [op.attrs["window"] for op in graph.ops if op.name == "attention"]
    assert (tables, windows) == (["rope_local", "rope"], [8, 0])


def test_biases_are_merged_with_their_weights() -> None:
    graph = compile_graph(build(config(arch="qwen2")))
    qkv = next(op for op in graph.ops if "blk.0.attn_q+attn_k+attn_v.weight" in op.weights)
    bias = graph.weights[qkv.weights[1]]
    assert (bias.rows, bias.cols, bias.dtype) == (1, 128, DType.F32)
    assert [part.tensor for part in bias.parts] == ["blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias"]


def test_different_types_write_columns_of_one_buffer_without_a_barrier_between() -> None:
    graph = compile_graph(build(config(), attn_v=DType.Q4_0, ffn_up=DType.Q4_0))
    calls = [call for call in lowered(graph).calls if call.layer == 0]
    qk, v = (call for call in calls if call.op == "matmul" and "attn_output" not in call.weights[0]
             and "attn" in call.weights[0])  # fmt: skip
    assert (qk.weights, qk.attrs["out_col"]) == (("blk.0.attn_q+attn_k.weight",), 0)
    assert (v.weights, v.attrs["out_col"]) == (("blk.0.attn_v.weight",), 96)
    assert qk.outputs == v.outputs
    assert (qk.barrier, v.barrier) == (False, True)
    assert next(call for call in calls if call.op == "glu").attrs["interleave"] == 0


def test_a_float_and_a_quantised_weight_share_an_input() -> None:
    graph = compile_graph(build(config(), attn_v=DType.F16))
    layer = [op for op in graph.ops if op.layer == 0]
    assert [op.name for op in layer if op.name != "empty"][:2] == ["rms_norm", "quantize"], "the norm stays f32 for F16"
    kinds = {op.weights[0]: op.operands[0].type.kind for op in layer if op.name == "matmul"}
    assert kinds["blk.0.attn_v.weight"] == "f32"
    assert kinds["blk.0.attn_q+attn_k.weight"] == "act"


def test_gate_and_up_alternate_only_where_the_width_allows() -> None:
    def glu(ffn: int) -> object:
        model = config(ffn=ffn)
        graph = compile_graph(build_graph(model, RandomModel(model, dtype=DType.F32).tensors))
        return next(op for op in graph.ops if op.name == "glu").attrs["interleave"]

    assert (glu(96), glu(80)) == (32, 0)


def test_options_switch_parts_off() -> None:
    graph = build(config())
    plain = compile_graph(graph, PLAIN_PASSES)
    assert names(plain)["add"] == 4
    assert names(plain)["matmul"] == 15
    half = compile_graph(graph, (FuseProjections(interleave=0), FuseResidual(matmul=False), QuantiseActivations(),
                                 FuseQuantize(frozenset({"glu"}))))  # fmt: skip
    assert names(half)["add"] == 4
    assert all(op.attrs["interleave"] == 0 for op in half.ops if op.name == "glu")
    kinds = {op.name: op.result.type.kind for op in half.ops if op.result}
    assert (kinds["glu"], kinds["rms_norm"], kinds["attention"]) == ("act", "f32", "f32")


def test_the_last_layer_runs_for_kept_rows_only() -> None:
    graph = compile_graph(build(config(num_layers=2)))
    rows = {(op.name, op.layer): op.result.type.rows for op in graph.ops if op.result}
    assert rows["attention", 1] == "tokens"
    assert rows["glu", 0] == "tokens"
    assert rows["glu", 1] == "logits"


def test_passes_must_fit_together() -> None:
    with pytest.raises(AssertionError, match="stage"):
        compile_graph(build(config()), (QuantiseActivations(),))
    with pytest.raises(AssertionError, match="end at stage"):
        compile_graph(build(config()), (FuseProjections(),))


def spans(call: Call, side: str) -> list[tuple[int, int]]:
    return [
        (b.offset, b.offset + 4 * b.type.cols * (16 if b.type.rows == "tokens" else 8)) for b in getattr(call, side)
    ]


@pytest.mark.parametrize("passes", [DEFAULT_PASSES, PLAIN_PASSES], ids=["default", "plain"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_no_buffer_is_overwritten_while_it_lives(passes: tuple[object, ...], arch: str) -> None:
    """Run the calls over memory that remembers who wrote each byte last."""
    graph = compile_graph(build(config(arch=arch, num_layers=3), attn_v=DType.Q4_0), passes)  # type: ignore[arg-type]
    program = lowered(graph)
    writer = np.full(program.activation_bytes, -1)
    values: dict[str, int] = {}
    for number, call in enumerate(program.calls):
        for buffer, (start, end) in zip(call.inputs, spans(call, "inputs"), strict=True):
            assert (writer[start:end] == values[buffer.name]).all(), (number, call)
        for buffer, (start, end) in zip(call.outputs, spans(call, "outputs"), strict=True):
            if call.attrs.get("accumulate"):
                assert (writer[start:end] == values[buffer.name]).all(), (number, call)
            writer[start:end] = values[buffer.name] = number
    assert program.activation_bytes < program.unshared_bytes / 2
    assert lowered(graph, share=False).activation_bytes == program.unshared_bytes


def test_calls_between_barriers_do_not_touch_each_others_memory() -> None:
    for passes in (DEFAULT_PASSES, PLAIN_PASSES):
        program = lowered(compile_graph(build(config(num_layers=3), attn_v=DType.Q4_0, ffn_up=DType.Q4_0), passes))
        group: list[Call] = []
        widest = 0
        for call in program.calls:
            for other in group:
                columns = call.op == other.op == "matmul" and call.outputs == other.outputs
                for start, end in spans(call, "outputs"):
                    touched = spans(other, "inputs") + ([] if columns else spans(other, "outputs"))
                    assert all(end <= a or b <= start for a, b in touched), (call, other)
                for start, end in spans(call, "inputs"):
                    assert all(end <= a or b <= start for a, b in spans(other, "outputs")), (call, other)
            group = [] if call.barrier else [*group, call]
            widest = max(widest, len(group))
        assert widest >= 1
        assert program.calls[-1].barrier


def test_buffers_have_the_types_of_their_values() -> None:
    program = lowered(compile_graph(build(config())))
    assert program.calls[-1].op == "sample"
    assert program.calls[-1].inputs[0].type == BufferType("f32", 97, "logits")
    table = calls_table(program)
    assert len(table.splitlines()) == len(program.calls) + 1
    assert "blk.0.attn_q+attn_k+attn_v.weight" in table
