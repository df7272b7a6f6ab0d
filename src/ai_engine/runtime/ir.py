"""The graph: a straight line of ops over SSA values, printed as MLIR generic form and parsed back.

Owns the data structures, the rule of every op, the legal ops of every stage, `verify`, `to_text` and `from_text`.
Does not know models (models/), transformations (passes.py) or memory (lower.py).

A value is a dynamic matrix of the step: its rows are the step's tokens or its logits rows (printed as the tensor's
encoding). f32 values print as ``tensor<?x576xf32>``, quantised activations as ``tensor<?x576xi8>``. An op has at most
one result. Ops that write into an operand (a residual, a column range, the rotated qkv) name it as their *tied*
operand: the result is that buffer's new content, and the old value must not be used again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ai_engine.ports.kernels import Attr, BufferType, WeightSpec
from ai_engine.ports.model import DType

FLOAT_DTYPES: Final = frozenset({DType.F32, DType.F16, DType.BF16})
"""Weights that multiply f32 activations; all others multiply quantised ones."""

Stage = Literal["model", "fused", "quantised"]


@dataclass(frozen=True, slots=True)
class Value:
    id: int
    type: BufferType


@dataclass(frozen=True, slots=True)
class Op:
    """``layer`` is -1 outside the layers. ``weights`` are names in the graph's table."""

    name: str
    operands: tuple[Value, ...] = ()
    result: Value | None = None
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a packed weight that come from one tensor (elements, for a vector). ``rope_head_dim`` > 0: each head's
    rows are reordered from neighbouring pairs (0,1),(2,3).. to halves (i, i + dim/2)."""

    tensor: str
    rows: int
    rope_head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed weight: its parts one after the other, or alternating in runs of ``interleave`` rows. A vector has
    ``rows`` 1, and ``offset`` is added to its elements."""

    name: str
    dtype: DType
    rows: int
    cols: int
    parts: tuple[Part, ...]
    interleave: int = 0
    offset: float = 0.0
    screened: bool = False

    @property
    def spec(self) -> WeightSpec:
        return WeightSpec(self.name, self.dtype, self.rows, self.cols, self.screened)


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    weights: Mapping[str, Weight]
    ops: tuple[Op, ...]

    def definitions(self) -> dict[int, Op]:
        """Value id -> the op that makes it."""
        return {op.result.id: op for op in self.ops if op.result is not None}

    def uses(self) -> dict[int, list[Op]]:
        """Value id -> the ops that take it, in order."""
        uses: dict[int, list[Op]] = {op.result.id: [] for op in self.ops if op.result is not None}
        for op in self.ops:
            for value in op.operands:
                uses[value.id].append(op)
        return uses

    def fresh_ids(self) -> Iterator[int]:
        first = 1 + max((op.result.id for op in self.ops if op.result is not None), default=-1)
        return iter(range(first, 1 << 62))


# --- the rules of the ops -------------------------------------------------------------------------------------------


def f32(cols: int, rows: BufferType) -> BufferType:
    return BufferType("f32", cols, rows.rows)


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _row_wise(op: Op, cols: int) -> BufferType:
    """The declared result type of an op that may write f32 or act; only kind is the op's choice."""
    _need(op.result is not None, "has no result")
    assert op.result is not None
    return BufferType(op.result.type.kind, cols, op.operands[0].type.rows)


def _matmul(op: Op, weights: list[Weight]) -> BufferType:
    x, weight = op.operands[0].type, weights[0]
    _need(x.cols == weight.cols, f"input has {x.cols} columns, the weight {weight.cols}")
    _need(
        all(w.rows == 1 and w.cols == weight.rows for w in weights[1:]), "the bias has another length than the output"
    )
    if len(op.operands) == 1:
        _need(not op.attrs.get("accumulate") and not op.attrs.get("out_col"), "accumulate or out_col without a target")
        return f32(weight.rows, x)
    target = op.operands[1].type
    start = int(op.attrs.get("out_col", 0))
    _need(start >= 0 and start + weight.rows <= target.cols, f"columns {start}+{weight.rows} exceed {target.cols}")
    _need(target.rows == x.rows, "target and input differ in rows")
    return f32(target.cols, target)


def _add(op: Op, _: list[Weight]) -> BufferType:
    _need(op.operands[0].type == op.operands[1].type, "operands differ in type")
    return f32(op.operands[0].type.cols, op.operands[0].type)


