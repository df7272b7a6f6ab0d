"""GGUF reader: maps the file, parses metadata and tensor directory, gives zero-copy views of the weights.

Owns the format (versions 2 and 3, little endian, split files) and the translation of its metadata to ModelConfig and
TokenizerData. Does not know tensor shapes of an architecture (shapes.py) nor dequantise (kernels). Every byte is
untrusted: whatever is wrong ends in a ModelFileError that names file, byte and remedy.

Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ai_engine.data.mapped import MappedFile
from ai_engine.data.shapes import EOG_TEXTS, SUPPORTED_ARCHS, check_config, check_tensors, pattern_of_flags
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import BLOCK, DType, ModelConfig, RopeScaling, TensorInfo, TokenizerData

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_HEADER_BYTES: Final = 256 << 20
MAX_ELEMENTS: Final = 1 << 23
"""Of all metadata arrays together, ten times what the largest vocabularies have: bounds a hostile file's memory."""
MAX_PARTS: Final = 1000

_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_TYPES: Final = {
    0: DType.F32,
    1: DType.F16,
    2: DType.Q4_0,
    3: DType.Q4_1,
    6: DType.Q5_0,
    7: DType.Q5_1,
    8: DType.Q8_0,
    11: DType.Q3_K,
    12: DType.Q4_K,
    13: DType.Q5_K,
    14: DType.Q6_K,
    20: DType.IQ4_NL,
    30: DType.BF16,
}
_OTHER_TYPES: Final = {
    9: "Q8_1", 10: "Q2_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
BOS_BY_DEFAULT: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
)
"""Byte-level pre-tokenisers whose models begin a text with BOS unless the file says otherwise; llama.cpp's rule."""

