"""The compiler's passes: each a frozen dataclass whose fields are its options; valid graph in, valid graph out.

Owns fusion and the insertion of quantisation. A pass states the stage it takes and the stage it leaves; `compile_graph`
verifies after each. Does not place memory or barriers (lower.py). With every option off the passes still give a graph
that runs, just with more calls: the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

from ai_engine.ports.errors import UnsupportedModel
from ai_engine.ports.kernels import BufferType
from ai_engine.ports.model import DType
from ai_engine.runtime.ir import FLOAT_DTYPES, Graph, Op, Part, Stage, Value, Weight, verify


class Pass(Protocol):
    before: ClassVar[Stage]
    after: ClassVar[Stage]

    def run(self, graph: Graph) -> Graph: ...


def _use(op: Op, renamed: dict[int, Value]) -> Op:
    """The op with replaced operands."""
    if not any(value.id in renamed for value in op.operands):
        return op
    return replace(op, operands=tuple(renamed.get(value.id, value) for value in op.operands))


@dataclass(frozen=True)
class GatherEarly:
    """Move the choice of logits rows up through row-wise ops: the last layer's output projection and feed-forward run
    for the rows that are kept, not for the whole prompt. An op moves when everything that uses it does."""

    before: ClassVar[Stage] = "model"
    after: ClassVar[Stage] = "model"
    row_wise: ClassVar[frozenset[str]] = frozenset({"add", "matmul", "rms_norm", "concat", "glu"})

    def run(self, graph: Graph) -> Graph:
        uses, ids = graph.uses(), graph.fresh_ids()
        moved: set[int] = set()
        for op in reversed(graph.ops):
            users = uses[op.result.id] if op.result is not None else []
            if op.name == "gather" or (op.name in self.row_wise and users and all(id(user) in moved for user in users)):
                moved.add(id(op))
        kept: dict[int, Value] = {}  # value -> its kept rows
        renamed: dict[int, Value] = {}
        ops: list[Op] = []
        for op in graph.ops:
            if id(op) not in moved:
                ops.append(_use(op, renamed))
                continue
            assert op.result is not None
            for value in op.operands:
                if value.id not in kept:
                    kept[value.id] = Value(next(ids), BufferType("f32", value.type.cols, "logits"))
                    ops.append(Op("gather", (value,), kept[value.id], layer=op.layer))
            if op.name == "gather":
                renamed[op.result.id] = kept[op.operands[0].id]
            else:
                kept[op.result.id] = Value(next(ids), BufferType("f32", op.result.type.cols, "logits"))
                ops.append(_use(replace(op, result=kept[op.result.id]), kept))
        return replace(graph, ops=tuple(ops))


@dataclass(frozen=True)
class FuseProjections:
    """Matmuls of one input whose outputs stand side by side become one matmul (``merge``) where weight types agree, or
    write column ranges of one buffer. Gate and up rows alternate in runs of ``interleave`` where the width allows."""

    merge: bool = True
    interleave: int = 32
    before: ClassVar[Stage] = "model"
    after: ClassVar[Stage] = "fused"

    def run(self, graph: Graph) -> Graph:
        made, uses, ids = graph.definitions(), graph.uses(), graph.fresh_ids()
        weights = dict(graph.weights)
        ops: list[Op] = []
        gone: set[int] = set()
        runs: dict[int, int] = {}  # value -> interleave of its columns
        for op in graph.ops:
            if op.name == "glu" and op.operands[0].id in runs:
                op = replace(op, attrs={**op.attrs, "interleave": runs[op.operands[0].id]})
            if op.name != "concat":
                ops.append(op)
                continue
            sources = [made[value.id] for value in op.operands]
            assert all(s.name == "matmul" and len(uses[s.result.id]) == 1 for s in sources if s.result), op
            gone |= {id(source) for source in sources}
            groups = self._groups(sources, graph)
            assert op.result is not None
            if len(groups) == 1 and self._can_interleave(uses[op.result.id], weights, groups[0]):
                runs[op.result.id] = self.interleave
            merged = [_merged(group, weights, runs.get(op.result.id, 0)) for group in groups]
            ops.extend(_side_by_side(merged, weights, op.result, ids))
        return _without_dead(Graph(graph.name, weights, tuple(op for op in ops if id(op) not in gone)))

    def _groups(self, sources: list[Op], graph: Graph) -> list[list[Op]]:
        """Runs of neighbours that can be one matmul."""
        groups: list[list[Op]] = []
        for source in sources:
            last = groups[-1][-1] if groups else None
            if last is not None and self.merge and last.operands == source.operands \
                    and graph.weights[last.weights[0]].dtype == graph.weights[source.weights[0]].dtype \
                    and len(last.weights) == len(source.weights):  # fmt: skip
                groups[-1].append(source)
            else:
                groups.append([source])
        return groups

    def _can_interleave(self, users: list[Op], weights: dict[str, Weight], group: list[Op]) -> bool:
        rows = weights[group[0].weights[0]].rows
        return (
            len(group) == 2
            and [op.name for op in users] == ["glu"]
            and self.interleave > 0
            and rows % self.interleave == 0
        )


def _merged(group: list[Op], weights: dict[str, Weight], interleave: int) -> Op:
    """One matmul instead of several of the same input; declares the joint weight (and bias)."""
    if len(group) == 1:
        return group[0]
    names = []
    for parts in zip(*(op.weights for op in group), strict=True):
        olds = [weights[name] for name in parts]
        first, vector = olds[0], olds[0].rows == 1
        name = "+".join([first.name.rsplit(".", 1)[0], *(old.name.rsplit(".", 2)[-2] for old in olds[1:])])
        rows = 1 if vector else sum(old.rows for old in olds)
        cols = sum(old.cols for old in olds) if vector else first.cols
        all_parts: tuple[Part, ...] = sum((old.parts for old in olds), ())
        name += "." + first.name.rsplit(".", 1)[1]
        weights[name] = Weight(name, first.dtype, rows, cols, all_parts, interleave, first.offset)
        names.append(name)
    return replace(group[0], weights=tuple(names))


def _side_by_side(matmuls: list[Op], weights: dict[str, Weight], result: Value, ids: Iterator[int]) -> Iterator[Op]:
    """The matmuls write column ranges of one buffer; the last one's result is ``result``."""
    if len(matmuls) == 1:
        yield replace(matmuls[0], result=result)
        return
    target = Value(next(ids), result.type)
    yield Op("empty", (), target, layer=matmuls[0].layer)
    col = 0
    for index, op in enumerate(matmuls):
        out = result if index == len(matmuls) - 1 else Value(next(ids), result.type)
        attrs = {**op.attrs, "out_col": col}
        yield replace(op, operands=(op.operands[0], target), result=out, attrs=attrs)
        col, target = col + weights[op.weights[0]].rows, out