def _norm(op: Op, weights: list[Weight]) -> BufferType:
    _need(weights[0].rows == 1 and weights[0].cols == op.operands[0].type.cols, "norm weight has another length")
    return _row_wise(op, weights[0].cols)


def _norm_add(op: Op, weights: list[Weight]) -> BufferType:
    _norm(op, weights)
    return _add(op, weights)


def _heads(op: Op) -> tuple[int, int, int]:
    return int(op.attrs["heads"]), int(op.attrs["kv_heads"]), int(op.attrs["head_dim"])


def _rope_store(op: Op, weights: list[Weight]) -> BufferType:
    heads, kv_heads, head_dim = _heads(op)
    _need(op.operands[0].type.cols == (heads + 2 * kv_heads) * head_dim, "qkv width does not match the heads")
    _need(all(w.rows == 1 and w.cols == head_dim for w in weights), "q and k norms must have head_dim elements")
    return f32(op.operands[0].type.cols, op.operands[0].type)


def _attention(op: Op, _: list[Weight]) -> BufferType:
    heads, kv_heads, head_dim = _heads(op)
    _need(op.operands[0].type.cols == (heads + 2 * kv_heads) * head_dim, "qkv width does not match the heads")
    _need(heads % kv_heads == 0, "heads is no multiple of kv_heads")
    return _row_wise(op, heads * head_dim)


