"""Constraints to masks of allowed tokens: ports.grammar over llguidance.

Owns the vocabulary in llguidance's form (loaded with the first constraint), compiling within limits, finding which
keyword of a schema cannot be enforced, and matchers that end in time. Does not own what is refused before the compiler
(contracts/json_schema.py), short endings (closing.py), nor threads and deadlines (serving/service.py).

Choices. Every grammar is a Lark grammar of llguidance; a schema is a `%json` block in it. Space in JSON: at most one
after a comma or a colon, none elsewhere, so a text cannot run into white space. The keys of an object come in the
schema's order. Forced text is left to the model's own tokens (`no_forcing`): the worker needs no encoder.

A text ends in time: near its token limit a choice under a schema may only go on as its shortest ending does, so it is
whole wherever its limit can hold a smallest instance. The ending is worked out when the limit comes near, not at every
token, and is checked with the matcher before it is used.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from ai_engine.contracts.json_schema import Document, Node, children, json_block, lowered, pointer_part, refuse
from ai_engine.contracts.json_text import decode_json
from ai_engine.data.closing import Closer
from ai_engine.data.tokenizer import TokenPieces
from ai_engine.ports.errors import EngineError, InvalidJson, InvalidJsonSchema, UnsupportedParameter
from ai_engine.ports.grammar import U32, Constraint, constraint_key

MAX_TEXT_BYTES: Final = 1 << 19
"""Of a schema, pattern or grammar."""
MAX_KEPT: Final = 64
"""Compiled grammars kept for requests that repeat them."""
LOCATE_S: Final = 1.0
"""How long the keyword that cannot be enforced is looked for."""
MAX_BEAM: Final = 64
"""Texts of one length that the search for a string goes on from."""
MAX_ALIKE: Final = 4
"""Of these, texts that allow the same tokens next: most often, but not always, the same state."""
WORD_PROBES: Final = 3000
"""Bytes tried to find the shortest string of a pattern, 50 to 200 us each; a schema's patterns together get four times
that. A count and not a time: the same request gets the same answer."""
LIVE_PROBES: Final = 600
"""Bytes tried in the middle of a text."""
SPARE_TOKENS: Final = 6
"""Kept between the shortest ending and the limit: one token may open more than `Ending.jump` foresees."""

LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_items_in_row": 2000,
    "max_lexer_states": 50_000, "max_grammar_size": 500_000, "verbose_errors": False,
}  # fmt: skip
"""llguidance's own limits: about 20 ms of work at the start and 15 ms a token, 100 MB of lexer states."""


UNREADABLE: Final = (
    RecursionError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)
"""What the closer meets in a schema that it reads too simply: no ending is known then."""


class Vocabulary:
    """A tokeniser in llguidance's form. ``num_logits``: columns of a mask; tokens past the vocabulary are never
    allowed."""

    def __init__(self, tokens: TokenPieces, eos_ids: frozenset[int], num_logits: int) -> None:
        pieces = list(tokens.pieces[:num_logits])
        special = {*tokens.hidden, *eos_ids, *range(len(pieces), num_logits)} & {*range(num_logits)}
        pieces += [f"<|unused {token}|>".encode() for token in range(len(pieces), num_logits)]
        special |= {token for token, piece in enumerate(pieces) if not piece}
        self.eos_ids = sorted(token for token in eos_ids if 0 <= token < num_logits)
        if not self.eos_ids:
            raise UnsupportedParameter("this model has no end-of-sequence token, so a constrained answer has no end")
        self.special_ids = {pieces[token]: token for token in sorted(special, reverse=True)}
        self.byte_ids: dict[int, int] = {}
        for token, piece in enumerate(pieces):
            if len(piece) == 1 and token not in special:
                self.byte_ids.setdefault(piece[0], token)
        self.pieces = pieces
        self.words = -(-num_logits // 32)
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Wrapped(pieces, sorted(special), self.eos_ids[0], self.byte_ids)),
            n_vocab=num_logits,
            eos_token=self.eos_ids,
        )

    @property
    def nbytes(self) -> int:
        """About what it holds, as measured: llguidance's tables and the pieces here, 330 bytes a token."""
        return len(self.pieces) * 330

    def tokens_of(self, text: bytes) -> list[int]:
        """Any tokens that spell the text; the longest that fits, from left to right."""
        try:
            return list(self.tokenizer.greedy_tokenize(text.decode()))
        except UnicodeDecodeError:  # the text begins inside a character
            cut = next((i for i, byte in enumerate(text) if byte & 0xC0 != 0x80), len(text))
            return [self.byte_ids[byte] for byte in text[:cut]] + self.tokens_of(text[cut:])


