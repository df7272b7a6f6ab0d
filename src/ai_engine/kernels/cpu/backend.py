"""CpuKernels: the kernels port on the machine's own cores.

Owns binding (calls to slots: kernel addresses and argument blocks) and the header of each step. Does not own the
kernels, their layouts, nor the threads, which come in as a ThreadTeam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ai_engine.kernels import catalog
from ai_engine.kernels.cpu import abi, attention, build, matmul, pack, registry, sample, screen
from ai_engine.kernels.cpu.executor import SPIN_US, Clock, Contexts, Rings, aligned
from ai_engine.kernels.cpu.formats import ActLayout
from ai_engine.kernels.cpu.kv import KvLayout, kv_lanes
from ai_engine.kernels.cpu.lang import HEADER, Number, Record, Target
from ai_engine.ports.hardware import ThreadTeam
from ai_engine.ports.kernels import (
    U8,
    Buffer,
    BufferType,
    Call,
    KvShape,
    Program,
    Resources,
    SampleBatch,
    SampleOut,
    Slot,
    StepBatch,
    WeightSpec,
)
from ai_engine.ports.model import DType, row_bytes
from ai_engine.ports.sampling import MAX_LOGPROBS

U64 = npt.NDArray[np.uint64]

PER_ROW: dict[str, type[np.generic]] = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "repetition": np.float32,
    "presence": np.float32, "frequency": np.float32, "seed": np.uint64, "position": np.int32, "forced": np.int32,
    "num_top": np.int32, "mask_row": np.int32,
}  # fmt: skip
"""Fields of a SampleBatch with one entry per logits row."""

RAGGED: dict[str, type[np.generic]] = {
    "history_token": np.int32, "history_count": np.int32, "bias_token": np.int32, "bias_value": np.float32,
    "masks": np.uint32,
}  # fmt: skip


class StepArrays:
    """The header's arrays at fixed addresses, filled anew each step; and the outputs."""

    def __init__(self, resources: Resources) -> None:
        tokens, seqs, rows = resources.max_tokens, resources.max_seqs, resources.max_logit_rows
        self.token_ids = np.zeros(tokens, np.int32)
        self.positions = np.zeros(tokens, np.int32)
        self.row_seq = np.zeros(tokens, np.int32)
        self.each_row = np.arange(tokens, dtype=np.int32)  # row_seq of a step with one row per sequence
        self.seq_start = np.zeros(seqs + 1, np.int32)
        self.context_len = np.zeros(seqs, np.int32)
        self.logit_rows = np.zeros(rows, np.int32)
        self.history_start = np.zeros(rows + 1, np.int32)
        self.bias_start = np.zeros(rows + 1, np.int32)
        self.per_row = {name: np.zeros(rows, dtype) for name, dtype in PER_ROW.items()}
        self.out = SampleOut(
            token=np.zeros(rows, np.int32),
            logprob=np.zeros(rows, np.float32),
            top_token=np.zeros((rows, MAX_LOGPROBS), np.int32),
            top_logprob=np.zeros((rows, MAX_LOGPROBS), np.float32),
        )
        self.order: npt.NDArray[np.intp] | None = None  # of this step's logits rows, where screened ones come first
        self.held: list[npt.NDArray[np.generic]] = []  # the batch's own arrays that this step's header points at
        self.row_seq_address = int(self.row_seq.ctypes.data)
        self.each_row_address = int(self.each_row.ctypes.data)

    def bind(self, header: U64) -> None:
        """Write the addresses that never change."""
        out = self.out
        arrays = {name: getattr(self, name) for name in ("token_ids", "positions", "seq_start", "context_len",
                  "logit_rows", "history_start", "bias_start")}  # fmt: skip
        arrays |= self.per_row | {
            "out_token": out.token, "out_logprob": out.logprob,
            "out_top_token": out.top_token, "out_top_logprob": out.top_logprob,
        }  # fmt: skip
        for name, array in arrays.items():
            header[HEADER.index[name]] = array.ctypes.data

    def fill(self, header: U64, batch: StepBatch, screens: bool = False) -> tuple[int, int]:
        """Copy a step's integers and write its sizes; returns (T, R). ``screens``: the program has a screened head."""
        tokens, seqs, rows = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
        self.token_ids[:tokens] = batch.token_ids
        self.positions[:tokens] = batch.positions
        self.seq_start[: seqs + 1] = batch.seq_start
        self.context_len[:seqs] = batch.context_len
        self.logit_rows[:rows] = batch.logit_rows
        self.order, header[_SCREENED] = None, 0
        if seqs == tokens and bool((self.seq_start[:tokens] == self.each_row[:tokens]).all()):
            row_seq = self.each_row_address
        else:
            self.row_seq[:tokens] = np.repeat(self.each_row[:seqs], np.diff(self.seq_start[: seqs + 1]))
            row_seq = self.row_seq_address
        table = np.ascontiguousarray(batch.page_table, np.int32)
        self.held = [table]
        header[_T], header[_S], header[_R], header[_STEP] = tokens, seqs, rows, batch.step
        header[_ROW_SEQ], header[_PAGE_TABLE], header[_PAGE_STRIDE] = row_seq, _address(table), table.shape[1]
        if rows:
            sample = batch.sample
            for name, array in self.per_row.items():
                array[:rows] = getattr(sample, name)
            self.history_start[: rows + 1] = sample.history_start
            self.bias_start[: rows + 1] = sample.bias_start
            if screens:
                header[_SCREENED] = self._screened_first(rows, batch.sample)
            for name, dtype in RAGGED.items():
                array = np.ascontiguousarray(getattr(sample, name), dtype)
                self.held.append(array)
                header[HEADER.index[name]] = _address(array)
            header[_MASK_STRIDE] = sample.masks.shape[1]
        return tokens, rows

    def _screened_first(self, rows: int, sample: SampleBatch) -> int:
        """Order the logits rows so; returns how many there are. A screened row has no bias and no history, so the
        ragged lists stay as they are."""
        chosen = screen.screenable(sample)
        count = int(chosen.sum())
        if 0 < count < rows:
            self.order = order = np.argsort(~chosen, kind="stable")
            for array in (self.logit_rows, *self.per_row.values()):
                array[:rows] = array[:rows][order]
            for starts in (self.history_start, self.bias_start):
                lengths = np.diff(starts[: rows + 1])[order]
                starts[0] = 0
                np.cumsum(lengths, out=starts[1 : rows + 1])
        return count

    def output(self, rows: int) -> SampleOut:
        """Views of the step's outputs, in the batch's order."""
        out = self.out
        columns = out.token[:rows], out.logprob[:rows], out.top_token[:rows], out.top_logprob[:rows]
        if self.order is not None:
            for column in columns:
                column[self.order] = column.copy()
        token, logprob, top_token, top_logprob = columns
        return SampleOut(token=token, logprob=logprob, top_token=top_token, top_logprob=top_logprob)


