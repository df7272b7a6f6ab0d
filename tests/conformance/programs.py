"""A small model written as Calls, to run on any implementation of the kernels port.

Owns the list of calls of a llama-like decoder, where its buffers lie, and the arrays of a step. It stands in for the
runtime, which these tests must not need: pages are handed out from a shuffled list, nothing is fused or reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu.formats import QUANTISED
from ai_engine.ports.kernels import (
    Attr,
    Buffer,
    BufferKind,
    BufferType,
    Call,
    Kernels,
    KvShape,
    Resources,
    RowDim,
    SampleBatch,
    SampleOut,
    StepBatch,
    WeightSpec,
)
from ai_engine.ports.model import DType
from tests.golden.reference import Config, Reference, config_from_gguf
from tests.golden.tiny_gguf import metadata_from_hf, quantize, random_hf, tensors_from_hf

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
TypeRule = Callable[[str], DType]


def aligned(nbytes: int, fill: int = 0) -> U8:
    """Zeroed (or filled) bytes at a multiple of 64, with 64 to spare."""
    raw = np.full(nbytes + 128, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def sampling(rows: int, vocab: int, **fields: Any) -> SampleBatch:
    """Greedy without logprobs for ``rows`` rows; ``fields`` replace arrays (a scalar fills the row)."""
    i32, f32 = np.int32, np.float32
    values: dict[str, Any] = {
        "temperature": np.zeros(rows, f32),
        "top_k": np.zeros(rows, i32),
        "top_p": np.ones(rows, f32),
        "min_p": np.zeros(rows, f32),
        "repetition": np.ones(rows, f32),
        "presence": np.zeros(rows, f32),
        "frequency": np.zeros(rows, f32),
        "seed": np.arange(rows, dtype=np.uint64),
        "position": np.zeros(rows, i32),
        "forced": np.full(rows, -1, i32),
        "num_top": np.full(rows, -1, i32),
        "history_start": np.zeros(rows + 1, i32),
        "history_token": np.zeros(0, i32),
        "history_count": np.zeros(0, i32),
        "bias_start": np.zeros(rows + 1, i32),
        "bias_token": np.zeros(0, i32),
        "bias_value": np.zeros(0, f32),
        "mask_row": np.full(rows, -1, i32),
        "masks": np.zeros((0, (vocab + 31) // 32), np.uint32),
    }
    for name, value in fields.items():
        array = np.asarray(value, dtype=values[name].dtype)
        values[name] = np.full(rows, array) if array.ndim == 0 else array
    return SampleBatch(**values)


@dataclass
class Model:
    """A decoder's numbers and float weights under GGUF's names, with q and k rows for half-split rope."""

    config: Config
    tensors: Mapping[str, F32]
    ffn: int
    vocab: int
    max_context: int

    @staticmethod
    def random(architecture: str, seed: int = 0, **sizes: Any) -> Model:
        """`tiny_gguf.random_hf`'s model."""
        hf, state = random_hf(architecture, seed, **sizes)
        config = config_from_gguf(metadata_from_hf(hf))
        tensors = dict(tensors_from_hf(hf, state))
        if config.rope_interleaved:
            for name, value in tensors.items():
                if name.endswith(("attn_q.weight", "attn_k.weight")):
                    pairs = value.reshape(-1, config.head_dim // 2, 2, config.hidden)
                    tensors[name] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
            config = Config(**{**config.__dict__, "rope_interleaved": False})
        return Model(config, tensors, int(hf["intermediate_size"]), int(hf["vocab_size"]), 512)

    def reference(self) -> Reference:
        """The float64 forward of these weights."""
        return Reference(self.config, self.tensors)

    def rope_table(self, base: float) -> F32:
        half = self.config.head_dim // 2
        frequency = base ** (-np.arange(half, dtype=np.float64) / half)
        angle = np.arange(self.max_context)[:, None] * frequency
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@dataclass
class Session:
    """A model bound to one implementation: `step` runs one batch."""

    kernels: Kernels
    model: Model
    types: TypeRule
    max_tokens: int = 64
    max_seqs: int = 8
    page_tokens: int = 32
    kv_type: Literal["f16", "int8"] = "f16"
    pages: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)
    _weights: dict[str, tuple[WeightSpec, U8]] = field(default_factory=dict)
    _end: int = 0

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        kv_shape = KvShape(
            num_layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_tokens=self.page_tokens,
            dtype=self.kv_type,
        )
        self._page_bytes = self.kernels.kv_page_bytes(kv_shape)
        self._pages_per_seq = -(-model.max_context // self.page_tokens)
        num_pages = self.max_seqs * self._pages_per_seq
        self._free = [int(p) for p in np.random.default_rng(0).permutation(num_pages)]
        self._build()
        self.resources = Resources(
            weights=self._weights,
            rope_tables={
                "global": model.rope_table(config.rope_base),
                "local": model.rope_table(config.rope_base_local),
            },
            kv=aligned(
                num_pages * self._page_bytes, fill=0xFF
            ),  # NaNs (f16, or of int8 the scales): whoever reads a stale key shows it
            kv_shape=kv_shape,
            activations=aligned(self._end),
            max_tokens=self.max_tokens,
            max_seqs=self.max_seqs,
            max_logit_rows=self.max_tokens,
            vocab_size=model.vocab,
        )
        self.program = self.kernels.compile(self._calls, self.resources)

    @property
    def config(self) -> Config:
        return self.model.config

    # The program

    def _buffer(self, name: str, cols: int, kind: BufferKind = "f32", rows: RowDim = "tokens") -> Buffer:
        type = BufferType(kind, cols, rows)
        buffer = Buffer(name, type, self._end)
        self._end += -(-self.kernels.buffer_bytes(type, self.max_tokens) // 64) * 64
        return buffer

    def _weight(self, name: str, values: F32, dtype: DType) -> str:
        """Pack a weight, in several pieces."""
        raw = quantize(values, dtype.value)
        spec = WeightSpec(name=name, dtype=dtype, rows=raw.shape[0], cols=np.atleast_2d(values).shape[1])
        packed = aligned(self.kernels.packed_bytes(spec))
        block = self.kernels.row_block(spec)
        piece = block * max(1, 24 // block)
        for first in range(0, spec.rows, piece):
            self.kernels.pack_rows(spec, first, raw[first : first + piece], packed)
        self._weights[name] = (spec, packed)
        return name

    def _matrix(self, name: str, values: F32 | None = None) -> str:
        if name in self._weights:
            return name
        return self._weight(name, self.model.tensors[name] if values is None else values, self.types(name))

    def _vector(self, name: str) -> str:
        return self._weight(name, np.atleast_2d(self.model.tensors[name]), DType.F32)

    def _kind(self, weight: str) -> BufferKind:
        return "act" if self._weights[weight][0].dtype in QUANTISED else "f32"

    def _call(
        self,
        op: str,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        weights: Sequence[str] = (),
        layer: int = -1,
        **attrs: Attr,
    ) -> None:
        if op in ("rope_store", "attention"):
            attrs["layer"] = layer
        self._calls.append(
            Call(op=op, inputs=tuple(inputs), outputs=tuple(outputs), weights=tuple(weights), attrs=attrs, layer=layer)
        )

    def _inputs(self, source: Buffer, weights: Sequence[str], make: Callable[[Buffer], None]) -> dict[str, Buffer]:
        """The buffer that each weight reads: ``make`` writes one of each kind that is needed."""
        made: dict[str, Buffer] = {}
        for kind in {self._kind(w) for w in weights}:
            made[kind] = self._buffer(f"{source.name}.{kind}", source.type.cols, kind, source.type.rows)
            make(made[kind])
        return {w: made[self._kind(w)] for w in weights}

    def _build(self) -> None:
        c, gemma = self.config, self.config.architecture == "gemma3"
        heads, kv_heads, hd, d = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden
        x, y = self._buffer("x", d), self._buffer("y", d)
        qkv = self._buffer("qkv", (heads + 2 * kv_heads) * hd)
        gate_up = self._buffer("gate_up", 2 * self.model.ffn)
        table = self._matrix("token_embd.weight")
        self._call("embed", [], [x], [table], scale=float(d) ** 0.5 if gemma else 1.0)
        for layer in range(c.num_layers):
            block = f"blk.{layer}."
            local = c.is_local(layer)
            shape: dict[str, Attr] = {"heads": heads, "kv_heads": kv_heads, "head_dim": hd}

            def norm(name: str, source: Buffer = x, layer: int = layer) -> Callable[[Buffer], None]:
                weight = self._vector(name)
                return lambda to: self._call("rms_norm", [source], [to], [weight], layer, eps=c.norm_eps)

            def close(out: str, source: Buffer, post: str, layer: int = layer) -> None:
                """Back into the residual: accumulate, or a norm of its own (Gemma)."""
                if gemma:
                    self._call("matmul", [source], [y], [out], layer)
                    self._call("rms_norm_add", [y, x], [x], [self._vector(post)], layer, eps=c.norm_eps)
                else:
                    self._call("matmul", [source], [x], [out], layer, accumulate=True)

            projections = [self._matrix(f"{block}attn_{name}.weight") for name in "qkv"]
            read = self._inputs(x, projections, norm(f"{block}attn_norm.weight"))
            column = 0
            for weight in projections:
                bias = weight.replace("weight", "bias")
                more = [self._vector(bias)] if bias in self.model.tensors else []
                self._call("matmul", [read[weight]], [qkv], [weight, *more], layer, out_col=column)
                column += self._weights[weight][0].rows
            norms = [n for n in (f"{block}attn_q_norm.weight", f"{block}attn_k_norm.weight") if n in self.model.tensors]
            self._call(
                "rope_store",
                [qkv],
                [qkv],
                [self._vector(n) for n in norms],
                layer,
                **shape,
                rope_table="local" if gemma and local else "global",
                eps=c.norm_eps,
            )
            out = self._matrix(f"{block}attn_output.weight")
            scale = c.query_scale if c.query_scale is not None else hd**-0.5
            mixed = self._buffer("mixed", heads * hd, self._kind(out))
            window = c.window if local and c.window is not None else 0
            self._call("attention", [qkv], [mixed], [], layer, **shape, scale=scale, window=window)
            close(out, mixed, f"{block}post_attention_norm.weight")

            run = 32 if self.model.ffn % 32 == 0 else self.model.ffn
            pair = [self.model.tensors[f"{block}ffn_{n}.weight"].reshape(-1, run, d) for n in ("gate", "up")]
            gate = self._matrix(f"{block}ffn_gate.weight", np.stack(pair, axis=1).reshape(-1, d))
            down = self._matrix(f"{block}ffn_down.weight")
            read = self._inputs(x, [gate], norm(f"{block}ffn_norm.weight"))
            self._call("matmul", [read[gate]], [gate_up], [gate], layer)
            f = self._buffer("f", self.model.ffn, self._kind(down))
            act = "gelu_tanh" if gemma else "silu"
            self._call("glu", [gate_up], [f], [], layer, act=act, interleave=32 if run == 32 else 0)
            close(down, f, f"{block}post_ffw_norm.weight")
        last = self._buffer("last", d, rows="logits")
        self._call("gather", [x], [last])
        head = self._matrix("output.weight") if "output.weight" in self.model.tensors else table
        final = self._vector("output_norm.weight")
        normed = self._buffer("normed", d, self._kind(head), "logits")
        self._call("rms_norm", [last], [normed], [final], eps=c.norm_eps)
        logits = self._buffer("logits", self.model.vocab, rows="logits")
        self._call("matmul", [normed], [logits], [head])
        self._call("sample", [logits], [])

    # A step

    def step(self, work: Mapping[int, Sequence[int]], logits: str = "last", **fields: Any) -> SampleOut:
        """Append tokens to sequences and sample after the last of each ("last"), after every token ("all") or not at
        all ("none"). ``fields`` as for `sampling`."""
        token_ids: list[int] = []
        positions: list[int] = []
        seq_start, rows = [0], list[int]()
        page_table = np.full((len(work), self._pages_per_seq), -1, np.int32)
        for s, (sequence, tokens) in enumerate(work.items()):
            before = self.lengths.get(sequence, 0)
            self.lengths[sequence] = before + len(tokens)
            held = self.pages.setdefault(sequence, [])
            while len(held) * self.page_tokens < self.lengths[sequence]:
                held.append(self._free.pop())
            page_table[s, : len(held)] = held
            positions += range(before, before + len(tokens))
            token_ids += tokens
            seq_start.append(len(token_ids))
            rows += {"last": [len(token_ids) - 1], "all": range(seq_start[-2], seq_start[-1]), "none": []}[logits]
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            seq_start=np.array(seq_start, np.int32),
            context_len=np.array([self.lengths[s] for s in work], np.int32),
            page_table=page_table,
            logit_rows=np.array(rows, np.int32),
            sample=sampling(len(rows), self.model.vocab, **fields),
        )
        return self.kernels.run(self.program, batch)


def copied(out: SampleOut) -> SampleOut:
    """The arrays of a step, safe from the next one."""
    return SampleOut(
        token=out.token.copy(),
        logprob=out.logprob.copy(),
        top_token=out.top_token.copy(),
        top_logprob=out.top_logprob.copy(),
    )
