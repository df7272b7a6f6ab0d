"""Text to token ids and token ids to bytes, for GGUF's two tokenisers and for tokenizer.json.

Owns: which text is a special token, how llama.cpp's two algorithms map to the `tokenizers` library, the exact bytes of
each token. Does not own chat templates (template.py) nor turning bytes to text (detokenize.py).

Ids equal llama.cpp's. Two differences of construction, none of result:
- SentencePiece merges the adjacent pair whose concatenation has the best score. That is BPE over every split of every
  token into two tokens, ranked by the score of the result; `tokenizers` does it in n log n, whatever the text.
- llama.cpp cuts out special tokens longest text first, then left to right; `SpecialTokens` finds all occurrences in one
  pass and then picks in that order, so thousands of special tokens cost nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from ai_engine.data.files import write_atomic
from ai_engine.ports.errors import ModelFileError, UnsupportedModel
from ai_engine.ports.model import TokenizerData
from ai_engine.ports.text import Encoded

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""ggml's token types."""

_CODE_VERSION: Final = b"merges-1"
"""Part of the cache key: raise it when `_score_merges` changes."""

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+@"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*@"
)
_TAIL_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL,)
_QWEN2: Final = (_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL,)
_SMOLLM: Final = (r"\p{N}", _GPT2)
_TEKKEN: Final = (_CASED.replace("@", "") + r"|\p{N}|" + _TAIL_SLASH,)
_GPT4O: Final = (_CASED.replace("@", _SUFFIX + "?") + r"|\p{N}{1,3}|" + _TAIL_SLASH,)

PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "jais", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}
"""GGUF's name of a pre-tokeniser -> regular expressions applied one after the other, each isolating its matches.
The expressions are those of llama.cpp (src/llama-vocab.cpp), which restate each model's own."""

WHOLE_WORD_FIRST: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "chatglm-bpe"}
)
"""Pre-tokenisers whose models take a word that is a token as that token, without merging (`ignore_merges`)."""

_FORCED_CONTROL: Final = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
        "<｜end▁of▁sentence｜>", "</s>", "<eos>",
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<|fim_suffix|>", "<fim-suffix>",
        "<fim_suffix>", "<SUF>", "▁<SUF>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
        "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
"""Tokens that are control tokens whatever their stated type: without it "<|im_end|>" in a user's text could end a turn.
The list is llama.cpp's."""


_TURN_MARKERS: Final = frozenset(
    {
        "<start_of_turn>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<s>",
        "<bos>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>",
    }
)  # fmt: skip
"""Kept out of users' text by `guard` even where a file calls them user-defined, as some conversions of Gemma do."""


class SpecialTokens:
    """Cuts a text at the occurrences of given strings: longest string first, then left to right."""

    def __init__(self, ids_by_text: dict[str, int]) -> None:
        self._ids = ids_by_text
        lengths: dict[str, set[int]] = {}
        for text in ids_by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}
        prefixes = sorted(self._lengths, key=len, reverse=True)
        self._prefix = re.compile("|".join(map(re.escape, prefixes))) if prefixes else None
        mixed = {text[0] for text in ids_by_text if text.count(text[0]) != len(text)}
        self._run_chars = {text[0] for text in ids_by_text} - mixed

    def split(self, text: str) -> list[str | int]:
        """Pieces of ``text`` in order: plain strings (never empty) and token ids."""
        hits = self.occurrences(text)
        if not hits:
            return [text] if text else []
        hits.sort(key=lambda hit: (-len(hit[1].encode()), hit[0]))
        covered = bytearray(len(text))
        picked: list[tuple[int, str]] = []
        for start, found in hits:
            end = start + len(found)
            if covered.find(1, start, end) < 0:
                covered[start:end] = b"\1" * len(found)
                picked.append((start, found))
        pieces: list[str | int] = []
        done = 0
        for start, found in sorted(picked):
            if start > done:
                pieces.append(text[done:start])
            pieces.append(self._ids[found])
            done = start + len(found)
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def occurrences(self, text: str) -> list[tuple[int, str]]:
        """Every (position, string) at which one of the strings stands. Inside a run of one character (newlines),
        where all of them overlap, only those that picking from the left can reach."""
        hits: list[tuple[int, str]] = []
        match = self._prefix.search(text) if self._prefix else None
        while match and self._prefix:
            start, step = match.start(), 1
            for prefix in {match.group(), text[start]}:
                for length in self._lengths.get(prefix, ()):
                    found = text[start : start + length]
                    if found in self._ids:
                        hits.append((start, found))
                        if text[start] in self._run_chars:
                            step = max(step, length)
            match = self._prefix.search(text, start + step)
        return hits


