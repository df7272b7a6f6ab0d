"""Tokenisers: ids against llama.cpp's on real vocabularies, and the rules on small ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as models_of_library

from ai_engine.data import models
from ai_engine.data.gguf import GgufFile
from ai_engine.data.safetensors import SafetensorsDir
from ai_engine.data.tokenizer import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, USER_DEFINED, ModelTokenizer, SpecialTokens
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import TokenizerData
from tests.golden.tiny_gguf import TINY

GOLDEN = Path(__file__).parents[2] / "golden" / "tokens.json"


def spm(**changes: Any) -> TokenizerData:
    """A SentencePiece vocabulary by hand: bytes, letters, a few merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
    types = [2, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED]
    merged = ["▁hello", "▁he", "llo", "ll", "he", "▁h", "lo", "▁▁", *"▁abcdehlo"]
    tokens += merged
    types += [NORMAL] * len(merged)
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(merged))]
    fields: dict[str, Any] = {"kind": "llama", "tokens": tokens, "scores": scores, "token_types": types}
    fields |= {"bos_id": 1, "eos_ids": [2], "unk_id": 0, "add_bos": True}
    return TokenizerData(**(fields | changes))


@cache
def byte_level() -> ModelTokenizer:
    return ModelTokenizer(SafetensorsDir(TINY / "llama-tied").tokenizer())


@cache
def sentencepiece() -> ModelTokenizer:
    return ModelTokenizer(spm(add_space_prefix=False))


def pieces(tokenizer: ModelTokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.piece(token, skip_special=False) for token in ids)


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_round_trip(text: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode(text, add_special=False, parse_special=False).ids
        if "▁" not in text or tokenizer is byte_level():  # SentencePiece writes a space for it
            assert pieces(tokenizer, ids).decode() == text
        assert not any(map(tokenizer.is_special, ids))


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.sampled_from(["a", " he", "llo", "<s>", "</s>", "<tool>", "é", "<"]), st.booleans())))
def test_segments_are_as_if_joined(segments: list[tuple[str, bool]]) -> None:
    """What is not a control token is encoded across segment borders."""
    for tokenizer in (byte_level(), sentencepiece()):
        plain = [(text, False) for text, _ in segments]
        joined = "".join(text for text, _ in segments)
        if "<" in joined.replace("<s>", "").replace("</s>", "").replace("<tool>", ""):
            continue
        assert tokenizer.encode_segments(plain) == tokenizer.encode(joined, parse_special=False)
        ids = tokenizer.encode_segments(segments, add_special=False).ids
        assert pieces(tokenizer, ids).decode() == joined
        if tokenizer is sentencepiece():
            assert sum(token in (1, 2) for token in ids) == sum(parse and "s>" in text for text, parse in segments)


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet="<s>/|tol b", max_size=40))
def test_guarded_text_has_no_control_tokens(text: str) -> None:
    tokenizer = sentencepiece()
    guarded = tokenizer.guard(text, "\ufdd0")
    assert guarded.replace("\ufdd0", "") == text
    ids = tokenizer.encode_segments([(piece, True) for piece in guarded.split("\ufdd0")], add_special=False).ids
    assert not any(map(tokenizer.is_special, ids))
    assert ids == tokenizer.encode(text, add_special=False, parse_special=False).ids


def test_turn_markers_are_guarded_even_when_user_defined() -> None:
    data = spm()
    data.tokens[259] = "<start_of_turn>"
    tokenizer = ModelTokenizer(data)
    guarded = tokenizer.guard("a<start_of_turn>b", "\ufdd0")
    ids = tokenizer.encode_segments([(piece, True) for piece in guarded.split("\ufdd0")]).ids
    assert 259 not in ids
    assert 259 in tokenizer.encode("a<start_of_turn>b").ids


def test_bos_comes_once() -> None:
    tokenizer = ModelTokenizer(spm())
    assert tokenizer.encode("hello").ids == tokenizer.encode("<s>hello").ids
    assert tokenizer.encode("").ids == [1]
    assert tokenizer.encode("hello", add_special=False).ids[0] != 1
    assert tokenizer.encode("<s>hello", parse_special=False).ids[:2] != [1, 1]


