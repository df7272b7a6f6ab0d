"""The kernel language: typed vector values over LLVM IR, so that a kernel reads like its formula.

Owns: targets, values and their operators, loops and branches, memory access, the instruction ideas that differ per
CPU (`dot_u8s8`, `maddubs`, ...), elementary functions, argument records, and a kernel's view of its thread (header,
scratch, work counters, barrier). Does not own: what a kernel computes, nor compiling and caching (build.py).

A kernel is a Python function that emits the body of ``void kernel(ptr args, ptr ctx)``::

    @kernel(x="ptr", y="ptr", scale="f32", cols="i64")
    def axpy(k: Kernel) -> None:
        x, y = k.array(k.arg.x, "f32"), k.array(k.arg.y, "f32")
        def body(i: Value, lanes: int) -> None:      # emitted once with k.lanes and once with 1 lane for the tail
            y[i] = k.fma(x.load(i, lanes), k.arg.scale, y.load(i, lanes))
        with k.work_items(k.header.T) as row: ...
        k.for_vectors(k.arg.cols, body)

Rules that keep results equal in any company: no fast-math flag is ever set (LLVM neither reassociates nor contracts;
`fma` is explicit), and reductions have one fixed order (`reduce_add` halves the vector until one lane is left).

Integers are signless: ``<``, ``>`` compare signed; ``//``, ``%`` and ``lshr`` are unsigned (sizes and bits), `ashr`,
`sext` and `to_f32` are signed. There is no ``==`` operator; write ``a.eq(b)``.
"""

from __future__ import annotations

import contextlib
import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from ai_engine.kernels.cpu import abi

Number = int | float
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "f32": 32, "f64": 64, "ptr": 64}
_SCALAR: dict[str, Any] = {
    "i1": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
    "ptr": ir.PointerType(),
}


# ---------------------------------------------------------------------------------------------------------------------
# Targets


@dataclass(frozen=True)
class Target:
    """What code is emitted for: a name that kernels may branch on, f32 lanes of a vector, and LLVM's terms."""

    name: str  # "avx2" | "avx512" | "neon"
    lanes: int
    triple: str
    cpu: str
    features: str  # LLVM feature string, "+avx2,+fma"

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    @property
    def vnni(self) -> bool:
        """One instruction computes dot_u8s8 exactly (vpdpbusd)."""
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def x86(self) -> bool:
        return self.name != "neon"


_X86_TRIPLE = "x86_64-unknown-linux-gnu"
_AVX2 = "+64bit,+sse4.2,+ssse3,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+cx16,+sahf"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx512vnni,-prefer-256-bit"
AVX2 = Target("avx2", 8, _X86_TRIPLE, "x86-64-v3", _AVX2)
AVX512 = Target("avx512", 16, _X86_TRIPLE, "x86-64-v4", _AVX512)
NEON = Target("neon", 4, "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod,+fullfp16")
TARGETS = {target.name: target for target in (AVX2, AVX512, NEON)}
"""Targets without a particular machine: portable within their instruction set, used for tests and forced targets."""


def detect_target(features: frozenset[str], cpu: str, forced: str = "") -> Target:
    """The best target for a machine with these LLVM ``features``; ``forced`` (AI_ENGINE_CPU) names a lower one.

    A natural choice is tuned for ``cpu``; a forced one is the portable target of that name.
    """
    if platform.machine() in ("aarch64", "arm64"):
        natural = NEON
    else:
        natural = AVX512 if {"avx512bw", "avx512vl", "avx512dq", "avx512vnni"} <= features else AVX2
        missing = {"avx2", "fma", "f16c"} - features
        if missing:
            raise RuntimeError(f"this CPU lacks {', '.join(sorted(missing))}; the CPU kernels need AVX2, FMA and F16C")
    if forced and forced != natural.name:
        if forced not in TARGETS:
            raise ValueError(f"AI_ENGINE_CPU={forced!r}: expected one of {', '.join(TARGETS)}")
        return TARGETS[forced]
    extra = ["avx512vbmi", "avxvnni", "i8mm"]
    listed = natural.features.split(",")
    if natural is AVX2:
        extra.remove("avx512vbmi")
    added = [f"+{name}" for name in extra if name in features]
    return Target(natural.name, natural.lanes, natural.triple, cpu or natural.cpu, ",".join(listed + added))


# ---------------------------------------------------------------------------------------------------------------------
# Records: named 8-byte fields, filled from Python and read by kernels


class Record:
    """An ordered list of named 8-byte fields; types "ptr", "i64", "i32", "f32". An f32 lies in the low four bytes."""

    def __init__(self, /, **types: str) -> None:
        for name, ty in types.items():
            assert ty in ("ptr", "i64", "i32", "f32"), (name, ty)
        self.types = types
        self.index = {name: i for i, name in enumerate(types)}

    def __len__(self) -> int:
        return len(self.types)

    def word(self, name: str, value: Number) -> int:
        """The 64-bit word that stores ``value`` in field ``name``."""
        if self.types[name] == "f32":
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        return int(value) & 0xFFFF_FFFF_FFFF_FFFF

    def pack(self, /, **values: Number) -> npt.NDArray[np.uint64]:
        """An argument block; every field must be given."""
        assert values.keys() == self.types.keys(), (sorted(values), sorted(self.types))
        return np.array([self.word(name, values[name]) for name in self.types], dtype=np.uint64)


HEADER = Record(**abi.HEADER_FIELDS)
CONTEXT = Record(**abi.CONTEXT_FIELDS)


@dataclass(frozen=True)
class KernelDef:
    """A kernel before it is compiled. ``emit(k)`` writes the body; ``targets``: where it exists (empty: everywhere)."""

    name: str
    args: Record
    emit: Callable[[Kernel], None]
    targets: tuple[str, ...] = ()