class ModelTokenizer:
    """Implements ports.text.Tokenizer. Immutable and thread-safe.

    ``cache_dir``: where the merges of a SentencePiece vocabulary are kept (they take a second to work out for 262,144
    tokens); None: nowhere. Raises ModelFileError for lists that make no tokeniser, UnsupportedModel for a kind or
    pre-tokeniser that we do not know.
    """

    def __init__(self, data: TokenizerData, cache_dir: Path | None = None) -> None:
        self._add_bos, self._bos_id = data.add_bos, data.bos_id
        self._byte_level = data.kind == "gpt2"
        self._space_prefix = data.kind == "llama" and data.add_space_prefix
        self._escape_space = data.kind == "llama"
        self._plain: tokenizers.Tokenizer | None = None  # tokenizer.json's
        self._later: tokenizers.Tokenizer | None = None  # for text after a special token, where that differs
        if data.kind == "json":
            self._load_json(data)
        else:
            self._tokens, self._types = _vocabulary(data)
            model = (
                _byte_level_bpe(data, self._tokens)
                if data.kind == "gpt2"
                else _scored_bpe(data, self._tokens, cache_dir)
            )
            self._bpe = model
            cut = {t: i for i, t in enumerate(self._tokens) if self._types[i] in (UNKNOWN, CONTROL, USER_DEFINED)}
            self._all = SpecialTokens(cut)
            self._user = SpecialTokens({t: i for t, i in cut.items() if self._types[i] == USER_DEFINED})
            guarded = {t: i for t, i in cut.items() if self._types[i] != USER_DEFINED or t in _TURN_MARKERS}
            self._control = SpecialTokens(guarded)
        self._eos_ids = frozenset(data.eos_ids)
        self._pieces: dict[int, bytes] = {}  # of tokens seen so far
        self._hidden = _hidden(self._types)
        if self._add_bos and self._bos_id is None:
            raise ModelFileError("tokenizer: add_bos is set but there is no bos token; the model file is damaged")

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        return self.encode_segments([(text, parse_special)], add_special=add_special)

    def encode_segments(self, segments: Iterable[tuple[str, bool]], *, add_special: bool = True) -> Encoded:
        """Ids of consecutive (text, parse_special) segments: as if the texts were joined, except that the text of
        control tokens counts only in segments with parse_special. A lone surrogate becomes U+FFFD."""
        ids: list[int] = []
        run: list[str] = []  # plain text since the last special token, across segments
        for piece in self._cut(segments):
            if isinstance(piece, str):
                run.append(piece)
                continue
            if run:
                ids += self._encode_plain("".join(run), first=not ids)
            ids.append(piece)
            run = []
        if run:
            ids += self._encode_plain("".join(run), first=not ids)
        if add_special and self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return Encoded(ids)

    def guard(self, text: str, mark: str) -> str:
        """``text`` with ``mark`` after the first character of every control token's text in it, overlapping ones too:
        cut at the marks, no piece contains one. (A control token of one character cannot be guarded; none is known.)"""
        cuts = sorted({start + 1 for start, found in self._control.occurrences(text) if len(found) > 1})
        return mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)) if cuts else text

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        if skip_special and token in self._hidden:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < len(self._tokens):
                return b""
            piece = self._pieces[token] = _piece(self._tokens[token], self._types[token], self._byte_level)
        return piece

    def is_special(self, token: int) -> bool:
        return 0 <= token < len(self._types) and self._types[token] in (UNKNOWN, CONTROL)

    def _cut(self, segments: Iterable[tuple[str, bool]]) -> Iterable[str | int]:
        for text, parse_special in segments:
            yield from (self._all if parse_special else self._user).split(_no_surrogates(text))

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of text between special tokens; ``first``: none stands before it."""
        if self._plain is not None:  # tokenizer.json does its own spaces and user-defined tokens
            model = self._plain if first or self._later is None else self._later
            return list(model.encode(text, add_special_tokens=False).ids)
        if self._space_prefix:
            text = " " + text
        if self._escape_space:
            text = text.replace(" ", "▁")
        return list(self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _load_json(self, data: TokenizerData) -> None:
        with _library_errors("tokenizer.json: cannot be read: {}; fetch the model again"):
            full = _plain_tokenizer(data.tokenizer_json)
            spec = msgspec.json.decode(data.tokenizer_json)
            if _set_key(spec, "prepend_scheme", "first", "never"):  # a space before the text's first word only
                self._later = _plain_tokenizer(msgspec.json.encode(spec).decode())
        with _library_errors("tokenizer.json: cannot encode: {}; fetch the model again"):
            probe = full.encode("a", add_special_tokens=True).ids
        if self._bos_id is not None and probe[:1] == [self._bos_id]:
            self._add_bos = True
        by_text: dict[str, int] = full.get_vocab(with_added_tokens=True)
        size = max(by_text.values(), default=-1) + 1
        if not by_text or size > 1 << 24:
            raise ModelFileError(f"tokenizer.json: {len(by_text)} tokens with ids up to {size}; fetch the model again")
        decoder = str(spec.get("decoder"))
        self._byte_level = "'ByteLevel'" in decoder
        if not self._byte_level and "'ByteFallback'" not in decoder and "'Metaspace'" not in decoder:
            raise UnsupportedModel("tokenizer.json: its decoder is neither ByteLevel nor ByteFallback nor Metaspace")
        self._tokens, self._types = [""] * size, [UNUSED] * size
        for text, token in by_text.items():
            self._tokens[token] = text
            self._types[token] = BYTE if not self._byte_level and _BYTE_TOKEN.fullmatch(text) else NORMAL
        specials: dict[str, int] = {}
        for token, added in full.get_added_tokens_decoder().items():
            self._types[token] = CONTROL if added.special else USER_DEFINED
            if added.special and (not data.tokens or token < len(data.tokens)):  # else the model has no row for it
                specials[added.content] = token
        self._all = self._control = SpecialTokens(specials)
        self._user, self._plain = SpecialTokens({}), full


class TokenPieces(NamedTuple):
    """The exact bytes of each token (a control token's name), and the ids that stand for no text."""

    pieces: list[bytes]
    hidden: frozenset[int]


def token_pieces(data: TokenizerData) -> TokenPieces:
    """All of a vocabulary, without the encoder. Raises ModelFileError."""
    if data.kind == "json":
        tokenizer = ModelTokenizer(data)
        ids = range(tokenizer.vocab_size)
        return TokenPieces([tokenizer.piece(i, skip_special=False) for i in ids], tokenizer._hidden)
    tokens, types = _vocabulary(data)
    byte_level = data.kind == "gpt2"
    pieces = [_piece(text, kind, byte_level) for text, kind in zip(tokens, types, strict=True)]
    return TokenPieces(pieces, _hidden(types))


def _hidden(types: Sequence[int]) -> frozenset[int]:
    return frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, UNUSED))


