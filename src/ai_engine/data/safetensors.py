"""Reader of Hugging Face model folders: config.json, *.safetensors (one or sharded), tokenizer.json.

Owns the safetensors format, the two styles of config.json (transformers 4 and 5) and the translation of names to GGUF's
canonical ones. Does not know which tensors an architecture needs (shapes.py). Pickle files are never read. Every byte
is untrusted: whatever is wrong ends in a ModelFileError that names file, place and remedy.

Source of the format: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ai_engine.data.mapped import MappedFile
from ai_engine.data.shapes import EOG_TEXTS, check_config, check_tensors, pattern_of_flags
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import DType, ModelConfig, RopeScaling, TensorInfo, TokenizerData

T = TypeVar("T", int, float, str, bool)

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its text part
}
_DTYPES: Final = {"F32": (DType.F32, 4), "F16": (DType.F16, 2), "BF16": (DType.BF16, 2)}
MAX_HEADER_BYTES: Final = 32 << 20
MAX_JSON_BYTES: Final = 96 << 20
MAX_PARTS: Final = 1000

_GEMMA3_DEFAULTS: Final[dict[str, Any]] = {  # what Gemma3TextConfig means when a config leaves it out
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_TOP: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_GEMMA3_LAYER: Final = _IN_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER: Final = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.(.+)\.(weight|bias)")
_LANGUAGE: Final = re.compile(r"(?:model\.language_model\.|language_model\.model\.)(.*)|language_model\.(lm_head\..*)")
_NOT_TEXT: Final = re.compile(
    r".*(rotary_emb\.inv_freq|\.masked_bias)|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


def canonical_name(name: str, arch: str) -> str | None:
    """GGUF's name for a Hugging Face tensor; None for one that text models do not use; unknown names unchanged."""
    if _NOT_TEXT.fullmatch(name):
        return None
    inner = _LANGUAGE.fullmatch(name)
    if inner:
        name = inner[2] or f"model.{inner[1]}"
    layer = _LAYER.fullmatch(name)
    if layer:
        short = (_IN_GEMMA3_LAYER if arch == "gemma3" else _IN_LAYER).get(layer[2])
        return f"blk.{layer[1]}.{short}.{layer[3]}" if short else name
    return _TOP.get(name, name)