def kernel(name: str = "", targets: tuple[str, ...] = (), /, **fields: str) -> Callable[..., KernelDef]:
    """Decorator: ``@kernel(x="ptr", n="i64")`` makes a KernelDef named like the function (or ``name``)."""

    def wrap(emit: Callable[[Kernel], None]) -> KernelDef:
        return KernelDef(name or emit.__name__, Record(**fields), emit, targets)

    return wrap


# ---------------------------------------------------------------------------------------------------------------------
# Values


class Value:
    """A scalar (``lanes`` 1) or vector SSA value of element type ``ty``."""

    __slots__ = ("k", "lanes", "ty", "v")

    def __init__(self, k: Kernel, v: Any, ty: str, lanes: int = 1) -> None:
        self.k, self.v, self.ty, self.lanes = k, v, ty, lanes

    def __repr__(self) -> str:
        return f"<{self.ty} x {self.lanes}>"

    @property
    def is_float(self) -> bool:
        return self.ty[0] == "f"

    def like(self, x: Operand) -> Value:
        """``x`` as a value of this type: numbers become constants, scalars are broadcast."""
        return self.k.coerce(x, self.ty, self.lanes)

    def _binary(self, other: Operand, int_op: str, float_op: str | None) -> Value:
        left: Value = self
        if isinstance(other, Value) and other.lanes > 1 and self.lanes == 1:
            left = self.k.splat(self, other.lanes)
        right = left.like(other)
        op = float_op if left.is_float else int_op
        assert op is not None, f"not an operation on {left!r}"
        return Value(self.k, getattr(self.k.b, op)(left.v, right.v), left.ty, left.lanes)

    def __add__(self, other: Operand) -> Value:
        if self.ty == "ptr":
            return self.k.offset(self, other)
        return self._binary(other, "add", "fadd")

    def __radd__(self, other: Number) -> Value:
        return self.like(other) + self

    def __sub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Number) -> Value:
        return self.like(other) - self

    def __mul__(self, other: Operand) -> Value:
        return self._binary(other, "mul", "fmul")

    def __rmul__(self, other: Number) -> Value:
        return self.like(other) * self

    def __truediv__(self, other: Operand) -> Value:
        assert self.is_float
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Number) -> Value:
        return self.like(other) / self

    def __floordiv__(self, other: Operand) -> Value:
        return self._binary(other, "udiv", None)

    def __mod__(self, other: Operand) -> Value:
        return self._binary(other, "urem", None)

    def __and__(self, other: Operand) -> Value:
        return self._binary(other, "and_", None)

    def __or__(self, other: Operand) -> Value:
        return self._binary(other, "or_", None)

    def __xor__(self, other: Operand) -> Value:
        return self._binary(other, "xor", None)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary(other, "shl", None)

    def lshr(self, other: Operand) -> Value:
        """Shift right, zeros in."""
        return self._binary(other, "lshr", None)

    def ashr(self, other: Operand) -> Value:
        """Shift right, sign in."""
        return self._binary(other, "ashr", None)

    def __invert__(self) -> Value:
        return self ^ (1 if self.ty == "i1" else -1)

    def __neg__(self) -> Value:
        return Value(self.k, self.k.b.fneg(self.v) if self.is_float else self.k.b.neg(self.v), self.ty, self.lanes)

    def _compare(self, op: str, other: Operand, unsigned: bool = False) -> Value:
        right = self.like(other)
        b = self.k.b
        if self.is_float:
            v = b.fcmp_unordered(op, self.v, right.v) if op == "!=" else b.fcmp_ordered(op, self.v, right.v)
        else:
            v = (b.icmp_unsigned if unsigned or self.ty == "ptr" else b.icmp_signed)(op, self.v, right.v)
        return Value(self.k, v, "i1", self.lanes)

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Operand) -> Value:
        return self._compare("==", other)

    def ne(self, other: Operand) -> Value:
        return self._compare("!=", other)

    def ult(self, other: Operand) -> Value:
        """Unsigned less-than."""
        return self._compare("<", other, unsigned=True)

    def __bool__(self) -> bool:
        raise TypeError("a kernel value has no truth value while the kernel is emitted; use k.if_ or k.select")

    # Conversions

    def _cast(self, op: str, ty: str) -> Value:
        return Value(self.k, getattr(self.k.b, op)(self.v, self.k.type(ty, self.lanes)), ty, self.lanes)

    def sext(self, ty: str) -> Value:
        return self if ty == self.ty else self._cast("sext", ty)

    def zext(self, ty: str) -> Value:
        return self if ty == self.ty else self._cast("zext", ty)

    def trunc(self, ty: str) -> Value:
        return self if ty == self.ty else self._cast("trunc", ty)

    def to_f32(self) -> Value:
        """f16 or f64 by value; integers as signed."""
        if self.ty == "f32":
            return self
        return self._cast({"f16": "fpext", "f64": "fptrunc"}.get(self.ty, "sitofp"), "f32")

    def to_f64(self) -> Value:
        return self._cast("fpext" if self.is_float else "sitofp", "f64")

    def to_f16(self) -> Value:
        """Round to nearest even."""
        return self._cast("fptrunc", "f16")

    def to_int(self, ty: str = "i32") -> Value:
        """A float toward zero."""
        return self._cast("fptosi", ty)

    def unsigned_to_f32(self) -> Value:
        return self._cast("uitofp", "f32")

    def ptr_to_int(self) -> Value:
        return Value(self.k, self.k.b.ptrtoint(self.v, _SCALAR["i64"]), "i64")

    def int_to_ptr(self) -> Value:
        return Value(self.k, self.k.b.inttoptr(self.v, _SCALAR["ptr"]), "ptr")

    def bitcast(self, ty: str) -> Value:
        """The same bits as elements of ``ty``; the number of lanes follows."""
        bits = BITS[self.ty] * self.lanes
        assert bits % BITS[ty] == 0, (self, ty)
        lanes = bits // BITS[ty]
        return Value(self.k, self.k.b.bitcast(self.v, self.k.type(ty, lanes)), ty, lanes)

    # Lanes

    def __getitem__(self, lane: Operand) -> Value:
        index = self.k.coerce(lane, "i32").v if not isinstance(lane, Value) else lane.v
        return Value(self.k, self.k.b.extract_element(self.v, index), self.ty)

    def insert(self, lane: Operand, x: Operand) -> Value:
        index = self.k.coerce(lane, "i32").v if not isinstance(lane, Value) else lane.v
        return Value(self.k, self.k.b.insert_element(self.v, self.k.coerce(x, self.ty).v, index), self.ty, self.lanes)

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """New vector of these lanes; lanes from ``self.lanes`` on are ``other``'s."""
        mask = ir.Constant(ir.VectorType(_SCALAR["i32"], len(lanes)), list(lanes))
        second = other.v if other is not None else ir.Constant(self.v.type, ir.Undefined)
        return Value(self.k, self.k.b.shuffle_vector(self.v, second, mask), self.ty, len(lanes))

    def slice(self, start: int, lanes: int) -> Value:
        if lanes == 1:
            return self[start]
        return self.shuffle(range(start, start + lanes))

    def slice_step(self, start: int, step: int) -> Value:
        """Lanes start, start + step, ...; a scalar when one is left."""
        lanes = range(start, self.lanes, step)
        return self.shuffle(lanes) if len(lanes) > 1 else self[start]

    def concat(self, other: Value) -> Value:
        return self.shuffle(range(2 * self.lanes), other)


