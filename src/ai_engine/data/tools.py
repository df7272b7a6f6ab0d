"""Function calls in an answer: the formats that models write them in, and a stage that takes them out of the text.

Owns the table of formats (chosen by a model's chat template) and reading. How calls are asked for and shown in a prompt
is tool_prompt.py's; how they are enforced is tool_grammar.py's.

A call is a JSON object with a name and arguments, between the format's marks; ``bare`` formats also take one without a
mark where the answer begins. What is read as a call: an object whose name is one of the functions offered. Anything
else (another name, broken or cut off before the arguments begin) stays text, marks included: nothing is lost. From
there on the arguments are passed on as they are written, piece by piece; only control characters in their strings,
which JSON forbids and models write, are escaped, and arguments that are a string of JSON are unpacked. No arguments are
"{}". Arguments that break (a bracket that closes none) go on raw up to the end mark. White space between text and a
call is layout and is dropped; between a call and text after it, it is dropped if no text came before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

import msgspec

from ai_engine.data.spans import Span, hidden, visible
from ai_engine.data.stops import StopMatcher
from ai_engine.ports.text import ToolDelta

SPACE: Final = " \t\r\n"
MAX_NAME: Final = 128


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes calls. ``template`` are texts that all stand in the source of its chat templates,
    and ``not_template`` such as stand in those of others that share its marks.

    ``begin`` and ``end`` are the marks around one call or a list of them ("": none); ``named``: the function's name
    stands before its arguments, with this mark between, instead of both in an object. ``arguments`` is the key that is
    written; either is read. ``listed``: the calls are written as one list after one mark; else each has its marks, with
    ``between`` between them.
    """

    name: str
    template: tuple[str, ...]
    not_template: tuple[str, ...] = ()
    begin: str
    end: str = ""
    bare: bool = False
    named: str = ""
    listed: bool = False
    between: str = "\n"
    arguments: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that matter even where the vocabulary has them as control tokens."""
        return tuple(filter(None, (self.begin, self.end, self.named, CALL_ID if self.named else "")))


CALL_ID: Final = "[CALL_ID]"
FORMATS: Final = {
    form.name: form
    for form in (
        CallFormat(
            name="hermes",
            template=("<tool_call>",),
            not_template=("<arg_key>", "<function=", "<parameter"),
            begin="<tool_call>",
            end="</tool_call>",
        ),
        CallFormat(
            name="mistral-args", template=("[TOOL_CALLS]", "[ARGS]"), begin="[TOOL_CALLS]", named="[ARGS]", between=""
        ),
        CallFormat(name="mistral", template=("[TOOL_CALLS]",), begin="[TOOL_CALLS]", listed=True, between=", "),
        CallFormat(
            name="llama3",
            template=("<|start_header_id|>", "parameters"),
            not_template=("TOOLCALL",),
            begin="<|python_tag|>",
            bare=True,
            between="; ",
            arguments="parameters",
        ),
        CallFormat(name="generic", template=(), begin="<tool_call>", end="</tool_call>", bare=True),
    )
}
"""By name, the first that fits wins. "generic" fits every model: the prompt explains it, since no template does."""

_NAME_KEYS: Final = frozenset({"name"})
_ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
_KEYS: Final = _NAME_KEYS | _ARGUMENT_KEYS | {"function", "type", "id"}
_NAME_CHARS: Final = re.compile(r"[A-Za-z0-9_.\-]*")
_SPACES: Final = re.compile(r"[ \t\r\n]*")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\\x00-\x1f]')
_SCALAR_END: Final = re.compile(r"[,}\]\s]")


def find_format(template: str) -> CallFormat | None:
    """The format that a template's source writes; None when it is none that we know."""
    for form in FORMATS.values():
        fits = all(text in template for text in form.template)
        if form.template and fits and not any(text in template for text in form.not_template):
            return form
    return None