_SCREENED = HEADER.index["screened"]
_T, _S, _R, _STEP, _ROW_SEQ, _PAGE_TABLE, _PAGE_STRIDE, _MASK_STRIDE = (
    HEADER.index[n] for n in ("T", "S", "R", "step", "row_seq", "page_table", "page_stride", "mask_stride")
)
_NOT_RECORDED = np.uint64(2**64 - 1)  # -1 as i64


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class CpuProgram:
    """Bound slots, and everything that they point at."""

    slots: Sequence[Slot]
    workspace_bytes: int
    table: U64  # [n, abi.SLOT_WORDS]
    counters: npt.NDArray[np.int64]  # zeroed before each step
    arrays: StepArrays
    screens: bool  # some head is
    calls: Sequence[Call]
    resources: Resources
    held: tuple[npt.NDArray[np.generic], ...]


class CpuKernels:
    """`ports.kernels.Kernels`: `prepare` before anything that needs machine code (compile, run)."""

    def __init__(
        self, team: ThreadTeam, target: Target | None = None, spin_us: float = SPIN_US, *, owns_team: bool = False
    ) -> None:
        self._team = team
        self._owns_team = owns_team
        self.target = target or build.host_target()
        self._spin_us = spin_us
        self._loaded: build.Loaded | None = None
        self._contexts: Contexts | None = None
        self._clock: Clock | None = None
        self._bound: CpuProgram | None = None
        self._definitions: dict[str, Record] = {}
        self._run_slots = 0
        self.choices = registry.Registry()
        """Variants of the kernels for programs that are compiled from now on; any give the same bits."""
        self.recording = True
        """Whether steps leave stamps in the rings; may be changed between steps."""

    @property
    def name(self) -> str:
        return f"cpu-{self.target.name}"

    def prepare(self, progress: Callable[[str, float], None] | None = None) -> None:
        if self._loaded is not None:
            return
        self._loaded = build.load(self.target, progress)
        self._definitions = {d.name: d.args for d in build.definitions(self.target)}
        self._clock = Clock(self._loaded)
        self._contexts = Contexts(self._team.size, self._clock.cycles_per_us(), self._spin_us)
        self._run_slots = self._loaded.address("run_slots")

    @property
    def rings(self) -> Rings:
        """The threads' slot times; `clock` turns cycles into time."""
        assert self._contexts is not None, "prepare first"
        return self._contexts.rings

    @property
    def clock(self) -> Clock:
        assert self._clock is not None, "prepare first"
        return self._clock

    # Layouts

    def buffer_bytes(self, type: BufferType, rows: int) -> int:
        return ActLayout(type.cols).nbytes(rows) if type.kind == "act" else -(-4 * rows * type.cols // 64) * 64

    def packed_bytes(self, spec: WeightSpec) -> int:
        return _vector_bytes(spec) if _is_vector(spec) else pack.packed_bytes(spec, self.target.lanes)

    def row_block(self, spec: WeightSpec) -> int:
        return 1 if _is_vector(spec) else pack.row_block(spec, self.target.lanes)

    def pack_rows(self, spec: WeightSpec, first_row: int, raw: U8, out: U8) -> None:
        if _is_vector(spec):
            assert first_row == 0, (spec, first_row)
            assert raw.shape == (1, row_bytes(spec.dtype, spec.cols)), (spec, raw.shape)
            out[: raw.shape[1]] = raw[0]
        else:
            pack.pack_rows(spec, self.target.lanes, first_row, raw, out)

    def _kv_layout(self, shape: KvShape) -> KvLayout:
        return KvLayout.of(shape, kv_lanes(self.target))

    def kv_page_bytes(self, shape: KvShape) -> int:
        return self._kv_layout(shape).page_bytes

    def copy_page(self, resources: Resources, source: int, target: int) -> None:
        pages = resources.kv.reshape(-1, self.kv_page_bytes(resources.kv_shape))
        pages[target] = pages[source]

    # Programs

    def compile(self, calls: Sequence[Call], resources: Resources) -> Program:
        assert self._loaded is not None, "prepare first"
        for call in calls:
            catalog.check(call, resources)
            for buffer in (*call.inputs, *call.outputs):
                rows = resources.max_tokens if buffer.type.rows == "tokens" else resources.max_logit_rows
                end = buffer.offset + self.buffer_bytes(buffer.type, rows)
                assert end <= resources.activations.size, (buffer, end, resources.activations.size)
        binder = _Binder(self.target, resources, self._kv_layout(resources.kv_shape), self.choices)
        sizes = [binder.workspace_bytes(call) for call in calls]
        workspace = aligned(max(sizes, default=0), 64)
        binder.workspace = _address(workspace)
        slots: list[Slot] = []
        blocks: list[U64] = []
        rows_of_table: list[tuple[int, ...]] = []
        for call in calls:
            bound = binder.bind(call, self._definitions)
            for kernel, block in bound:
                blocks.append(block)
                barrier = call.barrier or len(bound) > 1
                flags = abi.SLOT_BARRIER if barrier else 0
                rows_of_table.append((self._loaded.address(kernel), block.ctypes.data, flags, len(slots)))
                slots.append(Slot(op=call.op, layer=call.layer, kernel=kernel, detail=binder.detail(call)))
        table = np.array(rows_of_table, np.uint64).reshape(-1, abi.SLOT_WORDS)
        if len(table):
            table[-1, 2] = 0  # the team ends the last one
        return CpuProgram(
            slots=slots,
            workspace_bytes=workspace.nbytes,
            table=table,
            counters=aligned(len(slots) * abi.COUNTER_STRIDE, 128).view(np.int64),
            arrays=StepArrays(resources),
            screens=any(call.attrs.get("screen", False) for call in calls),
            calls=tuple(calls),
            resources=resources,
            held=(workspace, *blocks),
        )

    def workspace_of(self, program: Program) -> tuple[int, int]:
        """(address, bytes) of the memory that the program's slots share for intermediate values."""
        assert isinstance(program, CpuProgram)
        workspace = program.held[0]
        return _address(workspace), workspace.nbytes

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        assert isinstance(program, CpuProgram)
        contexts = self._contexts
        assert contexts is not None, "prepare first"
        arrays = program.arrays
        if self._bound is not program:
            contexts.use(program.table, program.counters)
            arrays.bind(contexts.header)
            self._bound = program
        tokens, rows = arrays.fill(contexts.header, batch, program.screens)
        if not self.recording:
            contexts.header[_STEP] = _NOT_RECORDED
        if tokens and len(program.table):
            program.counters.fill(0)
            self._team.run(self._run_slots, contexts.addresses)
        return arrays.output(rows)

    def close(self) -> None:
        """Ends the rings, and the team if it was given away (``owns_team``)."""
        if self._contexts is not None:
            self._contexts.close()
        if self._owns_team:
            self._team.close()
        self._contexts = self._bound = self._loaded = None


def _is_vector(spec: WeightSpec) -> bool:
    """Norms and biases lie plain, whatever the lanes."""
    return spec.rows == 1 and spec.dtype is DType.F32


def _vector_bytes(spec: WeightSpec) -> int:
    return -(-4 * spec.cols // 64) * 64


class _Binder:
    """Turns a call into (kernel, argument block)s: one, but for a screened head."""

    def __init__(self, target: Target, resources: Resources, layout: KvLayout, choices: registry.Registry) -> None:
        self.target, self.resources, self.layout, self.choices = target, resources, layout, choices
        self.workspace = 0
        self._activations = _address(resources.activations)
        positions = [table.shape[0] for table in resources.rope_tables.values()]
        pages = resources.kv.size // layout.page_bytes
        self.sizes = {
            "max_tokens": resources.max_tokens,
            "max_seqs": resources.max_seqs,
            "max_context": min(max(positions, default=1 << 30), max(1, pages * layout.page_tokens)),
        }

    def at(self, buffer: Buffer) -> int:
        return self._activations + buffer.offset

    def weight(self, name: str) -> int:
        return _address(self.resources.weights[name][1])

    def workspace_bytes(self, call: Call) -> int:
        if call.op == "attention":
            return attention.workspace_bytes(
                self.target, **self.sizes, heads=catalog.attr_int(call, "heads"),
                kv_heads=self.layout.kv_heads, head_dim=self.layout.head_dim,
            )  # fmt: skip
        if call.op == "sample":
            return sample.workspace_bytes(self.target, self.resources.max_logit_rows, self.resources.vocab_size)
        return 0

    def bind(self, call: Call, definitions: dict[str, Record]) -> list[tuple[str, U64]]:
        if call.op == "attention":
            return [self._attention(call)]
        if call.op == "sample":
            return [self._sample(call)]
        parts = [getattr(self, f"_{call.op}")(call)]
        if call.attrs.get("screen", False):
            parts += [self._matmul(call, "screen"), self._refine(call)]
        return [(kernel, definitions[kernel].pack(**values)) for kernel, values in parts]

    def detail(self, call: Call) -> str:
        """As "R x 576 -> 49152 Q8_0 output.weight"."""
        types = [b.type for b in (*call.inputs, *call.outputs)]
        rows = "R" if types[-1].rows == "logits" else "T"
        cols = [str(call.inputs[0].type.cols)] if call.inputs else []
        if call.outputs:
            out = call.outputs[0].type
            width = self.resources.weights[call.weights[0]][0].rows if call.op == "matmul" else out.cols
            cols.append(f"{width}{' act' if out.kind == 'act' else ''}")
        names = [f"{self.resources.weights[n][0].dtype.value} {n}" for n in call.weights[:1]]
        return " ".join([f"{rows} x", " -> ".join(cols), *names])

    def _row_wise(self, call: Call) -> dict[str, Number]:
        out = call.outputs[0]
        return {"out": self.at(out), "cols": out.type.cols, "logits": int(out.type.rows == "logits")}

    def _embed(self, call: Call) -> tuple[str, dict[str, Number]]:
        spec, packed = self.resources.weights[call.weights[0]]
        out = call.outputs[0]
        return f"embed_{spec.dtype.value.lower()}{'_split' if spec.screened else ''}", {
            "table": _address(packed),
            "out": self.at(out),
            "cols": out.type.cols,
            "scale": catalog.attr_float(call, "scale", 1.0),
        }

    def _rms_norm(self, call: Call) -> tuple[str, dict[str, Number]]:
        values = self._row_wise(call) | {
            "x": self.at(call.inputs[0]),
            "weight": self.weight(call.weights[0]),
            "eps": catalog.attr_float(call, "eps"),
        }
        return f"rms_norm{_suffix(call)}", values

    def _rms_norm_add(self, call: Call) -> tuple[str, dict[str, Number]]:
        values = self._row_wise(call) | {
            "y": self.at(call.inputs[0]),
            "x": self.at(call.inputs[1]),
            "weight": self.weight(call.weights[0]),
            "eps": catalog.attr_float(call, "eps"),
        }
        return "rms_norm_add", values

    def _quantize(self, call: Call) -> tuple[str, dict[str, Number]]:
        return "quantize", self._row_wise(call) | {"x": self.at(call.inputs[0])}

    def _add(self, call: Call) -> tuple[str, dict[str, Number]]:
        return "add", self._row_wise(call) | {"x": self.at(call.inputs[0]), "y": self.at(call.inputs[1])}

    def _gather(self, call: Call) -> tuple[str, dict[str, Number]]:
        x, out = call.inputs[0], call.outputs[0]
        return "gather", {"x": self.at(x), "out": self.at(out), "cols": out.type.cols}

    def _glu(self, call: Call) -> tuple[str, dict[str, Number]]:
        run = catalog.attr_int(call, "interleave", 0)
        values = self._row_wise(call) | {
            "x": self.at(call.inputs[0]),
            "gate_step": 2 * run or 32,
            "up_offset": run or call.outputs[0].type.cols,
        }
        return f"glu_{call.attrs['act']}{_suffix(call)}", values

    def _matmul(self, call: Call, view: str = "") -> tuple[str, dict[str, Number]]:
        x, out = call.inputs[0], call.outputs[0]
        spec, packed = self.resources.weights[call.weights[0]]
        assert not _is_vector(spec), f"{spec.name}: a matmul weight has more than one row"
        return matmul.bind(
            spec,
            self.target.lanes,
            x=self.at(x),
            x_stride=x.type.cols if x.type.kind == "f32" else 0,
            w=_address(packed),
            out=self.at(out) + 4 * catalog.attr_int(call, "out_col", 0),
            out_stride=out.type.cols,
            bias=self.weight(call.weights[1]) if len(call.weights) > 1 else 0,
            accumulate=bool(call.attrs.get("accumulate", False)),
            logits=out.type.rows == "logits",
            view=view,
            choices=self.choices,
        )

    def _refine(self, call: Call) -> tuple[str, dict[str, Number]]:
        """Logits of the screened rows, once the rough product is there."""
        spec, packed = self.resources.weights[call.weights[0]]
        out = call.outputs[0]
        return screen.refine_head.name, {
            "logits": self.at(out), "stride": out.type.cols, "vocab": self.resources.vocab_size,
            "x": self.at(call.inputs[0]), "w": _address(packed), "cols": spec.cols, "rows": spec.rows,
        }  # fmt: skip

    def _rope_store(self, call: Call) -> tuple[str, dict[str, Number]]:
        table = self.resources.rope_tables[str(call.attrs["rope_table"])]
        assert table.flags.c_contiguous, call
        assert table.dtype == np.float32, call
        layer = catalog.attr_int(call, "layer")
        return f"rope_store{'_norm' if call.weights else ''}{self.layout.element.suffix}", {
            "x": self.at(call.inputs[0]),
            "heads": catalog.attr_int(call, "heads"),
            "kv_heads": self.layout.kv_heads,
            "head_dim": self.layout.head_dim,
            "table": _address(table),
            "pairs": table.shape[1],
            "kv": _address(self.resources.kv) + layer * self.layout.layer_bytes,
            "page_bytes": self.layout.page_bytes,
            "page_tokens": self.layout.page_tokens,
            "q_norm": self.weight(call.weights[0]) if call.weights else 0,
            "k_norm": self.weight(call.weights[1]) if call.weights else 0,
            "eps": catalog.attr_float(call, "eps", 0.0),
        }

    def _attention(self, call: Call) -> tuple[str, U64]:
        out = call.outputs[0]
        return attention.attention_args(
            self.target,
            self.layout,
            qkv=self.at(call.inputs[0]),
            out=self.at(out),
            out_is_act=out.type.kind == "act",
            kv=_address(self.resources.kv),
            workspace=self.workspace,
            layer=catalog.attr_int(call, "layer"),
            heads=catalog.attr_int(call, "heads"),
            scale=catalog.attr_float(call, "scale"),
            window=catalog.attr_int(call, "window", 0),
            choices=self.choices,
            **self.sizes,
        )

    def _sample(self, call: Call) -> tuple[str, U64]:
        logits = call.inputs[0]
        return sample.sample_args(
            self.target,
            logits=self.at(logits),
            logits_stride=logits.type.cols,
            vocab_size=self.resources.vocab_size,
            max_rows=self.resources.max_logit_rows,
            workspace=self.workspace,
        )


def _suffix(call: Call) -> str:
    return "_act" if call.outputs[0].type.kind == "act" else ""