class _Shard:
    """One safetensors file: tensors under their own names, with byte offsets in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path, min_bytes=10)
        try:
            self.tensors = dict(self._parse())
        except BaseException:
            self.file.close()
            raise

    def _parse(self) -> Iterator[tuple[str, tuple[TensorInfo, int]]]:
        (length,) = struct.unpack_from("<Q", self.file.map)
        if length > min(MAX_HEADER_BYTES, self.file.size - 8):
            raise self.error(0, f"claims a header of {length} bytes, the file has {self.file.size}")
        header = _parse_json(bytes(self.file.map[8 : 8 + length]), f"{self.path}: header (byte 8)")
        base, free_from, previous = 8 + length, 0, ""
        entries = [(name, *self._entry(name, value)) for name, value in header.items() if name != "__metadata__"]
        for name, dtype, shape, start, end in sorted(entries, key=lambda entry: entry[3:]):
            stored, itemsize = _DTYPES[dtype]
            if start < free_from:
                raise self.error(base + start, f"tensor {name!r} overlaps {previous!r}")
            if base + end > self.file.size:
                raise self.error(base + start, f"tensor {name!r} ends at {base + end}, the file has {self.file.size}")
            if end - start != math.prod(shape) * itemsize:
                raise self.error(base + start, f"tensor {name!r} {list(shape)} {dtype} has {end - start} bytes")
            free_from, previous = end, name
            yield name, (TensorInfo(name, stored, shape, end - start), base + start)

    def _entry(self, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
        """dtype, shape, start and end of one header entry."""
        try:
            dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
            sizes = [start, end, *shape]
        except (TypeError, KeyError, ValueError):
            raise self.error(8, f"tensor {name!r} is described as {str(value)[:100]!r}") from None
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes) or start > end:
            raise self.error(8, f"tensor {name!r} has shape {shape!r:.100} and offsets {start!r:.30}, {end!r:.30}")
        if not 1 <= len(shape) <= 4 or 0 in shape:
            raise self.error(8, f"tensor {name!r} has shape {shape!r:.100}, expected one to four positive dimensions")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name!r} has type {dtype!r:.30}; supported: F32, F16, BF16")
        return dtype, tuple(shape), start, end

    def error(self, at: int, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: byte {at}: {problem}; the file is damaged, fetch it again")


class SafetensorsDir:
    """A model folder, checked in full when opened. Implements ports.model.ModelFile; norms are stored as offsets from
    one for Gemma (``config.norm_offset``). Raises ModelFileError, UnsupportedModel."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        raw = _read_json(self.path / "config.json")
        self._raw = raw
        self._settings = _Settings(self.path / "config.json", raw)
        self._config = self._settings.config(self.path.resolve().name)
        check_config(self._config, str(self._settings.path))
        self._shards: list[_Shard] = []
        self._where: dict[str, tuple[_Shard, TensorInfo, int]] = {}
        try:
            self._shards.extend(_Shard(path) for path in _shard_paths(self.path))
            self._collect()
            check_tensors(self._config, self._tensors, str(self.path))
        except BaseException:
            self.close()
            raise

    def _collect(self) -> None:
        for shard in self._shards:
            for own, (info, offset) in shard.tensors.items():
                name = canonical_name(own, self._config.arch)
                if name is None or (name == "output.weight" and self._config.tied_head):
                    continue
                if name in self._where:
                    raise ModelFileError(f"{shard.path}: tensor {own!r} is also in {self._where[name][0].path.name}")
                self._where[name] = shard, TensorInfo(name, info.dtype, info.shape, info.nbytes), offset
        self._tensors = MappingProxyType({name: info for name, (_, info, _) in self._where.items()})

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        return MappingProxyType(self._raw)

    @property
    def nbytes(self) -> int:
        return sum(shard.file.size for shard in self._shards)

    def tokenizer(self) -> TokenizerData:
        """Raises ModelFileError for a damaged tokenizer.json, UnsupportedModel when there is only another kind."""
        return _tokenizer(self.path, self._settings, self._config.vocab_size)

    def read(self, name: str, row_start: int = 0, row_end: int | None = None) -> npt.NDArray[np.uint8]:
        shard, info, offset = self._where[name]
        rows = math.prod(info.shape[:-1])
        row_nbytes = info.nbytes // rows
        row_end = rows if row_end is None else row_end
        assert 0 <= row_start <= row_end <= rows, (name, row_start, row_end, rows)
        view = shard.file.view(offset + row_start * row_nbytes, (row_end - row_start) * row_nbytes)
        return view.reshape(row_end - row_start, row_nbytes)

    def drop(self, name: str) -> None:
        shard, info, offset = self._where[name]
        shard.file.drop(offset, info.nbytes)

    def close(self) -> None:
        for shard in self._shards:
            shard.file.close()


def _shard_paths(folder: Path) -> list[Path]:
    """The weight files: those that the index names, else every *.safetensors of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelFileError(f"{index}: has no weight_map; fetch the model again")
        files = {str(name) for name in names.values()}
        bad = [name for name in files if not re.fullmatch(r"[\w][\w.-]*\.safetensors", name)]
        if bad or len(files) > MAX_PARTS:
            raise ModelFileError(
                f"{index}: names the weight file {bad[0]!r:.100}" if bad else f"{index}: too many parts"
            )
        return [folder / name for name in sorted(files)]
    single = folder / "model.safetensors"
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if found:
        return found[:MAX_PARTS]
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    if pickles:
        raise ModelFileError(
            f"{folder}: {pickles[0]}: pickle files are never read (they can run code); convert to safetensors"
        )
    raise ModelFileError(f"{folder}: has no .safetensors file; fetch the model again")


def _read_json(path: Path) -> dict[str, Any]:
    return _parse_json(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    """All of a small file. A pipe or a device is refused: reading one may never end."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ModelFileError(f"{path}: is not a regular file; fetch the model again")
        if info.st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: is longer than {MAX_JSON_BYTES} bytes; fetch it again")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}; fetch the model again") from error


