"""Which tensors each architecture needs, under GGUF's canonical names, and the check of a file against them.

Owns the list of supported architectures and what the readers of both formats must agree on. Does not read files
(gguf.py, safetensors.py) and does not compute (runtime).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import DType, ModelConfig, TensorInfo

SUPPORTED_ARCHS: Final = ("llama", "gemma3", "qwen2", "qwen3")
NORM_DTYPES: Final = (DType.F32, DType.F16, DType.BF16)
MAX_LAYERS: Final = 1024
MAX_DIM: Final = 1 << 24

EOG_TEXTS: Final = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip
"""Tokens that end a generation whatever the metadata says; llama.cpp keeps the same list."""


def required_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor the model cannot run without; shapes are row-major as in TensorInfo."""
    c = config
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "token_embd.weight", (c.vocab_size, c.hidden)
    yield "output_norm.weight", (c.hidden,)
    if not c.tied_head:
        yield "output.weight", (c.vocab_size, c.hidden)
    for layer in range(c.num_layers):
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", (c.hidden,)
        yield blk + "attn_q.weight", (q_rows, c.hidden)
        yield blk + "attn_k.weight", (kv_rows, c.hidden)
        yield blk + "attn_v.weight", (kv_rows, c.hidden)
        yield blk + "attn_output.weight", (c.hidden, q_rows)
        yield blk + "ffn_norm.weight", (c.hidden,)
        yield blk + "ffn_gate.weight", (c.ffn, c.hidden)
        yield blk + "ffn_up.weight", (c.ffn, c.hidden)
        yield blk + "ffn_down.weight", (c.hidden, c.ffn)
        if c.arch == "qwen2":
            yield blk + "attn_q.bias", (q_rows,)
            yield blk + "attn_k.bias", (kv_rows,)
            yield blk + "attn_v.bias", (kv_rows,)
        if c.arch in ("qwen3", "gemma3"):
            yield blk + "attn_q_norm.weight", (c.head_dim,)
            yield blk + "attn_k_norm.weight", (c.head_dim,)
        if c.arch == "gemma3":
            yield blk + "post_attention_norm.weight", (c.hidden,)
            yield blk + "post_ffw_norm.weight", (c.hidden,)


def optional_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors that some files of an architecture have and the model uses when present."""
    c = config
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if c.arch == "llama":
        yield "rope_freqs.weight", (c.rope_dim // 2,)
        for layer in range(c.num_layers):
            blk = f"blk.{layer}."
            yield blk + "attn_q.bias", (q_rows,)
            yield blk + "attn_k.bias", (kv_rows,)
            yield blk + "attn_v.bias", (kv_rows,)
            yield blk + "attn_output.bias", (c.hidden,)


def check_config(config: ModelConfig, where: str) -> None:
    """Raise ModelFileError unless the numbers of ``config`` make a model; ``where`` names the file."""
    c = config
    sizes = {
        "number of layers": (c.num_layers, MAX_LAYERS),
        "hidden size": (c.hidden, MAX_DIM),
        "attention heads": (c.num_heads, 65536),
        "key/value heads": (c.num_kv_heads, 65536),
        "head dimension": (c.head_dim, 65536),
        "feed-forward size": (c.ffn, MAX_DIM),
        "vocabulary size": (c.vocab_size, MAX_DIM),
        "context length": (c.max_context, 1 << 31),
        "rope dimension": (c.rope_dim, c.head_dim),
        "sliding window": (1 if c.sliding_window is None else c.sliding_window, 1 << 31),
        "sliding window pattern": (c.window_pattern, MAX_LAYERS),
    }
    for what, (value, limit) in sizes.items():
        if not 1 <= value <= limit:
            raise ModelFileError(f"{where}: {what} is {value}, expected 1 to {limit}; the file's config is damaged")
    if c.num_heads % c.num_kv_heads:
        raise ModelFileError(
            f"{where}: {c.num_heads} attention heads are no multiple of {c.num_kv_heads} key/value heads"
        )
    if c.rope_dim % 2 or c.head_dim % 2:
        raise ModelFileError(f"{where}: rope dimension {c.rope_dim} and head dimension {c.head_dim} must be even")
    positive = {"norm epsilon": c.norm_eps, "rope base": c.rope_base, "embedding scale": c.embed_scale}
    if c.rope_base_local is not None:
        positive["local rope base"] = c.rope_base_local
    if c.attn_scale is not None:
        positive["attention scale"] = c.attn_scale
    if c.rope_scaling is not None:
        positive["rope scaling factor"] = c.rope_scaling.factor
        positive["rope high-frequency factor"] = c.rope_scaling.high_freq_factor
        positive["rope low-frequency factor"] = c.rope_scaling.low_freq_factor
        positive["rope original context"] = c.rope_scaling.original_context
    for what, number in positive.items():
        if not 0 < number < 1e30:
            raise ModelFileError(f"{where}: {what} is {number}, expected a positive finite number")


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Raise ModelFileError unless every needed tensor is there with its shape, and no tensor is there that the model
    would not use: weights silently ignored mean wrong answers."""
    allowed = dict(optional_tensors(config))
    for name, shape in required_tensors(config):
        allowed[name] = shape
        if name not in tensors:
            raise ModelFileError(f"{where}: tensor {name!r} {list(shape)} is missing; fetch or convert the model again")
    for name, info in tensors.items():
        expected = allowed.get(name)
        if expected is None:
            raise UnsupportedModel(
                f"{where}: tensor {name!r} is not part of the {config.arch} architecture as this engine runs it "
                f"({config.num_layers} layers); using the model without it would give wrong answers"
            )
        if info.shape != expected:
            raise ModelFileError(
                f"{where}: tensor {name!r} has shape {list(info.shape)}, but the config demands {list(expected)}"
            )
        if len(expected) == 1 and info.dtype not in NORM_DTYPES:
            raise UnsupportedModel(
                f"{where}: vector {name!r} is stored as {info.dtype.value}; expected F32, F16 or BF16"
            )


def pattern_of_flags(slides: list[bool], num_layers: int, where: str) -> int:
    """The window pattern that equals one flag per layer; UnsupportedModel when none does. An all-global model has
    no pattern: the caller drops its window before."""
    if num_layers > MAX_LAYERS:  # the lists below would fill the memory
        raise ModelFileError(f"{where}: {num_layers} layers, expected at most {MAX_LAYERS}; the config is damaged")
    for pattern in range(1, num_layers + 2):
        if slides == [pattern == 1 or (layer + 1) % pattern != 0 for layer in range(num_layers)]:
            return pattern
    raise UnsupportedModel(f"{where}: this order of sliding and global layers is not supported")