_SPLIT_NAME: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class _Cursor:
    """Bounds-checked reads over one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)  # of metadata and directory
        self.pos = self.elements = 0

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        raise ModelFileError(
            f"{self.path}: byte {self.pos if at is None else at}: {problem}; "
            "the file is damaged or incomplete, fetch or convert it again"
        )

    def need(self, nbytes: int, what: str) -> int:
        """Advance over ``nbytes``; returns their offset."""
        at = self.pos
        if nbytes > self.end - at:
            self.fail(f"{what} needs {nbytes} bytes, but the {self.border} ends after {self.end - at}")
        self.pos = at + nbytes
        return at

    @property
    def border(self) -> str:
        return "file" if self.end == self.size else f"largest header ({MAX_HEADER_BYTES} bytes)"

    def number(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.need(struct.calcsize(fmt), what))[0]

    def string(self, what: str) -> str:
        at = self.pos
        length = self.number("<Q", f"length of {what}")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", at)

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` length-prefixed strings; the tight loop of the reader (a vocabulary has up to 262,144)."""
        data, pos, limit, unpack = self.data, self.pos, self.end, struct.Struct("<Q").unpack_from
        if count * 8 > limit - pos:
            self.fail(f"{what} claims {count} strings, but the {self.border} ends after {limit - pos} bytes")
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                end = start + unpack(data, pos)[0]
                if end > limit:
                    self.fail(f"string {len(out)} of {what} runs past the end of the {self.border}", pos)
                append(data[start:end].decode())
                pos = end
        except UnicodeDecodeError:
            self.fail(f"string {len(out)} of {what} is not UTF-8", pos)
        except struct.error:
            self.fail(f"string {len(out)} of {what} is cut off", pos)
        self.pos = pos
        return out

    def value(self, what: str) -> Any:
        kind = self.number("<I", f"type of {what}")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _BOOL:
            return self.boolean(what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            self.fail(f"{what} has unknown value type {kind}", self.pos - 4)
        at = self.pos
        element = self.number("<I", f"element type of {what}")
        count = self.number("<Q", f"length of {what}")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            self.fail(f"{what} claims {count} elements; all arrays together may have {MAX_ELEMENTS}", at)
        if element == _STRING:
            return self.strings(count, what)
        if element == _BOOL:
            flags = self.data[self.need(count, what) : self.pos]
            if flags.strip(b"\0\1"):
                self.fail(f"{what} holds a boolean that is neither 0 nor 1", at)
            return [bool(flag) for flag in flags]
        if element == _ARRAY:
            self.fail(f"{what} is an array of arrays, which no supported model has", at)
        if element not in _SCALARS:
            self.fail(f"{what} has unknown element type {element}", at)
        dtype = np.dtype(_SCALARS[element])
        start = self.need(count * dtype.itemsize, what)
        return np.frombuffer(self.data[start : self.pos], dtype).tolist()

    def boolean(self, what: str) -> bool:
        flag = self.number("<B", what)
        if flag > 1:
            self.fail(f"{what} is a boolean of value {flag}", self.pos - 1)
        return bool(flag)


class _Part:
    """One mapped GGUF file: metadata, and for each tensor its TensorInfo and byte offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path, min_bytes=24)
        try:
            self._parse(_Cursor(path, self.file.map))
        except BaseException:
            self.file.close()
            raise

    def _parse(self, cur: _Cursor) -> None:
        if cur.data[:4] != b"GGUF":
            cur.fail(f"starts with {cur.data[:4]!r}, not with 'GGUF': not a GGUF file", 0)
        cur.need(4, "magic")
        version = cur.number("<I", "version")
        if version in (0x02000000, 0x03000000):
            raise UnsupportedModel(f"{self.path}: a big-endian GGUF file; convert the model again for little endian")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path}: byte 4: GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = cur.number("<Q", "tensor count"), cur.number("<Q", "metadata count")
        if num_tensors > min(MAX_TENSORS, cur.size // 24):
            cur.fail(f"claims {num_tensors} tensors, more than this file can hold", 8)
        if num_keys > min(MAX_KEYS, cur.size // 12):
            cur.fail(f"claims {num_keys} metadata entries, more than this file can hold", 16)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            at = cur.pos
            key = cur.string(f"metadata key {index}")
            if not key or key in self.metadata:
                cur.fail(f"metadata key {key!r} is {'repeated' if key else 'empty'}", at)
            self.metadata[key] = cur.value(repr(key))
        self._directory(cur, num_tensors)

    def _directory(self, cur: _Cursor, num_tensors: int) -> None:
        entries: list[tuple[int, int, TensorInfo]] = []  # offset in the data section, directory position, tensor
        for index in range(num_tensors):
            at = cur.pos
            info, offset = _tensor(cur, index)
            entries.append((offset, at, info))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            cur.fail(f"general.alignment is {alignment!r}, expected a power of two up to 2^20", 0)
        base = -(-cur.pos // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        self.offsets: dict[str, int] = {}
        free_from, previous = 0, ""
        for offset, at, info in sorted(entries, key=lambda entry: entry[0]):
            start, end = base + offset, base + offset + info.nbytes
            if info.name in self.tensors:
                cur.fail(f"tensor {info.name!r} is listed twice", at)
            if offset % alignment:
                cur.fail(f"tensor {info.name!r} starts at {offset}, which is not a multiple of {alignment}", at)
            if offset < free_from:
                cur.fail(f"tensor {info.name!r} overlaps {previous!r}", at)
            if end > cur.size:
                cur.fail(f"tensor {info.name!r} is bytes {start} to {end}, but the file has {cur.size}", at)
            free_from, previous = offset + info.nbytes, info.name
            self.tensors[info.name], self.offsets[info.name] = info, start


def _tensor(cur: _Cursor, index: int) -> tuple[TensorInfo, int]:
    """One directory entry: the tensor and its offset in the data section."""
    at = cur.pos
    name = cur.string(f"name of tensor {index}")
    num_dims = cur.number("<I", f"dimension count of tensor {name!r}")
    if not 1 <= num_dims <= 4:
        cur.fail(f"tensor {name!r} has {num_dims} dimensions, expected 1 to 4", at)
    shape = tuple(cur.number("<Q", f"shape of tensor {name!r}") for _ in range(num_dims))[::-1]  # ggml: fastest first
    kind, offset = cur.number("<I", f"type of tensor {name!r}"), cur.number("<Q", f"offset of tensor {name!r}")
    if kind not in _TYPES:
        raise UnsupportedModel(
            f"{cur.path}: byte {at}: tensor {name!r} has type {_OTHER_TYPES.get(kind, kind)}; "
            f"supported: {', '.join(dtype.value for dtype in DType)}"
        )
    dtype = _TYPES[kind]
    elements, nbytes = BLOCK[dtype]
    if min(shape) < 1 or shape[-1] % elements:
        cur.fail(f"tensor {name!r} has shape {list(shape)}, which is not whole {dtype.value} blocks of {elements}", at)
    return TensorInfo(name, dtype, shape, math.prod(shape) // elements * nbytes), offset


def _open_parts(path: Path) -> list[_Part]:
    """The file, or all parts of a split file whichever of them was named; in order, the one with metadata first."""
    first = _Part(path)
    parts = [first]
    try:
        count = first.metadata.get("split.count", 0)
        if type(count) is not int or count <= 1:
            return parts
        match = _SPLIT_NAME.fullmatch(path.name)
        if match is None or int(match[3]) != count or not 1 <= int(match[2]) <= count <= MAX_PARTS:
            raise ModelFileError(
                f"{path}: is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf; "
                "keep all parts in one folder under their own names"
            )
        for number in range(1, count + 1):
            if number != int(match[2]):
                parts.append(_Part(path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")))
        parts.sort(key=lambda part: part.path.name)
        for number, part in enumerate(parts):
            if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
                raise ModelFileError(
                    f"{part.path}: says it is part {part.metadata.get('split.no')!r}, expected {number}"
                )
        total, found = parts[0].metadata.get("split.tensors.count"), sum(len(part.tensors) for part in parts)
        if total is not None and total != found:
            raise ModelFileError(f"{path}: the parts hold {found} tensors, but the first one promises {total}")
        return parts
    except BaseException:
        for part in parts:
            part.file.close()
        raise


class GgufFile:
    """A GGUF model (all parts), checked in full when opened. Implements ports.model.ModelFile.

    Raises ModelFileError for a damaged file, UnsupportedModel for an architecture or type that we do not run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._parts = _open_parts(self.path)
        try:
            self._where: dict[str, tuple[_Part, TensorInfo]] = {}
            for part in self._parts:
                for name, info in part.tensors.items():
                    if name in self._where:
                        raise ModelFileError(
                            f"{part.path}: tensor {name!r} is also in {self._where[name][0].path.name}"
                        )
                    self._where[name] = part, info
            self._tensors = MappingProxyType({name: info for name, (_, info) in self._where.items()})
            self._config = _Metadata(self.path, self._parts[0].metadata).config(self._tensors)
            check_config(self._config, str(self.path))
            check_tensors(self._config, self._tensors, str(self.path))
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        return MappingProxyType(self._parts[0].metadata)

    @property
    def nbytes(self) -> int:
        return sum(part.file.size for part in self._parts)

    def tokenizer(self) -> TokenizerData:
        """Raises ModelFileError when the file has none or its lists disagree, UnsupportedModel for another kind."""
        return _Metadata(self.path, self._parts[0].metadata).tokenizer(self._config.vocab_size)

    def read(self, name: str, row_start: int = 0, row_end: int | None = None) -> npt.NDArray[np.uint8]:
        part, info = self._where[name]
        rows = math.prod(info.shape[:-1])
        row_nbytes = info.nbytes // rows
        row_end = rows if row_end is None else row_end
        assert 0 <= row_start <= row_end <= rows, (name, row_start, row_end, rows)
        view = part.file.view(part.offsets[name] + row_start * row_nbytes, (row_end - row_start) * row_nbytes)
        return view.reshape(row_end - row_start, row_nbytes)

    def drop(self, name: str) -> None:
        part, info = self._where[name]
        part.file.drop(part.offsets[name], info.nbytes)

    def close(self) -> None:
        for part in self._parts:
            part.file.close()


class _Metadata:
    """Typed access to metadata, and its translation."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.arch = self.get("general.architecture", str)
        if self.arch not in SUPPORTED_ARCHS:
            raise UnsupportedModel(
                f"{path}: architecture {self.arch!r} is not supported; supported: {', '.join(SUPPORTED_ARCHS)}"
            )

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value under ``key``; without a default its absence is an error."""
        value = self.values.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: metadata {key!r} is missing; convert the model again")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelFileError(f"{self.path}: metadata {key!r} is a {type(value).__name__}, expected {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of this architecture; a per-layer list is accepted when all layers agree."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.path}: {self.arch}.{key} differs between layers, which is not supported")
        if type(value) is not int:
            state = "missing" if value is None else f"a {type(value).__name__}"
            raise ModelFileError(f"{self.path}: metadata '{self.arch}.{key}' is {state}, expected an integer")
        return value

    def config(self, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
        arch, prefix = self.arch, self.arch + "."
        self.refuse_extras()
        hidden, num_heads, num_layers = (
            self.size("embedding_length"), self.size("attention.head_count"), self.size("block_count"),
        )  # fmt: skip
        if num_heads < 1 or (hidden % num_heads and prefix + "attention.key_length" not in self.values):
            raise ModelFileError(f"{self.path}: {num_heads} attention heads do not divide {hidden} hidden units")
        head_dim = self.size("attention.key_length", hidden // num_heads)
        if self.size("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{self.path}: key and value heads differ in length, which is not supported")
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(
                f"{self.path}: tensor 'token_embd.weight' is missing or no matrix; fetch the model again"
            )
        vocab_size = self.size("vocab_size", embedding.shape[0])
        gemma = arch == "gemma3"
        window = self.size("attention.sliding_window", 0)
        attn_scale = self.get(prefix + "attention.scale", float, 0.0) or None
        if gemma and num_layers == 62:  # Gemma 3 27B scales by hidden size per head
            attn_scale = attn_scale or (max(hidden, 1) / num_heads) ** -0.5
        return ModelConfig(
            arch=arch,
            name=self.get("general.name", str, self.path.stem) or self.path.stem,
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=self.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            ffn=self.size("feed_forward_length"),
            vocab_size=vocab_size,
            max_context=self.size("context_length"),
            norm_eps=self.get(prefix + "attention.layer_norm_rms_epsilon", float),
            rope_base=self.get(prefix + "rope.freq_base", float, 10000.0),
            rope_dim=self.size("rope.dimension_count", head_dim),
            rope_interleaved=arch == "llama",
            rope_scaling=self.rope_scaling(),
            rope_base_local=self.get(prefix + "rope.freq_base_swa", float, 10000.0) if gemma else None,
            sliding_window=window or None,
            window_pattern=self.window_pattern(num_layers) if window else 1,
            attn_scale=attn_scale,
            embed_scale=math.sqrt(max(hidden, 0)) if gemma else 1.0,
            tied_head="output.weight" not in tensors,
        )

    def refuse_extras(self) -> None:
        """Settings that would change the answer and that we do not compute."""
        for key, neutral in (
            ("expert_count", 0), ("attn_logit_softcapping", 0.0), ("final_logit_softcapping", 0.0),
            ("attention.causal", True), ("logit_scale", 1.0), ("attention.clamp_kqv", 0.0),
            ("use_parallel_residual", False),
        ):  # fmt: skip
            value = self.values.get(f"{self.arch}.{key}", neutral)
            if value not in (neutral, 0 if neutral == 1.0 else neutral):
                raise UnsupportedModel(f"{self.path}: {self.arch}.{key} = {value!r} is not supported")

    def rope_scaling(self) -> RopeScaling | None:
        prefix = self.arch + ".rope."
        kind = self.get(prefix + "scaling.type", str, "linear")
        factor = self.get(prefix + "scaling.factor", float, self.values.get(prefix + "scale_linear", 1.0))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        if kind != "linear":
            raise UnsupportedModel(
                f"{self.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3"
            )
        return RopeScaling(kind="linear", factor=factor)

    def window_pattern(self, num_layers: int) -> int:
        """Every how many layers one sees everything: stated as a number or as a flag per layer (true: slides)."""
        key = f"{self.arch}.attention.sliding_window_pattern"
        value = self.values.get(key)
        if value is None:
            return 6 if self.arch == "gemma3" else 1
        if not isinstance(value, list):
            return self.size("attention.sliding_window_pattern")
        return pattern_of_flags([bool(flag) for flag in value], num_layers, f"{self.path}: {key}")

    def tokenizer(self, vocab_size: int) -> TokenizerData:
        base = "tokenizer.ggml."
        kind = self.get(base + "model", str)
        if kind not in ("gpt2", "llama"):
            raise UnsupportedModel(f"{self.path}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
        tokens = self.list_of(base + "tokens", str, vocab_size)
        types = self.list_of(base + "token_type", int, vocab_size, required=False) or [1] * vocab_size
        scores = [float(s) for s in self.list_of(base + "scores", float, vocab_size, required=kind == "llama")]
        merges = self.list_of(base + "merges", str, None, required=kind == "gpt2")
        spm, pre = kind == "llama", self.get(base + "pre", str, "default")
        bos = self.token_id(base + "bos_token_id", vocab_size, 1 if spm else None)
        ends: list[int] = []  # the file's own first: templates print it
        for key, usual in (("eos_token_id", 2 if spm else None), ("eot_token_id", None), ("eom_token_id", None)):
            eos = self.token_id(base + key, vocab_size, usual)
            ends += [eos] if eos is not None and eos not in ends else []
        ends += [index for index, token in enumerate(tokens) if token in EOG_TEXTS and index not in ends]
        return TokenizerData(
            kind="gpt2" if kind == "gpt2" else "llama",
            pre=pre,
            tokens=tokens,
            scores=scores,
            token_types=types,
            merges=merges,
            bos_id=bos,
            eos_ids=ends,
            pad_id=self.token_id(base + "padding_token_id", vocab_size),
            unk_id=self.token_id(base + "unknown_token_id", vocab_size, 0 if spm else None),
            add_bos=self.get(base + "add_bos_token", bool, bos is not None and (spm or pre in BOS_BY_DEFAULT)),
            add_space_prefix=self.get(base + "add_space_prefix", bool, spm),
            chat_template=self.get("tokenizer.chat_template", str, ""),
            defaults=self.sampling_defaults(),
        )

    def sampling_defaults(self) -> dict[str, float]:
        names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
        keys = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
        found: dict[str, Any] = {names.get(key, key): self.values.get(f"general.sampling.{key}") for key in keys}
        return {key: float(v) for key, v in found.items() if type(v) in (int, float) and math.isfinite(v)}

    def list_of(self, key: str, kind: type[Any], length: int | None, *, required: bool = True) -> list[Any]:
        values: Any = self.get(key, list, None if required else [])
        if (values or required) and length is not None and len(values) != length:
            raise ModelFileError(f"{self.path}: {key!r} has {len(values)} entries, the vocabulary has {length}")
        if any(type(value) is not kind for value in values):
            raise ModelFileError(f"{self.path}: {key!r} holds values that are not {kind.__name__}")
        return list(values)

    def token_id(self, key: str, vocab_size: int, usual: int | None = None) -> int | None:
        """A token id or None, which converters write as 0xFFFFFFFF; ``usual`` where the file says nothing."""
        value = self.values.get(key)
        if value is None or value == 0xFFFFFFFF:
            return usual if value is None and usual is not None and usual < vocab_size else None
        if not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, expected a token id below {vocab_size}")
        return int(value)