def _piece(text: str, kind: int, byte_level: bool) -> bytes:
    if kind == BYTE:
        return bytes([int(text[3:5], 16)])
    if kind in (UNKNOWN, CONTROL, USER_DEFINED):
        return text.encode()
    if byte_level:
        return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in text)
    return text.replace("▁", " ").encode()


def _plain_tokenizer(spec: str) -> tokenizers.Tokenizer:
    """tokenizer.json's tokeniser, reading special tokens' text as plain text."""
    tokenizer = tokenizers.Tokenizer.from_str(spec)
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _set_key(spec: dict[str, Any], key: str, old: str, new: str) -> bool:
    """Replace ``key: old`` in the pre-tokeniser (alone or in a sequence); whether it was there."""
    outer = spec.get("pre_tokenizer") or {}
    found = [part for part in [outer, *outer.get("pretokenizers", [])] if part.get(key) == old]
    for part in found:
        part[key] = new
    return bool(found)


@contextlib.contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """The library raises bare Exception, and for what it did not foresee a BaseException called PanicException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(message.format(error)) from error
        raise


_BYTE_TOKEN: Final = re.compile("<0x[0-9A-F]{2}>")


def _byte_chars() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py: bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}


_BYTE_OF_CHAR: Final = _byte_chars()


def _no_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _vocabulary(data: TokenizerData) -> tuple[list[str], list[int]]:
    """Tokens and types, with what llama.cpp puts right: empty tokens get a name, end and fill-in tokens are control."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(data.tokens)]
    types = list(data.token_types) or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or not tokens:
        raise ModelFileError(f"tokenizer: {len(tokens)} tokens but {len(types)} token types; convert the model again")
    if len(set(tokens)) != len(tokens):
        raise ModelFileError("tokenizer: a token is listed twice; convert the model again")
    for index, token in enumerate(tokens):
        if token in _FORCED_CONTROL:
            types[index] = CONTROL
        elif types[index] == BYTE and not _BYTE_TOKEN.fullmatch(token):
            raise ModelFileError(f"tokenizer: byte token {index} is {token!r}, expected the form <0x0A>")
    return tokens, types