@dataclass(frozen=True)
class FuseResidual:
    """x + matmul(h) accumulates into x's buffer; x + rms_norm(y) becomes rms_norm_add. Only where x is not used
    again."""

    matmul: bool = True
    norm: bool = True
    before: ClassVar[Stage] = "fused"
    after: ClassVar[Stage] = "fused"

    def run(self, graph: Graph) -> Graph:
        made, uses = graph.definitions(), graph.uses()
        ops: list[Op] = []
        gone: set[int] = set()
        for op in graph.ops:
            fused = self._fused(op, made, uses) if op.name == "add" else None
            if fused is not None:
                gone.add(id(made[op.operands[1].id]))
            ops.append(fused or op)
        return replace(graph, ops=tuple(op for op in ops if id(op) not in gone))

    def _fused(self, add: Op, made: dict[int, Op], uses: dict[int, list[Op]]) -> Op | None:
        x, y = add.operands
        source = made[y.id]
        if x == y or uses[x.id][-1] is not add or len(uses[y.id]) != 1:
            return None
        if self.matmul and source.name == "matmul" and len(source.operands) == 1:
            attrs = {**source.attrs, "accumulate": True}
            return replace(source, operands=(source.operands[0], x), result=add.result, attrs=attrs)
        if self.norm and source.name == "rms_norm":
            return replace(source, name="rms_norm_add", operands=(source.operands[0], x), result=add.result)
        return None


@dataclass(frozen=True)
class QuantiseActivations:
    """Insert quantize before matmuls with a quantised weight: once per value, right where it is made."""

    before: ClassVar[Stage] = "fused"
    after: ClassVar[Stage] = "quantised"

    def run(self, graph: Graph) -> Graph:
        ids = graph.fresh_ids()
        acts: dict[int, Value] = {}
        ops: list[Op] = []
        for op in graph.ops:
            if op.name == "matmul" and graph.weights[op.weights[0]].dtype not in FLOAT_DTYPES:
                x = op.operands[0]
                if x.id not in acts:
                    acts[x.id] = Value(next(ids), BufferType("act", x.type.cols, x.type.rows))
                    ops.append(Op("quantize", (x,), acts[x.id], layer=op.layer))
                op = replace(op, operands=(acts[x.id], *op.operands[1:]))
            ops.append(op)
        return replace(graph, ops=tuple(ops))