def _parse_json(content: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a key is repeated")
        return out

    try:
        value = json.loads(content.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: is not valid JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: is a JSON {type(value).__name__}, expected an object; fetch it again")
    return value


class _Settings:
    """Typed access to config.json, and its translation."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else raw.get("model_type")
        arch = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if arch is None:
            raise UnsupportedModel(
                f"{path}: architecture {name!r:.60} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        self.arch, self.mistral = arch, name == "MistralForCausalLM"
        text = raw.get("text_config") if name == "Gemma3ForConditionalGeneration" else raw
        if not isinstance(text, dict):
            raise ModelFileError(f"{path}: 'text_config' is missing; fetch the model again")
        known = {key: value for key, value in text.items() if value is not None}
        self.raw = _GEMMA3_DEFAULTS | known if arch == "gemma3" else known
        if name == "Gemma3ForConditionalGeneration" and isinstance(raw.get("tie_word_embeddings"), bool):
            self.raw.setdefault("tie_word_embeddings", raw["tie_word_embeddings"])
        for key in ("quantization_config", "compression_config"):
            if raw.get(key) is not None or self.raw.get(key) is not None:
                raise UnsupportedModel(
                    f"{path}: {key}: quantised safetensors are not supported; use a GGUF of the model"
                )

    def get(self, key: str, kind: type[T], default: T | None = None, *, of: Mapping[str, Any] | None = None) -> T:
        """The value under ``key``; without a default its absence is an error."""
        value: Any = (self.raw if of is None else of).get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: {key!r} is missing; fetch the model again")
        if kind is float and type(value) is int and abs(value) < 1 << 62:
            value = float(value)
        if type(value) is not kind:
            raise ModelFileError(f"{self.path}: {key!r} is a {type(value).__name__}, expected {kind.__name__}")
        return value

    def config(self, folder_name: str) -> ModelConfig:
        gemma = self.arch == "gemma3"
        self.refuse_extras()
        hidden, heads = self.get("hidden_size", int), self.get("num_attention_heads", int)
        if "head_dim" not in self.raw and (heads < 1 or hidden % heads):
            raise ModelFileError(f"{self.path}: {heads} attention heads do not divide {hidden} hidden units")
        head_dim = self.get("head_dim", int, hidden // heads if "head_dim" not in self.raw else None)
        layers = self.get("num_hidden_layers", int)
        window, pattern = self.window(layers)
        rope, local = self.rope_parameters()
        scalar = self.get("query_pre_attn_scalar", float) if gemma else 1.0
        if not 0 < scalar < 1e30:
            raise ModelFileError(f"{self.path}: query_pre_attn_scalar is {scalar}, expected a positive number")
        return ModelConfig(
            arch=self.arch,
            name=folder_name,
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=self.get("num_key_value_heads", int, heads),
            head_dim=head_dim,
            ffn=self.get("intermediate_size", int),
            vocab_size=self.get("vocab_size", int),
            max_context=self.get("max_position_embeddings", int),
            norm_eps=self.get("rms_norm_eps", float, 1e-6),
            rope_base=self.get("rope_theta", float, 10000.0, of=rope),
            rope_dim=self.rope_dim(rope, head_dim),
            rope_interleaved=False,
            rope_scaling=self.rope_scaling(rope),
            rope_base_local=self.get("rope_theta", float, of=local) if gemma else None,
            sliding_window=window,
            window_pattern=pattern,
            attn_scale=scalar**-0.5 if gemma else None,
            embed_scale=math.sqrt(max(hidden, 0)) if gemma else 1.0,
            norm_offset=1.0 if gemma else 0.0,
            tied_head=self.get("tie_word_embeddings", bool, gemma),
        )

    def refuse_extras(self) -> None:
        """Settings that would change the answer and that we do not compute."""
        gemma = self.arch == "gemma3"
        key, expected = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
        if self.raw.get(key, expected) != expected:
            raise UnsupportedModel(
                f"{self.path}: {key} = {self.raw[key]!r:.40} is not supported; expected {expected!r}"
            )
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if self.raw.get(key):
                raise UnsupportedModel(f"{self.path}: {key} = {self.raw[key]!r:.40} is not supported")

    def rope_parameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rope settings of global and of sliding layers, from transformers 5's `rope_parameters` (one for all or one
        per layer type) or from 4's `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
        given = self.raw.get("rope_parameters")
        if isinstance(given, dict):
            if isinstance(given.get("full_attention"), dict) or isinstance(given.get("sliding_attention"), dict):
                per_type = {key: value for key, value in given.items() if isinstance(value, dict)}
                full = per_type.get("full_attention") or per_type["sliding_attention"]
                local = per_type.get("sliding_attention") or full
                if self.arch != "gemma3" and full != local:
                    raise UnsupportedModel(
                        f"{self.path}: rope settings differ between layers, which {self.arch} has not"
                    )
            else:
                full = given
                local = {"rope_theta": self.raw.get("rope_local_base_freq", 1e4)} if self.arch == "gemma3" else given
        else:
            scaling = self.raw.get("rope_scaling", {})
            if not isinstance(scaling, dict):
                raise ModelFileError(f"{self.path}: 'rope_scaling' is a {type(scaling).__name__}, expected an object")
            full = {"rope_theta": self.raw.get("rope_theta", 1e4)} | scaling
            local = {"rope_theta": self.raw.get("rope_local_base_freq", 1e4)}
        if self.arch == "gemma3" and self.rope_scaling(local) is not None:
            raise UnsupportedModel(f"{self.path}: rope scaling of sliding layers is not supported")
        return full, local

    def rope_dim(self, rope: Mapping[str, Any], head_dim: int) -> int:
        share = self.get("partial_rotary_factor", float, self.get("partial_rotary_factor", float, 1.0), of=rope)
        if not 0 < share <= 1:
            raise ModelFileError(f"{self.path}: partial_rotary_factor is {share}, expected above 0, at most 1")
        return int(head_dim * share)

    def rope_scaling(self, rope: Mapping[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in ("default", "none", None):
            return None
        factor = self.get("factor", float, of=rope) if kind in ("linear", "llama3") else 0.0
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=factor,
                low_freq_factor=self.get("low_freq_factor", float, of=rope),
                high_freq_factor=self.get("high_freq_factor", float, of=rope),
                original_context=self.get("original_max_position_embeddings", int, of=rope),
            )
        raise UnsupportedModel(f"{self.path}: rope scaling {kind!r:.40} is not supported; supported: linear, llama3")

    def window(self, layers: int) -> tuple[int | None, int]:
        """Sliding window and every how many layers one sees everything."""
        size = self.raw.get("sliding_window")
        if size is None or (self.arch.startswith("qwen") and not self.get("use_sliding_window", bool, False)):
            return None, 1
        if self.arch == "llama" and not self.mistral:
            return None, 1
        size = self.get("sliding_window", int)
        kinds = self.raw.get("layer_types")
        if kinds is None:
            if self.arch == "gemma3":
                return size, self.get("sliding_window_pattern", int, self.get("_sliding_window_pattern", int, 6))
            first = self.get("max_window_layers", int, 0) if self.arch.startswith("qwen") else 0
            slides = [layer >= first for layer in range(min(max(layers, 0), 1 << 16))]
        else:
            if not isinstance(kinds, list) or len(kinds) != layers:
                raise ModelFileError(f"{self.path}: 'layer_types' does not list {layers} layers; fetch the model again")
            if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
                raise UnsupportedModel(f"{self.path}: layer_types other than full_attention and sliding_attention")
            slides = [kind == "sliding_attention" for kind in kinds]
        if not any(slides):
            return None, 1
        return size, pattern_of_flags(slides, layers, f"{self.path}: layer_types")


def _tokenizer(folder: Path, settings: _Settings, vocab_size: int) -> TokenizerData:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModel(f"{folder}: has no tokenizer.json; other tokeniser files are not read, convert it")
    spec = _read_json(path)
    options = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    by_text, special = _token_ids(path, spec, vocab_size)
    tokens = [""] * (max(by_text.values()) + 1)
    for text, token in by_text.items():
        tokens[token] = text
    named_end = by_text.get(_content(options.get("eos_token")))
    ends = [named_end] if named_end is not None else []  # the tokeniser's own first: templates print it
    ends += [*_ids(settings.raw.get("eos_token_id"), tokens), *_ids(generation.get("eos_token_id"), tokens)]
    ends += sorted(by_text[text] for text in EOG_TEXTS & special)
    bos = next(iter(_ids(settings.raw.get("bos_token_id"), tokens)), by_text.get(_content(options.get("bos_token"))))
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found: dict[str, Any] = {key: generation.get(key) for key in keys}
    return TokenizerData(
        kind="json",
        tokens=tokens,
        tokenizer_json=path.read_text("utf-8"),
        bos_id=bos,
        eos_ids=list(dict.fromkeys(ends)),
        pad_id=next(iter(_ids(settings.raw.get("pad_token_id"), tokens)), None),
        add_bos=options.get("add_bos_token") is True and bos is not None,
        chat_template=_chat_template(folder, options),
        defaults={key: float(v) for key, v in found.items() if type(v) in (int, float) and abs(v) < 1e9},
    )


def _token_ids(path: Path, spec: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, int], set[str]]:
    """Every token's id, and the texts of special ones."""
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: [[text, score], ...]
        vocab = {str(entry[0]): index for index, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    if not isinstance(vocab, dict) or not vocab:
        raise ModelFileError(f"{path}: has no vocabulary; fetch the model again")
    by_text, special = dict(vocab), set()
    more = spec.get("added_tokens") or []
    if not isinstance(more, list):
        raise ModelFileError(f"{path}: 'added_tokens' is {str(more)[:60]!r}, expected a list; fetch the model again")
    for added in more:
        if not isinstance(added, dict) or not isinstance(added.get("content"), str):
            raise ModelFileError(f"{path}: an added token is described as {str(added)[:60]!r}; fetch the model again")
        by_text[added["content"]] = added.get("id")
        if added.get("special") is True:
            special.add(added["content"])
    for text, token in by_text.items():
        if type(token) is not int or token < 0 or (token >= vocab_size and text not in special):
            raise ModelFileError(f"{path}: token {text!r:.40} has id {token!r:.30}, the model has {vocab_size} rows")
    # Text models of a family with images have special tokens beyond their rows (Gemma 3 270M: <image_soft_token>).
    known = {text: token for text, token in by_text.items() if token < vocab_size}
    return known, special & known.keys()


def _ids(value: Any, tokens: list[str]) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int and 0 <= token < len(tokens)]


def _content(token: Any) -> str:
    """A token in tokenizer_config.json: its text, or an object with it; "" if neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_template(folder: Path, options: Mapping[str, Any]) -> str:
    """chat_template.jinja, or tokenizer_config.json's: a text, or a list of named ones of which `default` counts."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        try:
            return _read_bytes(separate).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{separate}: cannot be read as text: {error}; fetch the model again") from error
    template = options.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else ""