def _byte_level_bpe(data: TokenizerData, tokens: list[str]) -> tokenizers.Tokenizer:
    expressions = PRE_TOKENIZERS.get(data.pre)
    if expressions is None:
        raise UnsupportedModel(
            f"tokenizer: pre-tokeniser {data.pre!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges: list[tuple[str, str]] = []
    for merge in data.merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelFileError(f"tokenizer: merge {merge!r} is not two tokens and a space; convert the model again")
        merges.append((merge[:cut], merge[cut + 1 :]))
    tokenizer = _bpe(tokens, merges, ignore_merges=data.pre in WHOLE_WORD_FIRST)
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _scored_bpe(data: TokenizerData, tokens: list[str], cache_dir: Path | None) -> tokenizers.Tokenizer:
    if len(data.scores) != len(tokens):
        raise ModelFileError(f"tokenizer: {len(tokens)} tokens but {len(data.scores)} scores; convert the model again")
    pairs = _cached_merges(tokens, data.scores, cache_dir)
    left, right = (map(tokens.__getitem__, column.tolist()) for column in pairs.T)
    merges = list(zip(left, right, strict=True))
    unk = tokens[data.unk_id] if data.unk_id is not None else None
    return _bpe(tokens, merges, byte_fallback=True, unk_token=unk)


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    with _library_errors("tokenizer: the merges do not fit the tokens: {}; convert the model again"):
        return tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options))


def _score_merges(tokens: Sequence[str], scores: Sequence[float]) -> npt.NDArray[np.int32]:
    """Every split of a token into two tokens, best score of the whole first; shape (merges, 2), token ids."""
    ids = {token: index for index, token in enumerate(tokens)}
    find = ids.get
    pairs: list[tuple[float, int, int, int]] = []
    for token, index in ids.items():
        rank = -scores[index]
        for cut in range(1, len(token)):
            left = find(token[:cut])
            if left is not None and (right := find(token[cut:])) is not None:
                pairs.append((rank, index, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return np.array([pair[2:] for pair in pairs], np.int32).reshape(-1, 2)


def _cached_merges(tokens: list[str], scores: list[float], cache_dir: Path | None) -> npt.NDArray[np.int32]:
    """`_score_merges`, kept on disk under a digest of its input; the file carries a digest of its content, and one
    that is damaged, foreign or unwritable only costs the time to work it out again."""
    if cache_dir is None or len(tokens) < 4096:
        return _score_merges(tokens, scores)
    key = hashlib.sha256(_CODE_VERSION + "\0".join(tokens).encode() + np.array(scores, "<f4").tobytes()).hexdigest()
    path = cache_dir / f"{key[:32]}.merges"
    try:
        blob = path.read_bytes()
    except OSError:
        blob = b""
    if len(blob) > 32 and hashlib.sha256(blob[32:]).digest() == blob[:32]:
        return np.frombuffer(blob, "<i4", offset=32).reshape(-1, 2)
    pairs = _score_merges(tokens, scores)
    body = pairs.astype("<i4").tobytes()
    with contextlib.suppress(OSError):  # a read-only cache is no reason to fail
        write_atomic(path, hashlib.sha256(body).digest() + body)
    return pairs
