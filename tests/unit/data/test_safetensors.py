"""Safetensors folders: the tiny models as transformers wrote them, both styles of config.json, and broken files."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ai_engine.data.safetensors import SafetensorsDir, canonical_name
from ai_engine.data.service import ModelText
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import RopeScaling
from tests.golden.tiny_gguf import TINY, read_safetensors, tensors_from_hf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY / "llama-tied", tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("folder_of", sorted(TINY.iterdir()), ids=lambda path: path.name)
def test_reads_every_tiny_model(folder_of: Path) -> None:
    model = SafetensorsDir(folder_of)
    config, raw = model.config, json.loads((folder_of / "config.json").read_text())
    assert (config.hidden, config.num_layers) == (raw["hidden_size"], raw["num_hidden_layers"])
    assert config.tied_head == raw["tie_word_embeddings"]
    assert config.norm_offset == (1.0 if config.arch == "gemma3" else 0.0)
    assert not config.rope_interleaved
    state = read_safetensors(folder_of)
    assert set(tensors_from_hf(raw, state)) - {"rope_freqs.weight"} == set(model.tensors)
    name = "blk.1.mlp.down_proj" if "blk.1.mlp.down_proj" in model.tensors else "blk.1.ffn_down.weight"
    info, rows = model.tensors[name], model.read(name, 2, 7)
    assert rows.shape == (5, info.nbytes // info.shape[0])
    stored = {"F32": "<f4", "F16": "<f2"}.get(info.dtype.value)
    if stored:
        assert np.array_equal(rows.view(stored), state["model.layers.1.mlp.down_proj.weight"][2:7])
    model.drop(name)
    tokenizer = ModelTokenizer(model.tokenizer())
    text = "Hello, wörld! <|im_end|> 123 😀"
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text, parse_special=False).ids)).decode() == text
    assert tokenizer.eos_ids
    model.close()


def test_window_patterns() -> None:
    gemma = SafetensorsDir(TINY / "gemma3-layer-types").config
    assert [gemma.is_global(layer) for layer in range(3)] == [False, True, False]
    assert SafetensorsDir(TINY / "gemma3-bf16").config.window_pattern == 6
    mistral = SafetensorsDir(TINY / "mistral-window").config
    assert mistral.sliding_window == 24
    assert not any(map(mistral.is_global, range(3)))
    assert SafetensorsDir(TINY / "mistral-full-f16").config.sliding_window is None


def test_rope_in_both_styles(folder: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    wanted = RopeScaling(kind="llama3", factor=8.0, original_context=64)
    edit(folder / "config.json", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    old = SafetensorsDir(folder).config
    edit(folder / "config.json", rope_theta=None, rope_scaling=None)
    edit(folder / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    new = SafetensorsDir(folder).config
    assert (old.rope_base, old.rope_scaling) == (new.rope_base, new.rope_scaling) == (5e5, wanted)
    edit(folder / "config.json", rope_parameters=None, rope_scaling={"type": "linear", "factor": 2})
    assert SafetensorsDir(folder).config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    for kind in ("yarn", "longrope", "dynamic"):
        edit(folder / "config.json", rope_scaling={"rope_type": kind, "factor": 2.0})
        with pytest.raises(UnsupportedModel, match=f"'{kind}' is not supported; supported: linear, llama3"):
            SafetensorsDir(folder)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, UnsupportedModel, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": None}, UnsupportedModel, "None"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "use a GGUF"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "expected 'silu'"),
        ({"num_hidden_layers": 3}, ModelFileError, "blk.2.attn_norm.weight"),
        ({"num_hidden_layers": 1}, UnsupportedModel, "blk.1"),
        ({"num_hidden_layers": 10**9}, ModelFileError, "number of layers"),
        ({"num_hidden_layers": True}, ModelFileError, "is a bool"),
        ({"hidden_size": None}, ModelFileError, "'hidden_size' is missing"),
        ({"hidden_size": "96"}, ModelFileError, "is a str"),
        ({"vocab_size": 300}, ModelFileError, "token_embd.weight"),
        ({"num_attention_heads": 0}, ModelFileError, "do not divide"),
        ({"num_key_value_heads": 4}, ModelFileError, "no multiple"),
        ({"tie_word_embeddings": False}, ModelFileError, "output.weight"),
        ({"rope_theta": 0}, ModelFileError, "rope base"),
    ],
)
def test_config_must_make_sense(changes: dict[str, Any], error: type[Exception], words: str, folder: Path) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(error, match=words):
        SafetensorsDir(folder)


def test_a_window_over_absurdly_many_layers(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY / "mistral-window", tmp_path / "model"))
    edit(folder / "config.json", num_hidden_layers=10**12)
    with pytest.raises(ModelFileError, match="1000000000000 layers"):
        SafetensorsDir(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(name: str, kind: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=f"{name}: is not a regular file"):
        SafetensorsDir(folder).tokenizer()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"added_tokens": 1}, "'added_tokens' is '1', expected a list"),
        ({"added_tokens": [5]}, "an added token"),
        ({"model": {"vocab": [[[], 1], [{}, 0]]}}, "tokenizer.json: cannot be read"),
        ({"model": {"vocab": 5}}, "no vocabulary"),
    ],
)
def test_a_tokeniser_that_makes_no_sense(change: dict[str, Any], words: str, folder: Path) -> None:
    edit(folder / "tokenizer.json", **change)
    with pytest.raises(ModelFileError, match=words):
        ModelText(SafetensorsDir(folder).tokenizer())


def test_text_part_of_a_multimodal_gemma(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY / "gemma3-layer-types", tmp_path / "model"))
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    assert SafetensorsDir(folder).config.arch == "gemma3"
    for prefix in ("language_model.model.", "model.language_model."):
        name = canonical_name(prefix + "layers.3.pre_feedforward_layernorm.weight", "gemma3")
        assert name == "blk.3.ffn_norm.weight"
    assert canonical_name("language_model.lm_head.weight", "gemma3") == "output.weight"
    assert canonical_name("vision_tower.vision_model.x.weight", "gemma3") is None


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="pickle files are never read"):
        SafetensorsDir(folder)


def test_index_stays_in_the_folder(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY / "llama-untied-bf16-sharded", tmp_path / "model"))
    edit(folder / "model.safetensors.index.json", weight_map={"a": "../../etc/passwd.safetensors"})
    with pytest.raises(ModelFileError, match="names the weight file"):
        SafetensorsDir(folder)


def test_special_tokens_beyond_the_rows_are_plain_text(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    extra = {"id": 301, "content": "<image_soft_token>", "special": True}
    spec["added_tokens"].append({**spec["added_tokens"][0], **extra})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    ids = ModelTokenizer(SafetensorsDir(folder).tokenizer()).encode("a<image_soft_token>b").ids
    assert max(ids) < 301
    assert len(ids) > 3


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def packed(header: Any, body: bytes = bytes(64), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends inside its header"),
        (packed({}, length=1 << 60), "byte 0: claims a header of 1152921504606846976 bytes"),
        (packed(b"{"), "not valid JSON"),
        (packed(b"\xff\xfe"), "not valid JSON"),
        (packed(b"[" * 100_000), "not valid JSON"),
        (packed(b"[]"), "is a JSON list"),
        (packed(b'{"a": 1, "a": 2}'), "a key is repeated"),
        (packed({"a": 1}), "described as '1'"),
        (packed({"a": {"dtype": "F32"}}), "described as"),
        (packed({"a": entry(offsets=(8, 0))}), "offsets"),
        (packed({"a": entry(offsets=(-8, 0))}), "offsets"),
        (packed({"a": entry(offsets=(0, 8.0))}), "offsets"),
        (packed({"a": entry(shape=(1 << 62,))}), "shape"),
        (packed({"a": entry(shape=(0,), offsets=(0, 0))}), "positive dimensions"),
        (packed({"a": entry(shape=())}), "one to four"),
        (packed({"a": entry(shape=(3,))}), "has 8 bytes"),
        (packed({"a": entry(dtype="I64")}), "supported: F32, F16, BF16"),
        (packed({"a": entry(), "b": entry(offsets=(4, 12))}), "overlaps 'a'"),
        (packed({"a": entry(shape=(32,), offsets=(0, 128))}), "the file has"),
    ],
)
def test_says_what_is_broken(content: bytes, words: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        SafetensorsDir(folder)


@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_mutated_files_never_crash(rounds: int, folder: Path) -> None:
    rng = random.Random(11)
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    sound = {name: (folder / name).read_bytes() for name in names}
    header_end = 8 + struct.unpack_from("<Q", sound["model.safetensors"])[0]
    opened = 0
    for _ in range(rounds):
        name = rng.choice(names)
        mutant = bytearray(sound[name])
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(header_end if name.endswith("safetensors") else len(mutant))
            kind = rng.randrange(4)
            if kind == 0:
                mutant[at] = rng.randrange(256)
            elif kind == 1:
                mutant[at : at + 1] = str(rng.choice((0, -1, 1 << 40, 1e999))).encode()
            elif kind == 2:
                del mutant[at : at + rng.randrange(1, 30)]
            else:
                mutant[at : at + 4] = rng.choice((b"null", b"true", b'"x"', b"[{}]"))
        (folder / name).write_bytes(mutant)
        try:
            model = SafetensorsDir(folder)
            opened += 1
            data = model.tokenizer()
            ModelTokenizer(data).encode("Hello <|im_end|> world")
            model.close()
        except ModelFileError:
            pass
        (folder / name).write_bytes(sound[name])
    assert 0 < opened < rounds