def _glu(op: Op, _: list[Weight]) -> BufferType:
    cols, run = op.operands[0].type.cols, int(op.attrs["interleave"])
    _need(cols % 2 == 0 and (run == 0 or cols % (2 * run) == 0), f"width {cols} does not split into gate and up")
    _need(op.attrs["act"] in ("silu", "gelu_tanh"), f"unknown activation {op.attrs['act']!r}")
    return _row_wise(op, cols // 2)


def _concat(op: Op, _: list[Weight]) -> BufferType:
    return f32(sum(value.type.cols for value in op.operands), op.operands[0].type)


def _embed(op: Op, weights: list[Weight]) -> BufferType:
    return BufferType("f32", weights[0].cols)


def _empty(op: Op, _: list[Weight]) -> BufferType:
    _need(op.result is not None and op.result.type.kind == "f32", "makes no f32 value")
    assert op.result is not None
    return op.result.type


@dataclass(frozen=True)
class Rule:
    """How many operands and weights an op takes, the attributes it must have, and the type of its result."""

    operands: tuple[int, ...]
    weights: tuple[int, ...]
    attrs: tuple[str, ...]
    result: Callable[[Op, list[Weight]], BufferType | None]
    tied: int | None = None  # operand whose buffer the result is, when it is there
    act_operand: bool = False  # operand 0 may be quantised
    act_result: bool = False


_HEADS: Final = ("heads", "kv_heads", "head_dim")
RULES: Final[dict[str, Rule]] = {
    "embed": Rule((0,), (1,), ("scale",), _embed),
    "rms_norm": Rule((1,), (1,), ("eps",), _norm, act_result=True),
    "rms_norm_add": Rule((2,), (1,), ("eps",), _norm_add, tied=1),
    "quantize": Rule((1,), (0,), (), lambda op, _: _row_wise(op, op.operands[0].type.cols), act_result=True),
    "matmul": Rule((1, 2), (1, 2), ("accumulate",), _matmul, tied=1, act_operand=True),
    "add": Rule((2,), (0,), (), _add),
    "empty": Rule((0,), (0,), (), _empty),
    "concat": Rule((2, 3), (0,), (), _concat),
    "rope_store": Rule((1,), (0, 2), (*_HEADS, "rope_table", "eps"), _rope_store, tied=0),
    "attention": Rule((1,), (0,), (*_HEADS, "scale", "window"), _attention, act_result=True),
    "glu": Rule((1,), (0,), ("act", "interleave"), _glu, act_result=True),
    "gather": Rule((1,), (0,), (), lambda op, _: BufferType("f32", op.operands[0].type.cols, "logits")),
    "sample": Rule((1,), (0,), (), lambda op, _: None),
}  # fmt: skip

_MODEL: Final = frozenset(
    {"embed", "rms_norm", "matmul", "add", "concat", "rope_store", "attention", "glu", "gather", "sample"}
)
_FUSED: Final = (_MODEL - {"concat"}) | {"empty", "rms_norm_add"}
LEGAL: Final[dict[Stage, frozenset[str]]] = {"model": _MODEL, "fused": _FUSED, "quantised": _FUSED | {"quantize"}}
"""The ops of each stage. Before "quantised" every value is f32 and weight types play no part."""


def tied_operand(op: Op) -> Value | None:
    """The operand whose buffer becomes the result."""
    at = RULES[op.name].tied
    return op.operands[at] if at is not None and at < len(op.operands) else None


def verify(graph: Graph, stage: Stage) -> None:
    """AssertionError, with the op's text, unless the graph is well formed and legal at ``stage``."""
    defined: set[int] = set()
    dead: set[int] = set()
    for op in graph.ops:
        try:
            _need(op.name in LEGAL[stage], f"is not legal at stage {stage!r}")
            for value in op.operands:
                _need(value.id in defined, f"uses %{value.id} before its definition")
                _need(value.id not in dead, f"uses %{value.id} after its buffer was overwritten")
            _check_op(op, graph, stage)
            tied = tied_operand(op)
            if tied is not None:
                dead.add(tied.id)
            if op.result is not None:
                _need(op.result.id not in defined, f"defines %{op.result.id} again")
                defined.add(op.result.id)
        except AssertionError as problem:
            raise AssertionError(f"{problem}: {op_text(op)}") from None


def _check_op(op: Op, graph: Graph, stage: Stage) -> None:
    rule = RULES[op.name]
    _need(len(op.operands) in rule.operands, f"takes {rule.operands} operands")
    _need(len(op.weights) in rule.weights, f"takes {rule.weights} weights")
    for attr in rule.attrs:
        _need(attr in op.attrs, f"misses attribute {attr!r}")
    for name in op.weights:
        _need(name in graph.weights, f"names the unknown weight {name!r}")
    weights = [graph.weights[name] for name in op.weights]
    expected = rule.result(op, weights)
    found = op.result.type if op.result is not None else None
    _need(found == expected, f"has result type {found}, expected {expected}")
    acts = [value.type.kind == "act" for value in op.operands]
    _need(not any(acts[1:]) and not (any(acts) and not rule.act_operand), "takes no quantised operand")
    makes_act = found is not None and found.kind == "act"
    _need(not makes_act or rule.act_result, "makes no quantised result")
    _need(stage == "quantised" or not (makes_act or any(acts)), f"has quantised values at stage {stage!r}")
    if stage == "quantised" and op.name == "matmul":
        _need(acts[0] == (weights[0].dtype not in FLOAT_DTYPES), f"weight is {weights[0].dtype}, operand is not for it")


# --- text -----------------------------------------------------------------------------------------------------------


def _type_text(type: BufferType) -> str:
    encoding = "" if type.rows == "tokens" else f', "{type.rows}"'
    return f"tensor<?x{type.cols}x{'f32' if type.kind == 'f32' else 'i8'}{encoding}>"


def _attr_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e") if "e" in text else text + ".0"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_attr_text(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _generic(name: str, result: Value | None, operands: tuple[Value, ...], attrs: Mapping[str, object]) -> str:
    head = f"%{result.id} = " if result is not None else ""
    names = ", ".join(f"%{value.id}" for value in operands)
    inner = ", ".join(f"{key} = {_attr_text(value)}" for key, value in attrs.items())
    types = ", ".join(_type_text(value.type) for value in operands)
    made = _type_text(result.type) if result is not None else "()"
    return f'{head}"ai.{name}"({names}){" {" + inner + "}" if inner else ""} : ({types}) -> {made}'


def op_text(op: Op) -> str:
    attrs: dict[str, object] = {"weights": op.weights} if op.weights else {}
    attrs |= op.attrs
    if op.layer >= 0:
        attrs["layer"] = op.layer
    return _generic(op.name, op.result, op.operands, attrs)


def _weight_text(weight: Weight) -> str:
    attrs: dict[str, object] = {
        "sym_name": weight.name,
        "dtype": weight.dtype.value,
        "rows": weight.rows,
        "cols": weight.cols,
    }
    attrs["parts"] = tuple(part.tensor for part in weight.parts)
    attrs["part_rows"] = tuple(part.rows for part in weight.parts)
    if any(part.rope_head_dim for part in weight.parts):
        attrs["rope_head_dims"] = tuple(part.rope_head_dim for part in weight.parts)
    if weight.interleave:
        attrs["interleave"] = weight.interleave
    if weight.offset:
        attrs["offset"] = weight.offset
    return _generic("weight", None, (), attrs)


def to_text(graph: Graph) -> str:
    """The graph as an MLIR module: weights as symbols, one function of all ops."""
    lines = ['"builtin.module"() ({', *(f"  {_weight_text(weight)}" for weight in graph.weights.values())]
    lines += ['  "func.func"() ({', *(f"    {op_text(op)}" for op in graph.ops), '    "func.return"() : () -> ()']
    return "\n".join(
        [*lines, f'  }}) {{sym_name = "{graph.name}", function_type = () -> ()}} : () -> ()', "}) : () -> ()", ""]
    )


_OP: Final = re.compile(r'\s*(?:%(\d+) = )?"ai\.(\w+)"\(([^)]*)\)(?: \{(.*)\})? : \((.*)\) -> (.+)')
_TYPE: Final = re.compile(r'tensor<\?x(\d+)x(f32|i8)(?:, "(\w+)")?>')
_ATTR: Final = re.compile(r'(\w+) = ("[^"]*"|\[[^\]]*\]|[^,\s]+)')
_ITEM: Final = re.compile(r'"[^"]*"|[^,\s]+')
_NAME: Final = re.compile(r'sym_name = "([^"]*)", function_type')


def _parse_types(text: str) -> list[BufferType]:
    return [
        BufferType("f32" if kind == "f32" else "act", int(cols), "logits" if rows == "logits" else "tokens")
        for cols, kind, rows in _TYPE.findall(text)
    ]


def _parse_scalar(text: str) -> Attr:
    if text.startswith('"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return float(text) if any(char in text for char in ".en") else int(text)


def _parse_attrs(text: str) -> tuple[dict[str, Attr], dict[str, list[Attr]]]:
    """Scalars and lists apart."""
    scalars: dict[str, Attr] = {}
    lists: dict[str, list[Attr]] = {}
    for key, value in _ATTR.findall(text):
        if value.startswith("["):
            lists[key] = [_parse_scalar(item) for item in _ITEM.findall(value[1:-1])]
        else:
            scalars[key] = _parse_scalar(value)
    return scalars, lists


def _parse_weight(scalars: dict[str, Attr], lists: dict[str, list[Attr]]) -> Weight:
    turns = lists.get("rope_head_dims", [0] * len(lists["parts"]))
    parts = zip(lists["parts"], lists["part_rows"], turns, strict=True)
    return Weight(
        str(scalars["sym_name"]), DType(str(scalars["dtype"])), int(scalars["rows"]), int(scalars["cols"]),
        tuple(Part(str(name), int(rows), int(turn)) for name, rows, turn in parts),
        int(scalars.get("interleave", 0)), float(scalars.get("offset", 0.0)),
    )  # fmt: skip


def from_text(text: str) -> Graph:
    """Parse what `to_text` printed; ValueError names the line that is not understood."""
    weights: dict[str, Weight] = {}
    ops: list[Op] = []
    values: dict[int, Value] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = _OP.fullmatch(line)
        if match is None:
            found = _NAME.search(line)
            name = found[1] if found else name
            if found is None and '"ai.' in line:
                raise ValueError(f"line {number} is no op in generic form: {line.strip()}")
            continue
        scalars, lists = _parse_attrs(match[4] or "")
        if match[2] == "weight":
            weight = _parse_weight(scalars, lists)
            weights[weight.name] = weight
            continue
        ids = [int(item) for item in re.findall(r"%(\d+)", match[3])]
        operands = tuple(Value(id, type) for id, type in zip(ids, _parse_types(match[5]), strict=True))
        if any(values.get(value.id) != value for value in operands):
            raise ValueError(f"line {number} uses a value that is undefined or of another type: {line.strip()}")
        result = Value(int(match[1]), _parse_types(match[6])[0]) if match[1] is not None else None
        if result is not None:
            values[result.id] = result
        layer = int(scalars.pop("layer", -1))
        used = tuple(str(item) for item in lists.get("weights", []))
        ops.append(Op(match[2], operands, result, used, scalars, layer))
    return Graph(name, weights, tuple(ops))
