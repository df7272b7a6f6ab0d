"""GGUF reader: what it reads from sound files, and that nothing in a broken one gets past it but a ModelFileError."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ai_engine.data.gguf import GgufFile
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import BLOCK, DType
from tests.golden.tiny_gguf import (
    dequantize,
    metadata_from_hf,
    random_hf,
    tensors_from_hf,
    with_types,
    write_gguf,
    write_random,
    write_tiny,
)

TINY = ["llama-tied", "llama-untied-bf16-sharded", "llama3-rope", "qwen2-tied", "qwen3-untied", "gemma3-bf16"]
SMALL: dict[str, Any] = {"hidden": 32, "ffn": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}


def small(path: Path, types: str = "F32", **sizes: Any) -> Path:
    write_random(path, types, **(SMALL | sizes))
    return path


@pytest.mark.parametrize("name", TINY)
def test_reads_every_architecture(name: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path / "m.gguf", "Q8_0")
    model = GgufFile(tmp_path / "m.gguf")
    config = model.config
    assert config.arch == name.split("-")[0].replace("llama3", "llama")
    assert config.rope_interleaved == (config.arch == "llama")
    assert config.tied_head == ("output.weight" not in model.tensors)
    assert model.tensors["token_embd.weight"].shape == (config.vocab_size, config.hidden)
    if config.arch == "gemma3":
        assert (config.window_pattern, config.sliding_window, config.rope_base_local) == (6, 24, 10000.0)
        assert config.embed_scale == config.hidden**0.5
        assert [layer for layer in range(config.num_layers) if config.is_global(layer)] == [5]
    ModelTokenizer(model.tokenizer()).encode("Hello")
    model.close()


@pytest.mark.parametrize("dtype", list(DType))
def test_rows_are_views_of_the_stored_bytes(dtype: DType, tmp_path: Path) -> None:
    hf, state = random_hf("llama", hidden=256, ffn=256, layers=1)
    tensors = with_types(tensors_from_hf(hf, state), dtype.value)
    write_gguf(tmp_path / "m.gguf", metadata_from_hf(hf), tensors)
    model = GgufFile(tmp_path / "m.gguf")
    info = model.tensors["blk.0.ffn_up.weight"]
    assert info.dtype is dtype
    elements, nbytes = BLOCK[dtype]
    rows = model.read("blk.0.ffn_up.weight", 3, 9)
    assert rows.shape == (6, 256 // elements * nbytes)
    assert not rows.flags.owndata
    assert not rows.flags.writeable
    wanted = tensors["blk.0.ffn_up.weight"][1][3:9]
    step = 0.26 if dtype is DType.Q3_K else 0.15  # of three bits the largest value is clipped by a whole step
    assert np.abs(dequantize(rows, dtype.value).reshape(6, 256) - wanted).max() < step * np.abs(wanted).max()
    norm = model.read("output_norm.weight")
    assert norm.shape == (1, 256 * 4)
    assert np.array_equal(norm.view("<f4")[0], tensors["output_norm.weight"][1])
    model.drop("blk.0.ffn_up.weight")
    assert np.array_equal(model.read("blk.0.ffn_up.weight", 3, 9), rows)
    model.close()
    assert rows.any(), "a view outlives close()"


def test_split_files_open_by_any_part(tmp_path: Path) -> None:
    hf, state = random_hf("llama", **SMALL)
    tensors = list(with_types(tensors_from_hf(hf, state), "F32").items())
    for number in range(3):
        share = dict(tensors[number::3])
        keys: dict[str, Any] = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        metadata = {**metadata_from_hf(hf), **keys} if number == 0 else keys
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00003.gguf", metadata, share)
    for number in (1, 2, 3):
        model = GgufFile(tmp_path / f"m-0000{number}-of-00003.gguf")
        assert set(model.tensors) == {name for name, _ in tensors}
        assert np.array_equal(model.read("output_norm.weight").view("<f4")[0], dict(tensors)["output_norm.weight"][1])
        model.close()
    os.rename(tmp_path / "m-00002-of-00003.gguf", tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match="00002-of-00003"):
        GgufFile(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelFileError, match="is one of 3 parts"):
        GgufFile(tmp_path / "other.gguf")


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """A small model with ``change`` applied to its metadata and tensors first."""
    hf, state = random_hf("llama", **SMALL)
    metadata, tensors = metadata_from_hf(hf), with_types(tensors_from_hf(hf, state), "F32")
    change(metadata, tensors)
    write_gguf(path, metadata, tensors)


def drop_key(key: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda metadata, _: metadata.__delitem__(key)


def set_key(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda metadata, _: metadata.__setitem__(key, value)


SLIDING = {"llama.attention.sliding_window": 32, "llama.attention.sliding_window_pattern": [1, 0]}
GEMMA_OF_NOTHING = {
    "general.architecture": "gemma3", "gemma3.block_count": 62, "gemma3.embedding_length": 0,
    "gemma3.attention.head_count": 1, "gemma3.feed_forward_length": 1, "gemma3.context_length": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (drop_key("general.architecture"), ModelFileError, "general.architecture"),
        (drop_key("llama.block_count"), ModelFileError, "llama.block_count"),
        (drop_key("llama.attention.layer_norm_rms_epsilon"), ModelFileError, "rms_epsilon"),
        (set_key("general.architecture", "mamba"), UnsupportedModel, "supported: llama, gemma3, qwen2, qwen3"),
        (set_key("llama.block_count", 2), ModelFileError, "blk.1.attn_norm.weight"),
        (set_key("llama.block_count", 1 << 30), ModelFileError, "number of layers"),
        (set_key("llama.block_count", 0), ModelFileError, "number of layers"),
        (set_key("llama.block_count", "one"), ModelFileError, "expected an integer"),
        (lambda m, _: m.update(SLIDING | {"llama.block_count": 1 << 31}), ModelFileError, "2147483648 layers"),
        (lambda m, _: m.update(GEMMA_OF_NOTHING), ModelFileError, "hidden size"),
        (set_key("llama.attention.head_count", 0), ModelFileError, "attention heads"),
        (set_key("llama.attention.head_count_kv", 3), ModelFileError, "no multiple"),
        (set_key("llama.attention.head_count_kv", 2), ModelFileError, "blk.0.attn_k.weight"),
        (set_key("llama.attention.value_length", 8), UnsupportedModel, "differ in length"),
        (set_key("llama.feed_forward_length", 96), ModelFileError, "ffn_gate"),
        (set_key("llama.vocab_size", 300), ModelFileError, "token_embd"),
        (set_key("llama.rope.freq_base", float("nan")), ModelFileError, "rope base"),
        (set_key("llama.attention.layer_norm_rms_epsilon", -1.0), ModelFileError, "norm epsilon"),
        (set_key("llama.rope.scaling.type", "yarn"), UnsupportedModel, "yarn"),
        (set_key("llama.expert_count", 8), UnsupportedModel, "expert_count"),
        (set_key("general.alignment", 3), ModelFileError, "power of two"),
        (lambda _, t: t.pop("output_norm.weight"), ModelFileError, "output_norm.weight"),
        (lambda _, t: t.pop("token_embd.weight"), ModelFileError, "token_embd.weight"),
        (lambda _, t: t.update({"blk.0.ssm_a": t["output_norm.weight"]}), UnsupportedModel, "blk.0.ssm_a"),
    ],
)
def test_config_and_tensors_must_agree(
    change: Callable[[dict[str, Any], dict[str, Any]], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    rewrite(tmp_path / "m.gguf", change)
    with pytest.raises(error, match=words) as caught:
        GgufFile(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


PAD = bytes(4096)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "byte 0"),
        (b"GGUF", "ends inside its header"),
        (b"GGML" + PAD, "not a GGUF file"),
        (header(version=1) + PAD, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + PAD, "big-endian"),
        (header(tensors=1 << 60) + PAD, "byte 8: claims 1152921504606846976 tensors"),
        (header(keys=1 << 60) + PAD, "byte 16: claims"),
        (header(keys=1) + string("k")[:-1], "byte 32"),
        (header(keys=1) + struct.pack("<Q", 1 << 63) + PAD, "needs 9223372036854775808 bytes"),
        (header(keys=1) + string(b"\xff\xfe") + PAD, "not UTF-8"),
        (header(keys=1) + string("") + struct.pack("<II", 4, 1) + PAD, "empty"),
        (header(keys=2) + (string("k") + struct.pack("<II", 4, 1)) * 2 + PAD, "'k' is repeated"),
        (header(keys=1) + string("k") + struct.pack("<I", 13) + PAD, "unknown value type 13"),
        (header(keys=1) + string("k") + struct.pack("<IB", 7, 2) + PAD, "boolean of value 2"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 60) + PAD, "claims 1152921504606846976"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 20) + PAD, "claims 1048576 strings"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 0, 1 << 24) + PAD, "arrays together"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 20) + PAD, "needs 4194304 bytes"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + PAD, "array of arrays"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 77, 1) + PAD, "unknown element type 77"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 1) + string(b"\xc3") + PAD, "not UTF-8"),
        (header(tensors=1) + tensor("t", ()) + PAD, "0 dimensions"),
        (header(tensors=1) + tensor("t", (1,) * 5) + PAD, "5 dimensions"),
        (header(tensors=1) + tensor("t", (4, 0)) + PAD, "not whole F32 blocks"),
        (header(tensors=1) + tensor("t", (33,), kind=2) + PAD, "not whole Q4_0 blocks of 32"),
        (header(tensors=1) + tensor("t", (32,), kind=10) + PAD, "type Q2_K; supported: F32"),
        (header(tensors=1) + tensor("t", (32,), kind=999) + PAD, "type 999"),
        (header(tensors=1) + tensor("t", (1 << 62, 1 << 62, 1 << 62)) + PAD, "but the file has"),
        (header(tensors=1) + tensor("t", (4,), offset=(1 << 64) - 32) + PAD, "but the file has"),
        (header(tensors=1) + tensor("t", (4,), offset=7) + PAD, "not a multiple of 32"),
        (header(tensors=2) + tensor("t", (4,)) + tensor("t", (4,), offset=32) + PAD, "listed twice"),
        (header(tensors=2) + tensor("t", (64,)) + tensor("u", (4,), offset=32) + PAD, "overlaps 't'"),
    ],
)
def test_says_what_is_broken_and_where(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words) as caught:
        GgufFile(path)
    assert "broken.gguf" in str(caught.value)
    assert "byte" in str(caught.value) or "fetch" in str(caught.value) or "convert" in str(caught.value)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(header(keys=1) + string("k") + struct.pack("<IQ", 8, 1 << 33))
    os.truncate(path, 1 << 34)  # sparse
    with pytest.raises(ModelFileError, match="largest header"):
        GgufFile(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "absent.gguf", Path("/dev/zero")):
        with pytest.raises(ModelFileError):
            GgufFile(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    content = small(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(content), 997), len(content) - 33]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            GgufFile(cut)


def test_shortened_while_open(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    model = GgufFile(path)
    os.truncate(path, 4096)
    with pytest.raises(ModelFileError, match="shortened"):
        model.read("output_norm.weight")


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_mutated_bytes_never_crash(arch: str, rounds: int, tmp_path: Path) -> None:
    """Random damage to a sound header: the file opens or says what is wrong."""
    sound = bytearray(small(tmp_path / "m.gguf", architecture=arch, layers=1).read_bytes())
    rng, path = random.Random(7), tmp_path / "mutant.gguf"
    directory = sound.rindex(b"weight") + 40
    opened = 0
    for _ in range(rounds):
        mutant = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(directory)
            kind = rng.randrange(4)
            if kind == 0:
                mutant[at] = rng.randrange(256)
            elif kind == 1:
                mutant[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 255, 1 << 31, 1 << 60, (1 << 64) - 1)))
            elif kind == 2:
                del mutant[at : at + rng.randrange(1, 20)]
            else:
                mutant[at:at] = mutant[at : at + rng.randrange(1, 20)]
        path.write_bytes(mutant)
        try:
            model = GgufFile(path)
        except ModelFileError:
            continue
        opened += 1
        try:
            data = model.tokenizer()
            ModelTokenizer(data).encode("Hello <|im_end|> world")
        except ModelFileError:
            pass
        for name in model.tensors:
            model.read(name)[-1].sum()
        model.close()
    assert 0 < opened < rounds