class _Value:
    """The way to the end of a JSON object, array or string: brackets matched, strings skipped."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self.is_over = False
        self.is_broken = False

    def push(self, text: str, start: int) -> tuple[int, str]:
        """(where reading stopped, the value's text up to there). It stops at the value's end or where it breaks."""
        out: list[str] = []
        at = start
        while at < len(text) and not self.is_over:
            if self._escaped:
                self._escaped = False
                out.append(text[at])
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                return len(text), "".join(out)
            out.append(text[at : found.start()])
            at = found.start()
            char = text[at]
            if self._in_string and char < " ":
                out.append(json.dumps(char)[1:-1])
            elif char in "}]" and self._open[-1:] != ["{" if char == "}" else "["]:
                self.is_broken = True
                break
            else:
                self._turn(char)
                out.append(char)
            at += 1
        return at, "".join(out)

    def _turn(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
            self.is_over = not self._in_string and not self._open
        elif char in "{[":
            self._open.append(char)
        else:
            self._open.pop()
            self.is_over = not self._open


class ToolStage:
    """Implements data.spans.Stage. ``is_over``: one call was asked for and is complete; what follows is not read.

    A state is a method: it takes the text and a position in it and returns the position after what it used. What a
    candidate for a call has used so far is in ``_held``, until it is a call or turns out to be text.
    """

    def __init__(self, form: CallFormat, names: tuple[str, ...], *, call_ids: str, one_call: bool) -> None:
        self._form = form
        self._names = frozenset(names)
        self._call_ids = call_ids
        self._one_call = one_call
        self._spans: list[Span] = []
        self._space: list[str] = []  # white space, visible if text follows
        self._held: list[str] = []
        self._has_text = False
        self._num_calls = 0
        self._finder = StopMatcher([form.begin])
        self._breaker = StopMatcher([form.end or form.begin])
        self._state: Callable[[str, int], int] = self._beginning if form.bare else self._text
        self._new_candidate()

    @property
    def is_over(self) -> bool:
        return self._one_call and self._num_calls > 0

    def push(self, text: str) -> list[Span]:
        at = 0
        while at < len(text) and not self.is_over:
            at = self._state(text, at)
        spans, self._spans = self._spans, []
        return spans

    def finish(self) -> list[Span]:
        if self._is_announced and not self.is_over:
            if self._state == self._breaking:
                self._argue(self._breaker.finish(), 0)
            self._end_call()
        if self._state == self._between:
            self._held = []  # a mark that was cut off
        self._release(self._finder.finish())
        spans = self._spans + visible("".join(self._space)) * (self._num_calls == 0)
        self._spans, self._space = [], []
        return spans

    # --- text ---

    def _beginning(self, text: str, at: int) -> int:
        """Where a bare call may begin."""
        end = self._skip_space(text, at)
        if end < len(text):
            self._state = self._opening if text[end] in "{[" else self._text
        return end

    def _text(self, text: str, at: int) -> int:
        """Up to the next mark."""
        step = self._finder.push(text, at)
        self._show(step.text)
        if step.matched is not None:
            self._begin(step.matched)
        return step.used

    def _begin(self, mark: str) -> None:
        self._held.append(mark)
        self._finder = StopMatcher([self._form.begin])
        self._state = self._opening

    def _show(self, text: str) -> None:
        """Visible text. White space at its end waits for what follows it."""
        kept = text.rstrip(SPACE)
        if kept:
            space = "".join(self._space)
            if self._num_calls and not self._has_text:
                lead = len(kept) - len(kept.lstrip(SPACE))
                self._spans += hidden(len(space) + lead)
                kept, space = kept[lead:], ""
            self._space = []
            self._spans += visible(space + kept)
            self._has_text = True
            text = text[len(text.rstrip(SPACE)) :]
        if text:
            self._space.append(text)

    def _release(self, more: str = "") -> None:
        """The candidate is text."""
        held, self._held = "".join(self._held), []
        self._new_candidate()
        self._show(held + more)

    def _fail(self, at: int) -> int:
        """The candidate is text, or, if it has been a call already, that call is over; go on from here."""
        if self._is_announced:
            self._end_call()
            return at
        self._release()
        self._state = self._text
        return at

    # --- one call ---

    def _new_candidate(self) -> None:
        self._is_announced = False
        self._level = 0
        self._is_list = False
        self._name: str | None = None
        self._key = ""
        self._early: list[str] | None = None  # arguments before the name is known
        self._has_arguments = False
        self._string: list[str] = []
        self._value = _Value()
        self._mark = ""

    def _skip_space(self, text: str, at: int) -> int:
        found = _SPACES.match(text, at)
        assert found is not None
        if found.end() > at:
            if self._state in (self._beginning, self._between):
                self._space.append(found.group())
            else:
                self._use(found.group())
        return found.end()

    def _use(self, text: str) -> None:
        """Structure: part of the candidate, or of a call."""
        if self._is_announced:
            self._spans += hidden(len(text))
        else:
            self._held.append(text)

    def _opening(self, text: str, at: int) -> int:
        """After the mark: ``{``, ``[{``, or the name."""
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == "{" and not self._form.named:
            self._level, self._state = 1, self._member
        elif char == "[" and not self._is_list and not self._form.named:
            self._is_list = True
        elif self._form.named and not self._is_list and _NAME_CHARS.fullmatch(char):
            self._state = self._plain_name
            return at
        else:
            return self._fail(at)
        self._use(char)
        return at + 1

    def _plain_name(self, text: str, at: int) -> int:
        """name[CALL_ID]id[ARGS], of which the id may be absent."""
        name, char = "".join(self._string), text[at]
        if not _NAME_CHARS.fullmatch(char):
            self._name, self._string = name, []
            self._state = self._plain_mark
            return at if name in self._names else self._fail(at)
        self._string.append(char)
        self._held.append(char)
        return at + 1 if _begins_one_of(self._names, self._string) else self._fail(at + 1)

    def _plain_mark(self, text: str, at: int) -> int:
        self._mark += text[at]
        self._held.append(text[at])
        if self._mark == self._form.named:
            self._state = self._argument_object
        elif self._mark == CALL_ID:
            self._mark, self._state = "", self._plain_id
        elif not any(mark.startswith(self._mark) for mark in (self._form.named, CALL_ID)):
            return self._fail(at + 1)
        return at + 1

    def _plain_id(self, text: str, at: int) -> int:
        found = _NAME_CHARS.match(text, at)
        assert found is not None
        self._held.append(found.group())
        if found.end() < len(text):
            self._state = self._plain_mark
        return found.end()

    def _argument_object(self, text: str, at: int) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != "{":
            return self._fail(at)
        self._key = self._form.arguments
        return self._arguments(text, at)

    def _member(self, text: str, at: int) -> int:
        """In an object: a key, a comma, or its end."""
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char not in '",}':
            return self._fail(at)
        self._use(char)
        if char == '"':
            self._value, self._string, self._state = _Value(), [], self._read_key
            self._value.push('"', 0)
        elif char == "}":
            self._close()
        return at + 1

    def _read_string(self, text: str, at: int) -> tuple[int, str | None]:
        """(position, the string once it is complete)"""
        end, part = self._value.push(text, at)
        self._string.append(part)
        self._use(text[at:end])
        if not self._value.is_over:
            return end, None
        raw = "".join(self._string)
        try:
            whole = str(json.loads('"' + raw))
        except ValueError:  # a wrong escape
            whole = raw[:-1]
        return end, whole.encode("utf-8", "replace").decode()  # an escape may name half a character

    def _read_key(self, text: str, at: int) -> int:
        """Without a mark an object is no call as soon as it has a key that calls have not."""
        known = _KEYS if self._form.bare and not self._is_announced else None
        end, key = self._read_string(text[: at + 1] if known else text, at)
        if key is not None:
            self._key = key
            self._state = self._colon
        if known and not (_begins_one_of(known, self._string) if key is None else key in known):
            return self._fail(end)
        return end

    def _colon(self, text: str, at: int) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._use(":")
        self._state = self._member_value
        return at + 1

    def _member_value(self, text: str, at: int) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        is_first = self._early is None and not self._has_arguments
        if self._key in _ARGUMENT_KEYS and is_first and char in '{["':
            return self._arguments(text, at)
        self._use(char)
        self._value, self._string = _Value(), []
        if self._key in _NAME_KEYS and self._name is None:
            if char != '"':
                return self._fail(at + 1)
            self._value.push('"', 0)
            self._state = self._read_name
        elif self._key == "function" and char == "{" and not self._is_announced:
            self._level += 1
            self._state = self._member
        elif char in '{["':
            self._value.push(char, 0)
            self._state = self._skip_value
        elif char in ",}]":
            return self._fail(at + 1)
        else:
            self._string.append(char)
            self._state = self._skip_scalar
        return at + 1

    def _read_name(self, text: str, at: int) -> int:
        end, name = self._read_string(text[: at + 1], at)
        if name is not None:
            if name not in self._names:
                return self._fail(end)
            self._name = name
            self._state = self._member
            if self._early is not None:
                early, self._early = "".join(self._early), None
                self._announce()
                self._argue(early, 0)
        elif not _begins_one_of(self._names, self._string):
            return self._fail(end)
        return end

    def _skip_value(self, text: str, at: int) -> int:
        end, _ = self._value.push(text, at)
        self._use(text[at:end])
        if self._value.is_broken:
            return self._fail(end)
        if self._value.is_over:
            self._state = self._member
        return end

    def _skip_scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        end = found.start() if found else len(text)
        self._string.append(text[at:end])
        self._use(text[at:end])
        if found:
            self._state = self._member
            is_null = "".join(self._string) == "null"
            if self._key in _ARGUMENT_KEYS and not is_null and not self._is_announced:
                return self._fail(end)  # arguments that are a number
        return end

    # --- its arguments ---

    def _arguments(self, text: str, at: int) -> int:
        """The first character of the arguments."""
        self._value = _Value()
        self._has_arguments = True
        if self._name is None:
            self._early = []
        elif text[at] != '"':
            self._announce()
        if text[at] == '"':
            self._value.push('"', 0)
            self._string = []
            self._use('"')
            self._state = self._packed
            return at + 1
        self._state = self._arguing
        return at

    def _arguing(self, text: str, at: int) -> int:
        end, part = self._value.push(text, at)
        if self._early is not None:
            self._use(text[at:end])
            self._early.append(part)
            if self._value.is_broken:
                return self._fail(end)
        else:
            self._argue(part, end - at)
            if self._value.is_broken:
                self._state = self._breaking
        if self._value.is_over:
            self._end_arguments()
        return end

    def _packed(self, text: str, at: int) -> int:
        """Arguments as a string of JSON: whole, since an escape says nothing before its end."""
        end, packed = self._read_string(text, at)
        if packed is None:
            return end
        if self._early is not None:
            self._early.append(packed or "{}")
        else:
            self._announce()
            self._argue(packed or "{}", 0)
        self._end_arguments()
        return end

    def _breaking(self, text: str, at: int) -> int:
        """Broken arguments, raw, up to the end mark (or the next call's)."""
        step = self._breaker.push(text, at)
        self._argue(step.text, len(step.text))
        if step.matched is not None:
            self._breaker = StopMatcher([self._form.end or self._form.begin])
            self._end_call()
            self._end_mark(step.matched)
        return step.used

    def _end_arguments(self) -> None:
        if self._form.named:
            self._end_call()
        else:
            self._state = self._member

    def _argue(self, text: str, width: int) -> None:
        if text or width:
            call = ToolDelta(self._num_calls, arguments=text) if text else None
            self._spans.append(Span(width, call=call))

    def _announce(self) -> None:
        """The candidate is a call."""
        width = sum(map(len, self._space)) + sum(map(len, self._held))
        self._space, self._held = [], []
        self._is_announced = True
        call_id = f"call_{self._call_ids}{self._num_calls:02x}"
        self._spans.append(Span(width, call=ToolDelta(self._num_calls, call_id, self._name)))

    def _close(self) -> None:
        """The end of an object: of the call's, when it is the outermost."""
        self._level -= 1
        if self._level:
            return
        if not self._is_announced:
            if self._name is None:
                self._fail(0)
                return
            self._announce()
            self._argue("{}", 0)
        self._end_call()

    def _end_call(self) -> None:
        self._num_calls += 1
        self._new_candidate()
        self._state = self._between

    def _between(self, text: str, at: int) -> int:
        """After a call: punctuation of a list, a mark, another call, or text."""
        if not self._mark:
            at = self._skip_space(text, at)
            if at == len(text):
                return at
        char, mark = text[at], self._mark + text[at]
        if any(known.startswith(mark) for known in (self._form.end, self._form.begin) if known):
            self._mark = mark
            self._held.append(char)
            if mark in (self._form.end, self._form.begin):
                self._end_mark(mark)
            return at + 1
        if self._mark:
            return self._fail(at)
        if char == "{" and not self._form.named:
            self._state = self._opening
            return at
        if char in ",;]}":
            self._spans.append(Span(sum(map(len, self._space)) + 1))
            self._space = []
            return at + 1
        self._state = self._text
        return at

    def _end_mark(self, mark: str) -> None:
        self._held = []
        self._mark = ""
        if mark == self._form.end:
            self._spans.append(Span(sum(map(len, self._space)) + len(mark)))
            self._space = []
            self._state = self._text
        else:
            self._begin(mark)


def _begins_one_of(names: frozenset[str], parts: list[str]) -> bool:
    """Whether a string that has begun so may become one of the names; an escape may become any character."""
    seen = "".join(parts)
    return any(name.startswith(seen) for name in names) or ("\\" in seen and len(seen) < 6 * MAX_NAME)