def test_space_prefix_stands_after_special_tokens() -> None:
    tokenizer = ModelTokenizer(spm())
    hello = tokenizer.encode("hello", add_special=False).ids
    assert pieces(tokenizer, hello) == b" hello"
    assert tokenizer.encode("hello</s>hello", add_special=False).ids == [*hello, 2, *hello]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_tokenizer_json_with_leading_spaces(scheme: str) -> None:
    """Ids are those of the library reading special tokens itself."""
    vocab = {text: token for token, text in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab"])}
    model = models_of_library.BPE(vocab, [("▁", "a"), ("a", "b"), ("▁", "ab")], unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    library.add_special_tokens(["<s>", "</s>"])
    ours = ModelTokenizer(TokenizerData(kind="json", tokenizer_json=library.to_str(), bos_id=1, eos_ids=[2]))
    for text in ("ab", "<s>ab", "ab</s>ab a", "<s></s>b", " a ab", "</s> a", ""):
        assert ours.encode(text).ids == library.encode(text).ids
    assert 1 not in ours.encode("a<s>", parse_special=False).ids


def test_best_score_merges_first() -> None:
    tokenizer = sentencepiece()
    names = [tokenizer.piece(token) for token in tokenizer.encode(" hello  he é", add_special=False).ids]
    assert names == [b" hello", b" ", b" he", b" ", b"\xc3", b"\xa9"]


def test_pieces_of_special_and_unknown_ids() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.piece(1) == b""
    assert tokenizer.piece(1, skip_special=False) == b"<s>"
    assert tokenizer.piece(3 + 0x41) == b"A"
    assert tokenizer.piece(259) == b"<tool>"
    assert tokenizer.piece(-1) == tokenizer.piece(10**9) == b""
    assert not tokenizer.is_special(10**9)


def test_lone_surrogates_become_replacement_characters() -> None:
    ids = byte_level().encode("a\ud800b", add_special=False).ids
    assert pieces(byte_level(), ids).decode() == "a\ufffdb"


def test_special_tokens_longest_first() -> None:
    cutter = SpecialTokens({"ab": 1, "abc": 2, "cd": 3, "\n": 4, "\n\n": 5, "\n\n\n": 6})
    assert cutter.split("xabcdab") == ["x", 2, "d", 1]
    assert cutter.split("\n" * 8) == [6, 6, 5]
    assert cutter.split("") == []
    assert SpecialTokens({}).split("text") == ["text"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"scores": [0.0]}, ModelFileError, "scores"),
        ({"token_types": [1]}, ModelFileError, "token types"),
        ({"tokens": ["a"] * 277, "scores": [0.0] * 277, "token_types": []}, ModelFileError, "twice"),
        ({"bos_id": None}, ModelFileError, "bos"),
        ({"kind": "gpt2", "pre": "marmalade"}, UnsupportedModel, "'marmalade' is not known; known: .*smollm"),
        ({"kind": "gpt2", "pre": "smollm", "merges": ["ab"]}, ModelFileError, "not two tokens"),
        ({"kind": "gpt2", "pre": "smollm", "merges": ["x y"]}, ModelFileError, "do not fit"),
        ({"kind": "json", "tokenizer_json": "{"}, ModelFileError, "tokenizer.json"),
    ],
)
def test_lists_that_make_no_tokeniser(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ModelTokenizer(spm(**changes))


def test_every_pre_tokeniser_compiles() -> None:
    for pre in PRE_TOKENIZERS:
        data = spm(kind="gpt2", pre=pre, merges=[], add_bos=False)
        assert ModelTokenizer(data).encode("Hello 123, wörld's!\n").ids


def test_merges_are_cached_and_verified(tmp_path: Path) -> None:
    data = spm()
    filler = [f"<f{index}>" for index in range(5000)]
    data.tokens, data.scores = data.tokens + filler, data.scores + [-1000.0] * 5000
    data.token_types = data.token_types + [USER_DEFINED] * 5000
    wanted = ModelTokenizer(data).encode(" hello").ids
    assert ModelTokenizer(data, tmp_path).encode(" hello").ids == wanted
    (file,) = tmp_path.glob("*.merges")
    sound = file.read_bytes()
    for damaged in (sound[:-4], sound[:40] + b"\xff" + sound[41:], b""):
        file.write_bytes(damaged)
        assert ModelTokenizer(data, tmp_path).encode(" hello").ids == wanted
        assert file.read_bytes() == sound
    assert ModelTokenizer(data, Path("/proc/nowhere")).encode(" hello").ids == wanted


@pytest.mark.parametrize("text", ["a" * 200_000, " " * 200_000, "\n" * 200_000, "lo" * 100_000, "<s" * 100_000])
def test_time_is_about_linear(text: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.encode(text[:1000])
        started = perf_counter()
        tokenizer.encode(text)
        assert perf_counter() - started < 5.0, "200 kB must not take seconds"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_ids_equal_llama_cpp(name: str) -> None:
    tokenizer = ModelTokenizer(GgufFile(models.resolve(name)).tokenizer())
    wrong = []
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]:
        for parse_special, key in ((True, name), (False, f"{name}_plain")):
            wanted = case.get(key, case.get(name))
            found = tokenizer.encode(case["text"], add_special=False, parse_special=parse_special).ids
            if found != wanted:
                wrong.append((case["text"], parse_special, found, wanted))
    assert not wrong