Operand = Value | int | float


class Var:
    """A variable that loops and branches may change: ``acc.v = k.fma(a, b, acc.v)``. Becomes registers (mem2reg)."""

    __slots__ = ("_k", "_lanes", "_slot", "_ty")

    def __init__(self, k: Kernel, initial: Value) -> None:
        self._k, self._ty, self._lanes = k, initial.ty, initial.lanes
        self._slot = k.entry_alloca(k.type(initial.ty, initial.lanes))
        self.v = initial

    @property
    def v(self) -> Value:
        loaded = self._k.b.load(self._slot, typ=self._k.type(self._ty, self._lanes))
        return Value(self._k, loaded, self._ty, self._lanes)

    @v.setter
    def v(self, x: Operand) -> None:
        self._k.b.store(self._k.coerce(x, self._ty, self._lanes).v, self._slot)


class Array:
    """Typed memory at a pointer, indexed in elements of ``ty``. Element alignment is assumed unless ``align`` (bytes)
    is given for an access."""

    __slots__ = ("k", "ptr", "ty")

    def __init__(self, k: Kernel, ptr: Value, ty: str) -> None:
        assert ptr.ty == "ptr", ptr
        self.k, self.ptr, self.ty = k, ptr, ty

    def at(self, index: Operand) -> Value:
        """Pointer to an element."""
        return self.k.offset(self.ptr, self.k.coerce(index, "i64") * (BITS[self.ty] // 8))

    def load(self, index: Operand, lanes: int = 1, align: int = 0) -> Value:
        return self.k.load(self.at(index), self.ty, lanes, align)

    def __getitem__(self, index: Operand) -> Value:
        return self.load(index)

    def __setitem__(self, index: Operand, x: Operand) -> None:
        self.store(index, x)

    def store(self, index: Operand, x: Operand, align: int = 0) -> None:
        value = x if isinstance(x, Value) else self.k.coerce(x, self.ty)
        assert value.ty == self.ty, (value, self.ty)
        self.k.store(self.at(index), value, align)

    def shift(self, index: Operand) -> Array:
        """The array that starts at element ``index``."""
        return Array(self.k, self.at(index), self.ty)


class View:
    """A Record in memory: ``view.name`` loads the field where it is written."""

    def __init__(self, k: Kernel, record: Record, ptr: Value) -> None:
        self._k, self._record, self._ptr = k, record, ptr

    def __getattr__(self, name: str) -> Value:
        index = self._record.index.get(name)
        if index is None:
            raise AttributeError(name)
        return self._k.load(self._ptr + 8 * index, self._record.types[name])

    def address(self, name: str) -> Value:
        return self._ptr + 8 * self._record.index[name]

    def set(self, name: str, x: Operand) -> None:
        self._k.store(self.address(name), self._k.coerce(x, self._record.types[name]))


class Args:
    """A kernel's arguments, loaded once on entry: ``k.arg.x``."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Value:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


# ---------------------------------------------------------------------------------------------------------------------
# Module and kernel builder


@dataclass
class Module:
    """One LLVM module under construction: kernels, and helper functions emitted on first use."""

    target: Target
    name: str = "kernels"
    m: Any = field(init=False)
    _helpers: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.m = ir.Module(name=self.name, context=ir.Context())
        self.m.triple = self.target.triple

    def add(self, definition: KernelDef) -> None:
        """Emit a kernel as an exported function ``void name(ptr args, ptr ctx)``."""
        function = ir.Function(self.m, ir.FunctionType(ir.VoidType(), [_SCALAR["ptr"]] * 2), name=definition.name)
        function.attributes.add("nounwind")
        k = Kernel(self, function)
        args = Value(k, function.args[0], "ptr")
        loaded = {n: k.load(args + 8 * i, definition.args.types[n]) for n, i in definition.args.index.items()}
        k.arg = Args(loaded)
        k.ctx = Value(k, function.args[1], "ptr")
        try:
            definition.emit(k)
        except Exception as error:
            error.add_note(f"while emitting kernel {definition.name} for {self.target.name}")
            raise
        k.b.ret_void()

    def helper(self, name: str, params: Sequence[str], emit: Callable[..., Value | None], result: str = "") -> Any:
        """An internal, never inlined function, emitted once per module: ``emit(k, *params)``; ``k.ctx`` is the first
        parameter when that is a pointer named so by the caller's convention (helpers take ctx first)."""
        if name not in self._helpers:
            returns = _SCALAR[result] if result else ir.VoidType()
            function = ir.Function(self.m, ir.FunctionType(returns, [_SCALAR[p] for p in params]), name=name)
            function.linkage = "internal"
            function.attributes.add("nounwind")
            function.attributes.add("noinline")
            self._helpers[name] = function
            k = Kernel(self, function)
            values = [Value(k, a, ty) for a, ty in zip(function.args, params, strict=True)]
            if values and values[0].ty == "ptr":
                k.ctx = values[0]
            returned = emit(k, *values)
            if returned is None:
                k.b.ret_void()
            else:
                k.b.ret(returned.v)
        return self._helpers[name]

    def text(self) -> str:
        return str(self.m)


class Kernel:
    """The builder handed to a kernel generator. ``lanes`` is the target's number of f32 lanes."""

    arg: Args
    ctx: Value

    def __init__(self, module: Module, function: Any) -> None:
        self.module, self.target, self.lanes = module, module.target, module.target.lanes
        self._entry = function.append_basic_block("entry")
        body = function.append_basic_block("body")
        self._entry_builder = ir.IRBuilder(self._entry)
        self._entry_builder.branch(body)
        self._entry_builder.position_before(self._entry.terminator)
        self.b: Any = ir.IRBuilder(body)

    # Types, constants, variables

    def type(self, ty: str, lanes: int = 1) -> Any:
        return _SCALAR[ty] if lanes == 1 else ir.VectorType(_SCALAR[ty], lanes)

    def const(self, x: Number, ty: str, lanes: int = 1) -> Value:
        """A constant; a vector has it in every lane."""
        if ty == "ptr":
            assert x == 0
            return Value(self, ir.Constant(_SCALAR["ptr"], None), "ptr")
        if ty[0] == "f":
            x = float(x)
        else:
            assert isinstance(x, (int, np.integer)), x
            x = int(x) & 1 if ty == "i1" else int(x)
        constant = ir.Constant(_SCALAR[ty], x) if lanes == 1 else ir.Constant(self.type(ty, lanes), [x] * lanes)
        return Value(self, constant, ty, lanes)

    def f32(self, x: Number, lanes: int = 1) -> Value:
        """An f32 constant (rounded to nearest)."""
        return self.const(float(np.float32(x)), "f32", lanes)

    def i32(self, x: int, lanes: int = 1) -> Value:
        return self.const(x, "i32", lanes)

    def i64(self, x: int) -> Value:
        return self.const(x, "i64")

    def const_vec(self, ty: str, values: Sequence[Number]) -> Value:
        return Value(self, ir.Constant(self.type(ty, len(values)), list(values)), ty, len(values))

    def iota(self, ty: str, lanes: int) -> Value:
        return self.const_vec(ty, list(range(lanes)))

    def undef(self, ty: str, lanes: int = 1) -> Value:
        return Value(self, ir.Constant(self.type(ty, lanes), ir.Undefined), ty, lanes)

    def coerce(self, x: Operand | Var, ty: str, lanes: int = 1) -> Value:
        if isinstance(x, Var):
            x = x.v
        if not isinstance(x, Value):
            return self.f32(x, lanes) if ty == "f32" else self.const(x, ty, lanes)
        assert x.ty == ty, f"expected {ty}, found {x!r}; convert explicitly"
        if x.lanes == lanes:
            return x
        return self.splat(x, lanes)

    def splat(self, x: Value, lanes: int) -> Value:
        """A scalar in every lane."""
        assert x.lanes == 1, f"expected a scalar or {lanes} lanes, found {x!r}"
        if lanes == 1:
            return x
        undef = ir.Constant(self.type(x.ty, lanes), ir.Undefined)
        one = self.b.insert_element(undef, x.v, ir.Constant(_SCALAR["i32"], 0))
        mask = ir.Constant(ir.VectorType(_SCALAR["i32"], lanes), [0] * lanes)
        return Value(self, self.b.shuffle_vector(one, undef, mask), x.ty, lanes)

    def var(self, initial: Value) -> Var:
        return Var(self, initial)

    def entry_alloca(self, llvm_type: Any) -> Any:
        return self._entry_builder.alloca(llvm_type)

    def stack(self, nbytes: int, align: int = 64) -> Value:
        """Uninitialised memory of this call."""
        slot = self._entry_builder.alloca(ir.ArrayType(_SCALAR["i8"], nbytes))
        slot.align = align
        return Value(self, slot, "ptr")

    def array(self, ptr: Value, ty: str) -> Array:
        return Array(self, ptr, ty)

    # Memory

    def offset(self, ptr: Value, nbytes: Operand) -> Value:
        index = self.coerce(nbytes, "i64").v
        return Value(self, self.b.gep(ptr.v, [index], source_etype=_SCALAR["i8"]), "ptr")

    def load(self, ptr: Value, ty: str, lanes: int = 1, align: int = 0) -> Value:
        v = self.b.load(ptr.v, typ=self.type(ty, lanes), align=align or max(1, BITS[ty] // 8))
        return Value(self, v, ty, lanes)

    def store(self, ptr: Value, x: Value, align: int = 0) -> None:
        self.b.store(x.v, ptr.v, align=align or max(1, BITS[x.ty] // 8))

    def prefetch(self, ptr: Value, locality: int = 3, write: bool = False) -> None:
        """Locality 3 keeps the line in every cache level, 0 is streaming."""
        args = [ptr.v, self.i32(int(write)).v, self.i32(locality).v, self.i32(1).v]
        self._intrinsic("llvm.prefetch.p0", ir.VoidType(), args)

    def lane_mask(self, count: Operand, lanes: int) -> Value:
        """i1 vector with the first ``count`` lanes set."""
        n = self.coerce(count, "i64").trunc("i32") if isinstance(count, Value) and count.ty == "i64" else count
        return self.iota("i32", lanes) < self.coerce(n, "i32", lanes)

    def masked_load(self, ptr: Value, ty: str, mask: Value, fill: Number = 0) -> Value:
        """Lanes with a clear mask bit are not read and become ``fill``."""
        t = self.type(ty, mask.lanes)
        name = f"llvm.masked.load.v{mask.lanes}{ty}.p0"
        default = self.const(fill, ty, mask.lanes).v
        args = [ptr.v, self.i32(BITS[ty] // 8).v, mask.v, default]
        return Value(self, self._intrinsic(name, t, args), ty, mask.lanes)

    def masked_store(self, ptr: Value, x: Value, mask: Value) -> None:
        name = f"llvm.masked.store.v{x.lanes}{x.ty}.p0"
        args = [x.v, ptr.v, self.i32(BITS[x.ty] // 8).v, mask.v]
        self._intrinsic(name, ir.VoidType(), args)

    def gather(self, ptr: Value, index: Value, ty: str) -> Value:
        """Element ``index[lane]`` of the array at ``ptr`` in each lane; lane by lane, no hardware gather."""
        array, out = self.array(ptr, ty), self.undef(ty, index.lanes)
        for lane in range(index.lanes):
            out = out.insert(lane, array[index[lane].sext("i64")])
        return out

    def copy(self, target: Value, source: Value, nbytes: Operand) -> None:
        """memcpy; the areas do not overlap."""
        args = [target.v, source.v, self.coerce(nbytes, "i64").v, self.const(0, "i1").v]
        self._intrinsic("llvm.memcpy.p0.p0.i64", ir.VoidType(), args)

    def fill(self, target: Value, byte: int, nbytes: Operand) -> None:
        args = [target.v, self.const(byte, "i8").v, self.coerce(nbytes, "i64").v, self.const(0, "i1").v]
        self._intrinsic("llvm.memset.p0.i64", ir.VoidType(), args)

    def load_acquire(self, ptr: Value, ty: str) -> Value:
        return Value(self, self.b.load_atomic(ptr.v, "acquire", BITS[ty] // 8, typ=_SCALAR[ty]), ty)

    def store_release(self, ptr: Value, x: Value) -> None:
        self._store_atomic(ptr, x, "release")

    def store_seq_cst(self, ptr: Value, x: Value) -> None:
        self._store_atomic(ptr, x, "seq_cst")

    def _store_atomic(self, ptr: Value, x: Value, ordering: str) -> None:
        # IRBuilder.store_atomic expects a typed pointer, which no longer exists
        self.b._insert(ir.instructions.StoreAtomicInstr(self.b.block, x.v, ptr.v, ordering, BITS[x.ty] // 8))

    def load_seq_cst(self, ptr: Value, ty: str) -> Value:
        return Value(self, self.b.load_atomic(ptr.v, "seq_cst", BITS[ty] // 8, typ=_SCALAR[ty]), ty)

    def atomic_add(self, ptr: Value, x: Operand, ty: str = "i64", ordering: str = "seq_cst") -> Value:
        """Fetch and add; the value before."""
        return Value(self, self.b.atomic_rmw("add", ptr.v, self.coerce(x, ty).v, ordering), ty)

    # Control flow

    @contextlib.contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """``for i in range(start, stop, step)`` over i64, step positive."""
        first, last, by = (self.coerce(x, "i64") for x in (start, stop, step))
        head, body, done = (self.b.append_basic_block(n) for n in ("head", "loop", "done"))
        before = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(_SCALAR["i64"])
        i.add_incoming(first.v, before)
        self.b.cbranch(self.b.icmp_signed("<", i, last.v), body, done)
        self.b.position_at_end(body)
        yield Value(self, i, "i64")
        i.add_incoming(self.b.add(i, by.v, flags=("nsw",)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextlib.contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """An endless loop; the body leaves it with ``leave_if(condition)``, as often as it likes."""
        body, done = self.b.append_basic_block("loop"), self.b.append_basic_block("done")

        def leave_if(condition: Value) -> None:
            stay = self.b.append_basic_block("stay")
            self.b.cbranch(condition.v, done, stay)
            self.b.position_at_end(stay)

        self.b.branch(body)
        self.b.position_at_end(body)
        yield leave_if
        self.b.branch(body)
        self.b.position_at_end(done)

    @contextlib.contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.v):
            yield

    @contextlib.contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """``with k.if_else(c) as (then, otherwise): with then: ...; with otherwise: ...``"""
        with self.b.if_else(condition.v) as branches:
            yield branches

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        """Lane-wise ``a if condition else b``; at least one of the two is a Value."""
        model = a if isinstance(a, Value) else b
        assert isinstance(model, Value)
        lanes = max(condition.lanes, *(x.lanes for x in (a, b) if isinstance(x, Value)))
        left, right = self.coerce(a, model.ty, lanes), self.coerce(b, model.ty, lanes)
        return Value(self, self.b.select(condition.v, left.v, right.v), model.ty, lanes)

    def for_vectors(self, count: Operand, body: Callable[[Value, int], None], lanes: int = 0) -> None:
        """``body(i, lanes)`` for whole vectors of ``count`` elements, then ``body(i, 1)`` for each of the rest."""
        width = lanes or self.lanes
        n = self.coerce(count, "i64")
        whole = n - n % width
        with self.loop(0, whole, width) as i:
            body(i, width)
        with self.loop(whole, n) as i:
            body(i, 1)

    def call(self, name: str, emit: Callable[..., Value | None], *values: Value, result: str = "") -> Value | None:
        """Call an internal helper function, emitted on first use as ``emit(k, *params)``; pass k.ctx first if the
        helper needs its thread."""
        function = self.module.helper(name, [v.ty for v in values], emit, result)
        v = self.b.call(function, [x.v for x in values])
        return Value(self, v, result) if result else None

    def call_address(self, address: Value, *values: Value, result: str = "", tail: bool = False) -> Value | None:
        """Call a C function by pointer."""
        returns = _SCALAR[result] if result else ir.VoidType()
        function_type = ir.FunctionType(returns, [_SCALAR[v.ty] for v in values])
        v = self.b.call(_TypedCallee(address.v, function_type), [x.v for x in values], tail=tail)
        return Value(self, v, result) if result else None

    # The thread: header, scratch, work, barrier

    @property
    def header(self) -> View:
        """The step's StepHeader (abi.HEADER_FIELDS)."""
        return View(self, HEADER, self.context.header)

    @property
    def context(self) -> View:
        """This thread's context (abi.CONTEXT_FIELDS)."""
        return View(self, CONTEXT, self.ctx)

    @property
    def scratch(self) -> Value:
        """Pointer to this thread's scratch memory (abi.SCRATCH_BYTES of it, 64-byte aligned)."""
        return self.context.scratch

    @contextlib.contextmanager
    def work_items(self, count: Operand, grain: Operand = 1, counter: int = 0) -> Iterator[Value]:
        """Items 0..count-1 shared out dynamically among the threads, ``grain`` at a time; each runs exactly once, on
        any thread. A kernel with several such loops gives each its own ``counter`` (0 to 3). Nobody waits here: see
        `wait_items`, and the slot's barrier.

        A thread that comes late finds the items done and goes on, so one that the system holds up elsewhere delays
        nobody. Hence what a kernel writes outside of such loops, by thread number, must end in a `barrier`.
        """
        assert 0 <= counter < abi.COUNTERS_PER_SLOT
        total, by = self.max(self.coerce(count, "i64"), 0), self.coerce(grain, "i64")
        line = self.context.counters
        taken, done = line + 8 * counter, line + (abi.COUNTER_DONE + 8 * counter)
        self._store_atomic(done + 4, total.trunc("i32"), "monotonic")
        with self.forever() as leave_if:
            first = self.atomic_add(taken, by, ordering="monotonic")
            leave_if(first >= total)
            end = self.min(first + by, total)
            with self.loop(first, end) as i:
                yield i
            items = (end - first).trunc("i32")
            with self.if_((self.atomic_add(done, items, "i32") + items).eq(total.trunc("i32"))):
                self.call("wake_sleepers", _emit_wake, self.ctx, done)

    def wait_items(self, counter: int = 0) -> None:
        """Wait until every item of this kernel's loop over ``counter`` is done, whoever does it; their writes are then
        visible."""
        self.call("wait_done", _emit_wait_done, self.ctx, self.context.counters + (abi.COUNTER_DONE + 8 * counter))

    def wait_slot(self, line: Value) -> None:
        """As `wait_items` for all loops of the slot with these work counters (the executor)."""
        self.call("wait_slot", _emit_wait_slot, self.ctx, line)

    def barrier(self) -> None:
        """Wait until every thread has come here; what they wrote is then visible. Every thread must come."""
        self.call("thread_barrier", _emit_barrier, self.ctx)

    def cycles(self) -> Value:
        """The machine's constant-rate counter (x86 TSC; aarch64 CNTVCT)."""
        name = "llvm.readcyclecounter" if self.target.x86 else "llvm.readsteadycounter"
        return Value(self, self._intrinsic(name, _SCALAR["i64"], []), "i64")

    def pause(self) -> None:
        """Be polite in a spin loop."""
        if self.target.x86:
            self._intrinsic("llvm.x86.sse2.pause", ir.VoidType(), [])
        else:
            self._intrinsic("llvm.aarch64.hint", ir.VoidType(), [self.i32(1).v])  # yield

    def keep_order(self) -> None:
        """No load or store moves past here: keeps LLVM's scheduler from hoisting loads until registers spill."""
        asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
        self.b.call(asm, [])

    # Arithmetic

    def _intrinsic(self, name: str, result: Any, args: Sequence[Any]) -> Any:
        function = self.module.m.globals.get(name)
        if function is None:
            function = ir.Function(self.module.m, ir.FunctionType(result, [a.type for a in args]), name=name)
        return self.b.call(function, list(args))

    def intrinsic(self, name: str, result: str, lanes: int, *args: Value) -> Value:
        """Any LLVM intrinsic by its full name."""
        return Value(self, self._intrinsic(name, self.type(result, lanes), [a.v for a in args]), result, lanes)

    def _generic(self, name: str, x: Value, *more: Value) -> Value:
        suffix = x.ty if x.lanes == 1 else f"v{x.lanes}{x.ty}"
        return self.intrinsic(f"llvm.{name}.{suffix}", x.ty, x.lanes, x, *more)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once."""
        values = [x for x in (a, b, c) if isinstance(x, Value)]
        model = max(values, key=lambda x: x.lanes)
        left, middle, right = (model.like(x) for x in (a, b, c))
        return self._generic("fma", left, middle, right)

    def min(self, a: Value, b: Operand) -> Value:
        """Signed or float; of floats, ``b`` where either is NaN."""
        return self.select(a < b, a, b) if a.is_float else self._generic("smin", a, a.like(b))

    def max(self, a: Value, b: Operand) -> Value:
        """Signed or float; of floats, ``b`` where either is NaN."""
        return self.select(a > b, a, b) if a.is_float else self._generic("smax", a, a.like(b))

    def umin(self, a: Value, b: Operand) -> Value:
        return self._generic("umin", a, a.like(b))

    def umax(self, a: Value, b: Operand) -> Value:
        return self._generic("umax", a, a.like(b))

    def abs(self, x: Value) -> Value:
        if x.is_float:
            return self._generic("fabs", x)
        return self._generic("abs", x, self.const(0, "i1"))

    def sqrt(self, x: Value) -> Value:
        return self._generic("sqrt", x)

    def floor(self, x: Value) -> Value:
        return self._generic("floor", x)

    def round(self, x: Value) -> Value:
        """To the nearest integer, ties to even, as a float."""
        return self._generic("roundeven", x)

    def round_i32(self, x: Value) -> Value:
        """f32 to the nearest i32, ties to even; |x| < 2^22."""
        return (x + 12582912.0).bitcast("i32") - 0x4B400000

    def popcount(self, x: Value) -> Value:
        return self._generic("ctpop", x)

    def bf16_to_f32(self, x: Value) -> Value:
        """i16 bits of a bfloat16."""
        return (x.zext("i32") << 16).bitcast("f32")

    def f32_to_bf16(self, x: Value) -> Value:
        """Round to nearest even; as i16 bits (finite values)."""
        bits = x.bitcast("i32")
        return (bits + (bits.lshr(16) & 1) + 0x7FFF).lshr(16).trunc("i16")

    def exp(self, x: Value) -> Value:
        """e^x in f32, within 1 ulp or so; 0 below -87.34 (no denormals), inf above 88.72; NaN stays.

        x = n ln2 + r, |r| <= ln2/2; a degree-7 polynomial for e^r (Taylor's last terms fitted); times 2^n in two
        steps so that n = 128 does not overflow early.
        """
        low, high = -87.33654, 88.72284
        y = self.select(x < low, x.like(low), self.select(x > high, x.like(high), x))
        n = (y * 1.44269504088896341) + 12582912.0
        n_int = n.bitcast("i32") - 0x4B400000
        n = n - 12582912.0
        r = self.fma(n, -0.693359375, y)
        r = self.fma(n, 2.12194440e-4, r)
        p = x.like(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, c)
        p = self.fma(p, r * r, r) + 1.0
        half = n_int.ashr(1)
        p = p * ((half + 127) << 23).bitcast("f32") * ((n_int - half + 127) << 23).bitcast("f32")
        p = self.select(x < low, 0.0, p)
        return self.select(x > high, float("inf"), p)

    def log(self, x: Value) -> Value:
        """Natural logarithm in f32 of normal positive x, within 2 ulp or so; -inf at 0 (and denormals)."""
        bits = x.bitcast("i32")
        e = bits.lshr(23) - 126
        m = ((bits & 0x007FFFFF) | 0x3F000000).bitcast("f32")  # [0.5, 1)
        small = m < 0.70710678
        e = self.select(small, e - 1, e)
        m = self.select(small, m + m, m) - 1.0
        p = x.like(7.0376836292e-2)
        for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1):
            p = self.fma(p, m, c)
        for c in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
            p = self.fma(p, m, c)
        z = m * m
        f = e.to_f32()
        y = self.fma(f, -2.12194440e-4, p * m * z)
        y = self.fma(z, -0.5, y)
        y = self.fma(f, 0.693359375, m + y)
        y = self.select(x < 1.17549435e-38, float("-inf"), y)
        return self.select(x < float("inf"), y, x)  # inf and NaN stay

    def sigmoid(self, x: Value) -> Value:
        return x.like(1.0) / (self.exp(-x) + 1.0)

    def silu(self, x: Value) -> Value:
        return x / (self.exp(-x) + 1.0)

    def gelu_tanh(self, x: Value) -> Value:
        """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x * sigmoid(2 u)."""
        u = self.fma(x * x * x, 0.044715, x) * (2 * 0.7978845608028654)
        return x / (self.exp(-u) + 1.0)

    def reduce(self, x: Value, op: Callable[[Value, Value], Value]) -> Value:
        """Halve the vector with ``op`` until one lane is left: a fixed order."""
        while x.lanes > 1:
            half = x.lanes // 2
            x = op(x.slice(0, half), x.slice(half, half))
        return x

    def reduce_add(self, x: Value) -> Value:
        return self.reduce(x, lambda a, b: a + b)

    def reduce_max(self, x: Value) -> Value:
        return self.reduce(x, self.max)

    # Integer dot products

    def maddubs(self, u8: Value, s8: Value) -> Value:
        """i8 x 2n (first unsigned, second signed) -> i16 x n: sums of neighbouring products. x86 saturates at +-32767
        (NEON wraps): the caller keeps |2 u s| within 32767, e.g. u <= 128."""
        names = {16: "ssse3.pmadd.ub.sw.128", 32: "avx2.pmadd.ub.sw", 64: "avx512.pmaddubs.w.512"}
        return self._pairs(u8, s8, names, "i16", lambda v: v.zext("i16"))

    def madd(self, a: Value, b: Value) -> Value:
        """i16 x 2n, signed -> i32 x n: sums of neighbouring products, exact."""
        names = {8: "sse2.pmadd.wd", 16: "avx2.pmadd.wd", 32: "avx512.pmaddw.d.512"}
        return self._pairs(a, b, names, "i32", lambda v: v.sext("i32"))

    def madd_ones(self, x: Value) -> Value:
        """i16 x 2n -> i32 x n: sums of neighbours."""
        return self.madd(x, self.const(1, "i16", x.lanes))

    def _pairs(self, a: Value, b: Value, names: dict[int, str], wide: str, extend_a: Callable[[Value], Value]) -> Value:
        half = a.lanes // 2
        if self.target.x86 and a.lanes in names and (a.lanes * BITS[a.ty] < 512 or self.target.name == "avx512"):
            return self.intrinsic(f"llvm.x86.{names[a.lanes]}", wide, half, a, b)
        product = extend_a(a) * b.sext(wide)
        return product.shuffle(range(0, a.lanes, 2)) + product.shuffle(range(1, a.lanes, 2))

    def dot_u8s8(self, acc: Value, u8: Value, s8: Value, max_u: int = 255) -> Value:
        """acc[i32 x n] + sums over groups of four of u8[4n] * s8[4n]; exact for s8 in -127..127 and u8 <= max_u.

        avx512 (or AVX-VNNI): vpdpbusd. avx2: vpmaddubsw + vpmaddwd (twice when max_u > 128). neon: sdot (twice when
        max_u > 127).
        """
        n = acc.lanes
        assert u8.lanes == s8.lanes == 4 * n, (acc, u8, s8)
        if self.target.vnni and n in (4, 8, 16):
            return self.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * n}", "i32", n, acc, u8, s8)
        if not self.target.x86:
            if max_u <= 127:
                return self.dot_s8s8(acc, u8, s8)
            shifted = self.dot_s8s8(acc, u8 ^ -128, s8)
            return shifted + (self.dot_s8s8(self.i32(0, n), self.const(1, "i8", 4 * n), s8) << 7)
        if max_u <= 128:
            return acc + self.madd_ones(self.maddubs(u8, s8))
        half = self._halve_u8(u8)
        return acc + self.madd_ones(self.maddubs(half, s8)) + self.madd_ones(self.maddubs(u8 - half, s8))

    def _halve_u8(self, u8: Value) -> Value:
        return (u8.bitcast("i16").lshr(1) & 0x7F7F).bitcast("i8")

    def dot_s8s8(self, acc: Value, a: Value, b: Value) -> Value:
        """acc[i32 x n] + sums over groups of four of a[4n] * b[4n], both signed; exact for both in -127..127."""
        n = acc.lanes
        if self.target.x86:
            return self.dot_u8s8(acc, self.abs(a), self.sign_i8(b, a), max_u=127)
        if n == 4:
            return self.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", "i32", 4, acc, a, b)
        half = n // 2
        low = self.dot_s8s8(acc.slice(0, half), a.slice(0, 2 * n), b.slice(0, 2 * n))
        return low.concat(self.dot_s8s8(acc.slice(half, half), a.slice(2 * n, 2 * n), b.slice(2 * n, 2 * n)))

    def sign_i8(self, x: Value, s: Value) -> Value:
        """x * sign(s) per byte (vpsignb on AVX2); x is not -128."""
        if self.target.name == "avx2" and x.lanes == 32:
            return self.intrinsic("llvm.x86.avx2.psign.b", "i8", 32, x, s)
        signed = self.select(s < 0, -x, x)
        return self.select(s.eq(0), 0, signed)

    def shuffle_bytes(self, table: Value, index: Value) -> Value:
        """Per 16-byte group: table byte at each index 0..15 (vpshufb, tbl). Both are i8 x 16, 32 or 64."""
        names = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}
        if self.target.x86:
            return self.intrinsic(names[table.lanes], "i8", table.lanes, table, index)
        if table.lanes == 16:
            return self.intrinsic("llvm.aarch64.neon.tbl1.v16i8", "i8", 16, table, index)
        half = table.lanes // 2
        low = self.shuffle_bytes(table.slice(0, half), index.slice(0, half))
        return low.concat(self.shuffle_bytes(table.slice(half, half), index.slice(half, half)))


class _TypedCallee:
    """A pointer with the function type that llvmlite's call instruction wants to see."""

    def __init__(self, value: Any, function_type: Any) -> None:
        self._value = value
        self.function_type = function_type
        self.type = value.type
        self.attributes: Any = ()

    def get_reference(self) -> str:
        return str(self._value.get_reference())


# Waiting. A thread spins on a word for a bounded time, then sleeps on it (futex). It counts itself in ``sleepers``
# before the system re-checks the word, and who changes the word does so before reading ``sleepers``; both are
# sequentially consistent, so no wake-up is lost.


def _emit_wait(k: Kernel, ctx: Value, word: Value, arrived: Callable[[Value], Value]) -> None:
    """Until ``arrived(word's value)``."""
    with k.if_(~arrived(k.load_acquire(word, "i32"))):
        c = View(k, CONTEXT, ctx)
        start, limit = k.cycles(), c.spin_cycles
        with k.forever() as leave_if:
            seen = k.load_acquire(word, "i32")
            leave_if(arrived(seen))
            with k.if_else(k.cycles() - start < limit) as (spin, sleep):
                with spin:
                    k.pause()
                with sleep:
                    k.atomic_add(c.sleepers, 1, "i32")
                    k.call_address(c.syscall, *_futex(k, word, abi.FUTEX_WAIT, seen.zext("i64")), result="i64")
                    k.atomic_add(c.sleepers, -1, "i32")


def _emit_wake(k: Kernel, ctx: Value, word: Value) -> None:
    """Wake who sleeps on a word that has just been changed."""
    c = View(k, CONTEXT, ctx)
    with k.if_(k.load_seq_cst(c.sleepers, "i32").ne(0)):
        k.call_address(c.syscall, *_futex(k, word, abi.FUTEX_WAKE, k.i64(0x7FFFFFFF)), result="i64")


def _emit_wait_done(k: Kernel, ctx: Value, done: Value) -> None:
    total = k.load_acquire(done + 4, "i32")
    _emit_wait(k, ctx, done, lambda seen: seen.eq(total))


def _emit_wait_slot(k: Kernel, ctx: Value, line: Value) -> None:
    for counter in range(abi.COUNTERS_PER_SLOT):
        _emit_wait_done(k, ctx, line + (abi.COUNTER_DONE + 8 * counter))


def _emit_barrier(k: Kernel, ctx: Value) -> None:
    """Store this thread's flag, then wait for each other thread's."""
    c = View(k, CONTEXT, ctx)
    epoch = (c.epoch + 1).trunc("i32")
    c.set("epoch", epoch.zext("i64"))
    mine = c.flags + c.thread * abi.FLAG_STRIDE
    k.store_seq_cst(mine, epoch)
    _emit_wake(k, ctx, mine)
    with k.loop(0, c.num_threads) as t:
        _emit_wait(k, ctx, c.flags + t * abi.FLAG_STRIDE, lambda seen: (seen - epoch) >= 0)


def _futex(k: Kernel, address: Value, operation: int, value: Value) -> list[Value]:
    """Arguments of ``syscall(SYS_futex, address, operation, value, no timeout)``."""
    number = abi.SYS_FUTEX_X86 if k.target.x86 else abi.SYS_FUTEX_ARM
    return [k.i64(number), address.ptr_to_int(), k.i64(operation), value, k.i64(0), k.i64(0), k.i64(0)]
