"""What a model file holds: a neutral ModelConfig, named tensors in their stored type, tokeniser metadata."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt


class DType(StrEnum):
    """Storage types we run. Values are the names GGUF tools print."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ4_NL = "IQ4_NL"


BLOCK: dict[DType, tuple[int, int]] = {
    DType.F32: (1, 4),
    DType.F16: (1, 2),
    DType.BF16: (1, 2),
    DType.Q4_0: (32, 18),
    DType.Q4_1: (32, 20),
    DType.Q5_0: (32, 22),
    DType.Q5_1: (32, 24),
    DType.Q8_0: (32, 34),
    DType.Q3_K: (256, 110),
    DType.Q4_K: (256, 144),
    DType.Q5_K: (256, 176),
    DType.Q6_K: (256, 210),
    DType.IQ4_NL: (32, 18),
}
"""Elements and bytes of one block, as ggml lays it out along a row."""


SCALE_OFFSETS: dict[DType, tuple[int, ...]] = {
    DType.Q4_0: (0,),
    DType.Q4_1: (0, 2),
    DType.Q5_0: (0,),
    DType.Q5_1: (0, 2),
    DType.Q8_0: (0,),
    DType.Q3_K: (108,),
    DType.Q4_K: (0, 2),
    DType.Q5_K: (0, 2),
    DType.Q6_K: (208,),
    DType.IQ4_NL: (0,),
}
"""Byte offsets of the float16 scales and mins in a block of a quantised type."""


def row_bytes(dtype: DType, cols: int) -> int:
    """Bytes of one row of ``cols`` elements; ``cols`` must be whole blocks."""
    elements, size = BLOCK[dtype]
    assert cols % elements == 0, (dtype, cols)
    return cols // elements * size


class TensorInfo(msgspec.Struct, frozen=True):
    """``shape`` is row-major: (rows, cols) for a matrix that maps cols inputs to rows outputs, (n,) for a vector."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Linear divides positions by ``factor``; llama3 is the by-frequency rule of Llama 3.1 (Meta, 2024)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture-neutral numbers. Readers fill it from GGUF metadata or config.json; models are built from it.

    Tensor names are GGUF's canonical ones ("token_embd.weight", "blk.3.attn_q.weight", ...), whatever the file.
    """

    arch: str  # "llama" (also Mistral, TinyLlama, SmolLM2), "gemma3", "qwen2", "qwen3"
    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope_base: float
    rope_dim: int  # leading dims of a head that rotate; the whole head in every model we run
    rope_interleaved: bool  # q/k rows of the file pair (0,1),(2,3).. (GGUF llama) instead of (i, i + dim/2)
    rope_scaling: RopeScaling | None = None
    rope_base_local: float | None = None  # Gemma 3's sliding layers
    sliding_window: int | None = None
    window_pattern: int = 1  # every window_pattern-th layer is global; 1: with a window, all layers slide
    attn_scale: float | None = None  # None: head_dim ** -0.5
    embed_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights: 1.0 for Gemma safetensors, 0 for GGUF (already folded in)
    tied_head: bool = False

    def is_global(self, layer: int) -> bool:
        """Whether this layer attends to the whole context."""
        if self.sliding_window is None:
            return True
        return self.window_pattern > 1 and (layer + 1) % self.window_pattern == 0


class TokenizerData(msgspec.Struct, kw_only=True):
    """Everything text needs from the file; plain values so that it can cross to the gateway or be cached.

    Either ``tokenizer_json`` is set (Hugging Face's file), or the GGUF lists are.
    """

    kind: Literal["gpt2", "llama", "json"]  # byte-level BPE, SentencePiece, tokenizer.json
    pre: str = ""  # GGUF pre-tokeniser name
    tokens: list[str] = []
    scores: list[float] = []
    token_types: list[int] = []  # ggml: 1 normal 2 unknown 3 control 4 user-defined 5 unused 6 byte
    merges: list[str] = []
    tokenizer_json: str = ""
    bos_id: int | None = None
    eos_ids: list[int] = []  # all tokens that end a generation: eos, eot, generation_config's list
    pad_id: int | None = None
    unk_id: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = True
    chat_template: str = ""
    defaults: dict[str, float] = {}  # generation_config: temperature, top_p, top_k ... where the file states them


class ModelFile(Protocol):
    """Implementations: data.gguf.GgufFile, data.safetensors.SafetensorsDir, testing.RandomModel."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's own key/value metadata, for `inspect`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        ...

    def tokenizer(self) -> TokenizerData: ...

    def read(self, name: str, row_start: int = 0, row_end: int | None = None) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor's rows (a view of the mapped file where possible), shape (rows, row_bytes);
        a vector is one row."""
        ...

    def drop(self, name: str) -> None:
        """Tell the system that this tensor's file pages are not needed any more."""
        ...

    def close(self) -> None: ...