@dataclass(frozen=True)
class FuseQuantize:
    """An op whose result is only quantised writes the quantised form itself."""

    producers: frozenset[str] = frozenset({"rms_norm", "glu", "attention"})
    before: ClassVar[Stage] = "quantised"
    after: ClassVar[Stage] = "quantised"

    def run(self, graph: Graph) -> Graph:
        made, uses = graph.definitions(), graph.uses()
        results: dict[int, Value] = {}  # producer's old result -> the act value
        for op in graph.ops:
            if (
                op.name == "quantize"
                and made[op.operands[0].id].name in self.producers
                and len(uses[op.operands[0].id]) == 1
            ):
                assert op.result is not None
                results[op.operands[0].id] = op.result
        ops = []
        for op in graph.ops:
            if op.name == "quantize" and op.operands[0].id in results:
                continue
            if op.result is not None and op.result.id in results:
                op = replace(op, result=results[op.result.id])
            ops.append(op)
        return replace(graph, ops=tuple(ops))


def _without_dead(graph: Graph) -> Graph:
    """Drop ops whose result nobody uses, and weights that no op names."""
    live: set[int] = set()
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.result is None or op.result.id in live or op.name == "rope_store":
            live.update(value.id for value in op.operands)
            ops.append(op)
    named = {name for op in ops for name in op.weights}
    weights = {name: weight for name, weight in graph.weights.items() if name in named}
    return Graph(graph.name, weights, tuple(reversed(ops)))


@dataclass(frozen=True)
class DropDead:
    """Remove ops and weights without users."""

    before: ClassVar[Stage] = "quantised"
    after: ClassVar[Stage] = "quantised"

    def run(self, graph: Graph) -> Graph:
        return _without_dead(graph)


@dataclass(frozen=True)
class ScreenHead:
    """The output head answers rows of which only the best tokens matter approximately (``screen``, ports.kernels).
    Never one of the default passes. Raises UnsupportedModel for a head that is not Q8_0."""

    before: ClassVar[Stage] = "quantised"
    after: ClassVar[Stage] = "quantised"

    def run(self, graph: Graph) -> Graph:
        sampled = graph.ops[-1].operands[0]
        (head,) = (op for op in graph.ops if op.result is not None and op.result.id == sampled.id)
        weight = graph.weights[head.weights[0]]
        if weight.dtype is not DType.Q8_0 or len(head.weights) > 1:
            raise UnsupportedModel(
                f"--approximate-head needs an output head of type Q8_0, but {weight.name} is {weight.dtype.value}; "
                "leave the flag out"
            )
        screened = replace(head, attrs={**head.attrs, "screen": True})
        weights = {**graph.weights, weight.name: replace(weight, screened=True)}
        return replace(graph, weights=weights, ops=tuple(screened if op is head else op for op in graph.ops))


DEFAULT_PASSES: Final[tuple[Pass, ...]] = (
    GatherEarly(), FuseProjections(), FuseResidual(), QuantiseActivations(), FuseQuantize(), DropDead(),
)  # fmt: skip
PLAIN_PASSES: Final[tuple[Pass, ...]] = (FuseProjections(merge=False), QuantiseActivations())
"""What is needed to run at all; every optimisation off."""


def compile_graph(
    graph: Graph, passes: Sequence[Pass] = DEFAULT_PASSES, watch: Callable[[str, Graph], None] | None = None
) -> Graph:
    """Run the passes, verifying the graph before the first and after each; ``watch(name, graph)`` sees every stage."""
    stage: Stage = "model"
    verify(graph, stage)
    if watch is not None:
        watch("model", graph)
    for each in passes:
        assert each.before == stage, f"{each} takes a graph at stage {each.before!r}, this one is at {stage!r}"
        graph, stage = each.run(graph), each.after
        verify(graph, stage)
        if watch is not None:
            watch(repr(each), graph)
    assert stage == "quantised", f"the passes end at stage {stage!r}"
    return graph
