"""The vocabulary that model files build graphs with: one method per idea, canonical tensor names, no fusion.

Owns the naming of tensors inside a layer, the declaration of weights, and the parts that all supported models share
(qkv and attention, the gated feed-forward, the head). What differs between models is in their own files.
"""

from __future__ import annotations

from collections.abc import Mapping

from ai_engine.ports.errors import ModelFileError
from ai_engine.ports.kernels import Attr, BufferType
from ai_engine.ports.model import DType, ModelConfig, TensorInfo
from ai_engine.runtime.ir import Graph, Op, Part, Value, Weight


class ModelBuilder:
    """Collects ops. Inside a layer (``layer`` >= 0) short names such as "attn_q" mean "blk.<layer>.attn_q"."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
        self.config, self.layer = config, -1
        self._tensors = tensors
        self._weights: dict[str, Weight] = {}
        self._ops: list[Op] = []

    def graph(self) -> Graph:
        return Graph(self.config.arch, self._weights, tuple(self._ops))

    # --- weights

    def has(self, name: str) -> bool:
        return self._full(name) in self._tensors

    def _full(self, name: str) -> str:
        return name if self.layer < 0 else f"blk.{self.layer}.{name}"

    def _info(self, name: str, dims: int) -> TensorInfo:
        info = self._tensors.get(self._full(name))
        if info is None or len(info.shape) != dims:
            found = "missing" if info is None else f"of shape {list(info.shape)}"
            raise ModelFileError(
                f"tensor {self._full(name)!r} is {found}, expected {dims} dimensions; fetch the model again"
            )
        return info

    def matrix(self, name: str, rope_head_dim: int = 0) -> str:
        """Declare ``<name>.weight`` [rows, cols] (once) and return its name."""
        info = self._info(name + ".weight", 2)
        rows, cols = info.shape
        self._weights[info.name] = Weight(info.name, info.dtype, rows, cols, (Part(info.name, rows, rope_head_dim),))
        return info.name

    def vector(self, name: str, *, offset: float = 0.0, rope_head_dim: int = 0) -> str:
        """Declare a vector; packed as F32 whatever its stored type."""
        info = self._info(name, 1)
        part = Part(info.name, info.shape[0], rope_head_dim)
        self._weights[info.name] = Weight(info.name, DType.F32, 1, info.shape[0], (part,), 0, offset)
        return info.name

    def norm_weight(self, name: str) -> str:
        return self.vector(name + ".weight", offset=self.config.norm_offset)

    # --- ops

    def op(
        self,
        name: str,
        *operands: Value,
        cols: int,
        weights: tuple[str, ...] = (),
        attrs: dict[str, Attr] | None = None,
    ) -> Value:
        rows = operands[0].type.rows if operands else "tokens"
        result = Value(len(self._ops), BufferType("f32", cols, rows))
        self._ops.append(Op(name, operands, result, weights, attrs or {}, self.layer))
        return result

    def embed(self) -> Value:
        table = self.matrix("token_embd")
        return self.op("embed", cols=self.config.hidden, weights=(table,), attrs={"scale": self.config.embed_scale})

    def norm(self, x: Value, name: str) -> Value:
        return self.op(
            "rms_norm", x, cols=x.type.cols, weights=(self.norm_weight(name),), attrs={"eps": self.config.norm_eps}
        )

    def linear(self, x: Value, name: str, rope_head_dim: int = 0) -> Value:
        """x W^T, plus the bias where the file has one."""
        weight = self.matrix(name, rope_head_dim)
        bias = (self.vector(name + ".bias", rope_head_dim=rope_head_dim),) if self.has(name + ".bias") else ()
        return self.op(
            "matmul", x, cols=self._weights[weight].rows, weights=(weight, *bias), attrs={"accumulate": False}
        )

    def add(self, x: Value, y: Value) -> Value:
        return self.op("add", x, y, cols=x.type.cols)

    # --- what all models share

    def attention(self, x: Value, *, qk_norm: bool, rope_table: str = "rope") -> Value:
        """Projections, rotation, softmax over the context (or the layer's window), output projection."""
        c = self.config
        turn = c.head_dim if c.rope_interleaved else 0
        q, k, v = self.linear(x, "attn_q", turn), self.linear(x, "attn_k", turn), self.linear(x, "attn_v")
        heads: dict[str, Attr] = {"heads": c.num_heads, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        qkv = self.op("concat", q, k, v, cols=width)
        norms = (self.norm_weight("attn_q_norm"), self.norm_weight("attn_k_norm")) if qk_norm else ()
        qkv = self.op(
            "rope_store", qkv, cols=width, weights=norms, attrs={**heads, "rope_table": rope_table, "eps": c.norm_eps}
        )
        window = 0 if c.is_global(self.layer) else c.sliding_window or 0
        scale = c.attn_scale if c.attn_scale is not None else float(c.head_dim) ** -0.5
        out = self.op(
            "attention", qkv, cols=c.num_heads * c.head_dim, attrs={**heads, "scale": scale, "window": window}
        )
        return self.linear(out, "attn_output")

    def feed_forward(self, x: Value, act: str) -> Value:
        """down(act(gate x) * up x)."""
        gate, up = self.linear(x, "ffn_gate"), self.linear(x, "ffn_up")
        both = self.op("concat", gate, up, cols=2 * self.config.ffn)
        return self.linear(self.op("glu", both, cols=self.config.ffn, attrs={"act": act, "interleave": 0}), "ffn_down")

    def head(self, x: Value) -> Graph:
        """Final norm, logits and sampling of the rows that are kept; ends the graph."""
        self.layer = -1
        kept = Value(len(self._ops), BufferType("f32", x.type.cols, "logits"))
        self._ops.append(Op("gather", (x,), kept))
        table = "token_embd" if self.config.tied_head else "output"
        logits = self.linear(self.norm(kept, "output_norm"), table)
        self._ops.append(Op("sample", (logits,)))
        return self.graph()

    def pre_norm_layers(self, *, qk_norm: bool = False, act: str = "silu") -> Graph:
        """The plain decoder: x += attention(norm(x)); x += feed_forward(norm(x))."""
        x = self.embed()
        for layer in range(self.config.num_layers):
            self.layer = layer
            x = self.add(x, self.attention(self.norm(x, "attn_norm"), qk_norm=qk_norm))
            x = self.add(x, self.feed_forward(self.norm(x, "ffn_norm"), act))
        return self.head(x)