class _Wrapped:
    """What llguidance asks of a tokeniser. Called only for forced text, which `no_forcing` leaves to the model."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], special: list[int], eos_id: int, byte_ids: dict[int, int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = pieces, special, eos_id
        self._byte_ids = byte_ids

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class LlGrammars:
    """Implements ports.grammar.Grammars. ``load`` reads the vocabulary, when it is first needed."""

    def __init__(self, load: Callable[[], TokenPieces], eos_ids: frozenset[int], num_logits: int) -> None:
        self._load, self._eos_ids, self._num_logits = load, eos_ids, num_logits
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Any, LlGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the vocabulary; 0 until it is loaded."""
        return 0 if self._vocabulary is None else self._vocabulary.nbytes

    def vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load(), self._eos_ids, self._num_logits)
            return self._vocabulary

    def compile(self, constraint: Constraint) -> LlGrammar:
        key = constraint_key(constraint)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        grammar = Compiler(self.vocabulary(), constraint.param).compile(constraint)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar


class Compiler:
    """One constraint to a grammar."""

    def __init__(self, vocabulary: Vocabulary, param: str) -> None:
        self._vocabulary, self._param = vocabulary, param
        self._words: dict[str, bytes | None] = {}
        self._probes_left = 4 * WORD_PROBES

    def compile(self, constraint: Constraint) -> LlGrammar:
        if len(constraint.text) > MAX_TEXT_BYTES:
            raise InvalidJsonSchema(
                f"{self._param}: {len(constraint.text)} characters of schema or grammar, expected at most "
                f"{MAX_TEXT_BYTES}. Fix: send a smaller one.",
                param=self._param,
            )
        schema: Node | None = None
        if constraint.kind == "json_object":
            schema = {"type": "object"}
        elif constraint.kind == "json_schema":
            schema = lowered(self._decoded(constraint.text), self._param)
        if schema is not None:
            body = json_block(schema)
        elif constraint.kind == "regex":
            body = f"/{llguidance.regex_to_lark(constraint.text, use_ascii='dw')}/"
        else:
            body = f"%lark {{\n{self._lark(constraint)}\n}}"
        start = self._matcher(whole_grammar(self._vocabulary, body, constraint.after, constraint.opens))
        problem = _problem(start, self._vocabulary)
        if problem and schema is not None:
            self._locate(schema, problem)
        if problem:
            raise InvalidJsonSchema(f"{self._param}: {_first_lines(problem)}", param=self._param)
        return self._finished(constraint, start, schema)

    def _decoded(self, text: str) -> Any:
        try:
            return decode_json(text.encode())
        except InvalidJson as error:
            raise InvalidJsonSchema(f"{self._param}: the schema is not JSON: {error}", param=self._param) from error

    def _lark(self, constraint: Constraint) -> str:
        if constraint.kind == "lark":
            return constraint.text
        try:
            return gbnf_to_lark(constraint.text)
        except Exception as error:  # what the converter raises is a bare Exception
            raise InvalidJsonSchema(f"{self._param}: not a GBNF grammar: {error}", param=self._param) from error

    def _matcher(self, lark: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(**LIMITS)
        return llguidance.LLMatcher(self._vocabulary.tokenizer, lark, log_level=0, limits=limits)

    def _finished(self, constraint: Constraint, start: llguidance.LLMatcher, schema: Node | None) -> LlGrammar:
        vocabulary, closer, shortest = self._vocabulary, None, None
        if schema is not None:
            sizes: dict[bytes, int] = {}

            def size(text: bytes) -> int:
                if text not in sizes:
                    sizes[text] = len(vocabulary.tokens_of(text))
                return sizes[text]

            try:
                closer = Closer(schema, self._word, size)
                shortest = closer.smallest()
            except UNREADABLE:
                shortest = None
        elif not constraint.after and constraint.kind == "regex":
            shortest = search(vocabulary, start, _whole, Probes(WORD_PROBES), constraint.text.encode())
        grammar = LlGrammar(vocabulary, start, closer, constraint)
        if shortest is not None:
            tokens = grammar.prefix(b"") + vocabulary.tokens_of(shortest)
            if verified(start, tokens):
                grammar.min_tokens = len(tokens) + 1
        if not grammar.min_tokens:
            grammar.closer = None
        return grammar

    def _word(self, shape: Node) -> bytes | None:
        """The shortest string of this type, quotes included."""
        wanted: Node = {k: shape[k] for k in ("pattern", "format", "minLength", "maxLength") if k in shape}
        key = json.dumps(wanted, sort_keys=True)
        if key not in self._words:
            matcher = self._matcher(whole_grammar(self._vocabulary, json_block({"type": "string", **wanted})))
            hint = str(wanted.get("pattern", "")).encode()
            probes = Probes(min(WORD_PROBES, self._probes_left))
            self._words[key] = None if matcher.is_error() else search(self._vocabulary, matcher, _whole, probes, hint)
            self._probes_left -= probes.taken
        return self._words[key]

    # --- which keyword it was

    def _locate(self, schema: Node, problem: str) -> None:
        """Name the innermost schema that does not compile, and the keyword without which it would."""
        until = time.monotonic() + LOCATE_S
        shared: Node = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        nodes = list(Document(schema).reachable(self._param))
        self._refuse_named(nodes, problem)
        for pointer, node in sorted(nodes, key=lambda item: -item[0].count("/")):
            if time.monotonic() > until:
                return
            found = self._problem_of({**shared, **node})
            if not found:
                continue
            below = {step.split("/")[1] for step, _ in children(node)}
            for keyword in sorted(
                (k for k in node if k not in ("$defs", "definitions")), key=lambda name: (name == "type", name in below)
            ):
                dropped = {keyword, "then", "else"} if keyword == "if" else {keyword}
                without = {key: value for key, value in node.items() if key not in dropped}
                if not self._problem_of({**shared, **without}):
                    at = pointer + pointer_part(keyword)
                    refuse(keyword, at, f"cannot be enforced: {_first_lines(found)}", self._param)
            keywords = ", ".join(sorted(map(repr, node.keys() - {"$defs", "definitions"})))
            raise InvalidJsonSchema(
                f"{self._param}: the schema at {pointer or '/'!r} with {keywords} cannot be enforced: "
                f"{_first_lines(found)}",
                param=self._param,
            )

    def _refuse_named(self, nodes: list[tuple[str, Node]], problem: str) -> None:
        """Where the compiler says which keyword, or which format, it is enough to look for it."""
        unknown = re.search(r"Unknown format: (\S+)", problem)
        keys = re.search(r'Unimplemented keys: \["([^"]+)"', problem)
        for pointer, node in nodes:
            if unknown and node.get("format") == unknown.group(1):
                reason = f"cannot be enforced: unknown format {unknown.group(1)[:80]!r}"
                refuse("format", pointer + "/format", reason, self._param)
            if keys and keys.group(1) in node:
                refuse(keys.group(1), pointer + pointer_part(keys.group(1)), "cannot be enforced", self._param)

    def _problem_of(self, schema: Node) -> str:
        matcher = self._matcher(whole_grammar(self._vocabulary, json_block(schema)))
        return _problem(matcher, self._vocabulary)


HEAD: Final = '%llguidance {"no_forcing": true}\n'


def whole_grammar(vocabulary: Vocabulary, body: str, after: str = "", opens: str = "") -> str:
    """A Lark grammar of ``body`` (a term), or of a reasoning part and then ``body``."""
    if not after:
        return f"{HEAD}start: {body}\n"

    def tag(text: str) -> str:
        token = vocabulary.special_ids.get(text.encode())
        return json.dumps(text) if token is None else f"<[{token}]>"

    if after.encode() in vocabulary.special_ids:
        thought = f"thought: THOUGHT {tag(after)}\nTHOUGHT: /(?s:.*)/\n"
    else:
        thought = f"thought[suffix={json.dumps(after)}]: /(?s:.*)/\n"
    start = f"({tag(opens)} thought gap)? body" if opens else "thought gap body"
    return f"{HEAD}start: {start}\n{thought}gap: /[ \\n]{{0,3}}/\nbody: {body}\n"


def _problem(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> str:
    """Why the grammar cannot be used; warnings too: they say what would be ignored."""
    if matcher.is_error():
        return str(matcher.get_error()) or "it does not compile"
    if warnings := matcher.get_grammar_warnings():
        return "; ".join(warnings)
    row, probe = np.zeros(vocabulary.words, np.uint32), matcher.deep_copy()
    probe.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    if probe.is_error():
        return f"no text can begin: {probe.get_error()}"
    if not row.any():
        return "no text matches"
    brace = vocabulary.byte_ids.get(0x7B, 0)
    if row[brace >> 5] >> (brace & 31) & 1 and probe.try_consume_tokens([brace]) != 1:  # as of thousands of properties
        return str(probe.get_error())
    return ""


def _first_lines(problem: str) -> str:
    """What it says, without the grammar that it quotes."""
    text = re.split(r"\n *\d+ \| |<state>|<non-verbose/>", problem)[0]
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    return " ".join(text.split())[:300]


def verified(matcher: llguidance.LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether these tokens end the text."""
    probe = matcher.deep_copy()
    return probe.try_consume_tokens(list(tokens)) == len(tokens) and bool(probe.is_accepting())


class LlGrammar:
    """Implements ports.grammar.Grammar. ``closer`` None: its texts may end at the token limit, unfinished."""

    def __init__(
        self, vocabulary: Vocabulary, start: llguidance.LLMatcher, closer: Closer | None, constraint: Constraint
    ) -> None:
        self.vocabulary, self.closer = vocabulary, closer
        self.min_tokens = 0
        self._start = start
        self._after, self._opens = constraint.after.encode(), constraint.opens.encode()
        self.lock = threading.Lock()  # of the closer's tables, which grow as they are used

    def open(self) -> LlMatcher:
        return LlMatcher(self, self._start.deep_copy())

    def body_of(self, text: bytes) -> bytes | None:
        """The part of a text that is under the schema; None: it is before that."""
        if not self._after or not text.startswith(self._opens):
            return None if self._opens and text and self._opens.startswith(text) else text
        at = text.find(self._after)
        return None if at < 0 else text[at + len(self._after) :].lstrip()

    def prefix(self, text: bytes) -> list[int]:
        """Tokens from the end of ``text`` to where the schema begins."""
        if self.body_of(text) is not None or not self._after:
            return []
        special_ids, rest = self.vocabulary.special_ids, b""
        if not text.startswith(self._opens):
            rest, text = self._opens[len(text) :], b""
        if self._after in special_ids:
            return [*self.vocabulary.tokens_of(rest), special_ids[self._after]]
        begun = next(n for n in range(len(self._after) - 1, -1, -1) if text.endswith(self._after[:n]))
        return self.vocabulary.tokens_of(rest + self._after[begun:])


class Mark(NamedTuple):
    """Where a text stands: open brackets, whether in a string, whether after a backslash there."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def after(self, piece: bytes) -> Mark:
        depth, in_string, escaped = self
        if in_string and not escaped and b'"' not in piece and b"\\" not in piece:
            return self
        for byte in piece:
            if escaped:
                escaped = False
            elif byte == 0x22:
                in_string = not in_string
            elif in_string:
                escaped = byte == 0x5C
            else:
                depth += (byte in b"{[") - (byte in b"}]")
        return Mark(depth, in_string, escaped)


class Need(NamedTuple):
    """An ending of the text of ``num_tokens`` tokens. ``steady``: it stays the same while the string goes on."""

    num_tokens: int
    tokens: list[int]
    jump: int
    steady: bool

    def fits(self, tokens_left: int) -> bool:
        """Whether the next token may be any, and this one or another ending will still fit after it."""
        return tokens_left - 1 - len(self.tokens) - self.jump > SPARE_TOKENS


class LlMatcher:
    """Implements ports.grammar.Matcher. What is allowed depends on the tokens taken and on ``tokens_left`` alone,
    whatever was asked, guessed and taken back before."""

    __slots__ = ("_ended", "_grammar", "_marks", "_matcher", "_need", "_tokens")

    def __init__(self, grammar: LlGrammar, matcher: llguidance.LLMatcher) -> None:
        self._grammar, self._matcher = grammar, matcher
        self._tokens: list[int] = []
        self._marks = [Mark()]  # at the start and after each token
        self._ended = False  # by an end-of-sequence token, which is no part of the text
        self._need: Need | None = None  # worked out last

    def fill(self, row: U32, tokens_left: int) -> None:
        token = self._forced(tokens_left)
        if token is not None:
            row[:] = 0
            row[token >> 5] = 1 << (token & 31)
            return
        assert row.flags.c_contiguous, row.flags
        assert len(row) == self._grammar.vocabulary.words, (len(row), self._grammar.vocabulary.words)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot go on: {_first_lines(self._matcher.get_error())}")

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._grammar.vocabulary.eos_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        self._marks.append(self._marks[-1].after(self._grammar.vocabulary.pieces[token]))
        return True

    @property
    def ended(self) -> bool:
        return self._ended

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._tokens[-num_tokens:], self._marks[-num_tokens:]
            if self._need is not None and self._need.num_tokens > len(self._tokens):
                self._need = None

    # --- ending in time

    def _forced(self, tokens_left: int) -> int | None:
        """The only token that may come, if the limit is that near."""
        closer = self._grammar.closer
        if closer is None or self._matcher.is_stopped():
            return None
        with self._grammar.lock:
            bound = closer.bound(max(0, self._marks[-1].depth))
        if tokens_left > bound + SPARE_TOKENS + len(self._grammar.prefix(b"")):
            return None  # no text this deep needs so many
        if self._need is not None and self._goes_on(self._need) and self._need.fits(tokens_left):
            return None
        self._need = self._ending(closer, tokens_left)
        if self._need is None or self._need.fits(tokens_left):
            return None
        return self._need.tokens[0] if self._need.tokens else self._grammar.vocabulary.eos_ids[0]

    def _goes_on(self, need: Need) -> bool:
        """Only a string has gone on since then, by whole characters."""
        pieces, begun = self._grammar.vocabulary.pieces, need.num_tokens
        mark = self._marks[begun]
        return need.steady and all(
            self._marks[at + 1] is mark and _is_whole_text(pieces[self._tokens[at]])
            for at in range(begun, len(self._tokens))
        )

    def _ending(self, closer: Closer, tokens_left: int) -> Need | None:
        """A short ending that the matcher takes; None: none is known, or one that fits anyway must be searched for."""
        vocabulary = self._grammar.vocabulary
        text = b"".join([vocabulary.pieces[token] for token in self._tokens])
        prefix = self._grammar.prefix(text)
        body = self._grammar.body_of(text) or b""
        with self._grammar.lock:
            try:
                endings = closer.endings(body)
            except UNREADABLE:
                endings = None
        for ending in endings or ():
            end = ending.text
            if ending.word:
                rough = [0] * (2 * ending.word + len(vocabulary.tokens_of(end)))
                if Need(0, rough, ending.jump, False).fits(tokens_left):
                    return None
                found = search(vocabulary, self._matcher, _string_ends, Probes(LIVE_PROBES), ending.hint)
                if found is None:
                    continue
                end = found + end
            tokens = prefix + vocabulary.tokens_of(end)
            if verified(self._matcher, tokens):
                steady = ending.steady and not prefix and self._marks[-1].in_string
                return Need(len(self._tokens), tokens, ending.jump, steady)
        return None


def _is_whole_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


class Probes:
    """How many bytes a search may try."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def take(self) -> bool:
        self.taken += 1
        return self.taken <= self.most


def _whole(matcher: llguidance.LLMatcher, text: bytes) -> bool:
    return bool(matcher.is_accepting())


def _string_ends(matcher: llguidance.LLMatcher, text: bytes) -> bool:
    """The first quote that is not escaped ends the string that has begun."""
    return text[-1:] == b'"' and (len(text) - 1 - len(text[:-1].rstrip(b"\\"))) % 2 == 0


def search(
    vocabulary: Vocabulary,
    start: llguidance.LLMatcher,
    ends: Callable[[llguidance.LLMatcher, bytes], bool],
    probes: Probes,
    hint: bytes,
) -> bytes | None:
    """A short text from here to where ``ends``, byte by byte: breadth first over texts that differ in what they allow
    next, a few bytes of each kind and those of ``hint`` tried from each. None when the probes run out."""
    row = np.zeros(vocabulary.words, np.uint32)

    def allowed_by(matcher: llguidance.LLMatcher) -> U32:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return row if not matcher.is_error() else np.zeros_like(row)

    first = start.deep_copy()
    beam: list[tuple[llguidance.LLMatcher, bytes, list[int]]] = [
        (first, b"", _samples(vocabulary, allowed_by(first), hint))
    ]
    for _ in range(512):
        following: list[tuple[llguidance.LLMatcher, bytes, list[int]]] = []
        seen: dict[bytes, int] = {}
        for matcher, text, samples in beam:
            if ends(matcher, text):
                return text
            for byte in samples:
                if not probes.take():
                    return None
                probe = matcher.deep_copy()
                if probe.try_consume_tokens([vocabulary.byte_ids[byte]]) != 1:
                    continue
                longer = text + bytes([byte])
                if ends(probe, longer):
                    return longer
                state = allowed_by(probe).tobytes()
                alike = seen[state] = seen.get(state, 0) + 1
                if alike <= MAX_ALIKE and len(following) < MAX_BEAM:
                    following.append((probe, longer, _samples(vocabulary, row, hint)))
        beam = following
    return None


_KINDS: Final = (b'"}]', b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _samples(vocabulary: Vocabulary, row: U32, hint: bytes) -> list[int]:
    """Some of the allowed bytes: the quote and those of the hint, the ends of every kind, some of the rest."""
    allowed = [byte for byte, token in vocabulary.byte_ids.items() if row[token >> 5] >> (token & 31) & 1]
    picked = [byte for byte in allowed if byte in hint or byte == 0x22]
    for kind in _KINDS:
        some = sorted(byte for byte in allowed if byte in kind)
        picked += some if len(some) <= 4 else [some[0], some[1], some[-1]]
    others = sorted(byte for byte in allowed if not any(byte in kind for kind in _KINDS))
    return list(dict.fromkeys(picked + others[: 4 if hint else 40]))
