"""The text ports: strings to ids, ids to bytes, messages to a prompt; and TextService, the three as the doors use them.

Tokenizer and ChatTemplate are what data builds from a model's files. TextService is what api is handed:
data.service makes one from data's pieces, tests make one from a ByteTokenizer. Encoding is async, because it runs off
the event loop; decoding is not, because it runs once per token and must cost a few microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from ai_engine.ports.grammar import Constraint
from ai_engine.ports.serving import TokenLogprob


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may do with the functions. ``only`` names the one that it must call, ``allowed`` those that it is
    told of (none named: all)."""

    mode: Literal["none", "auto", "required"] = "auto"
    only: str = ""
    allowed: tuple[str, ...] = ()
    parallel: bool = True


ANY_CALL: Final = ToolChoice()


class ReplyForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer to a conversation is written: what `encode_chat` finds out and `open_output` needs. The default
    is plain text."""

    reasoning: tuple[str, str] | None = None  # the tags around the reasoning part
    inside_reasoning: bool = False  # the prompt opens that part, so the answer begins in it
    calls: str = ""  # the format of function calls, of data.tools.FORMATS; "": text is only text
    names: tuple[str, ...] = ()  # the functions that may be called
    one_call: bool = False  # the answer ends with its first complete call
    constraint: Constraint | None = None  # what makes the answer a call
    call_rules: str = ""  # rules of Lark whose ``answer`` is calls alone, for an answer that is calls or something else
    warnings: tuple[str, ...] = ()  # what was asked for and this model cannot do


TEXT_ONLY: Final = ReplyForm()


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """``stamps``, monotonic seconds: taken up by the encoder, template rendered, ids made; None: took no time."""

    ids: list[int]
    form: ReplyForm = TEXT_ONLY
    stamps: tuple[float, float, float] | None = None


class Tokenizer(Protocol):
    """Implementation: data.tokenizer.ModelTokenizer. Thread-safe; encode may take long, call it off the event loop."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        """Ids of ``text``. ``add_special`` prepends BOS where the model wants one (never a second one);
        ``parse_special`` turns the text of control tokens into those tokens."""
        ...

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        """The exact bytes this token stands for in a running text; b"" for control tokens when skipped."""
        ...

    def is_special(self, token: int) -> bool: ...


class ChatTemplate(Protocol):
    """Implementation: data.template.JinjaTemplate."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text, special tokens included. Raises InvalidRequest when the template refuses the messages."""
        ...


class TokenEntry(msgspec.Struct, frozen=True):
    """One token whose text is out. ``text_offset`` counts characters before it: of the choice's visible text, or of the
    prompt's for a token of an echoed prompt."""

    token: int
    data: bytes  # its exact bytes, a control token's name included
    logprob: TokenLogprob | None
    text_offset: int


class ToolDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. Indexes count from 0 without a gap, in order; ``id`` and ``name`` come with a call's
    first delta and no other; the ``arguments`` of all its deltas join to the raw JSON text ("{}" when there are none).
    """

    index: int
    id: str | None = None  # "call_..."
    name: str | None = None
    arguments: str = ""


class TextDelta(msgspec.Struct, frozen=True):
    """What a push or finish let out. ``text`` is whole characters that can no longer become part of a stop string (with
    a stop: up to before it, or after it, if stops are included); ``entries`` the tokens of the visible text that is now
    out; ``stop`` the stop string that ended the text, "" when a complete call did: nothing may be pushed after it."""

    text: str
    entries: list[TokenEntry] = []
    stop: str | None = None
    reasoning: str = ""  # the part between reasoning tags, tags excluded
    calls: list[ToolDelta] = []


class OutputStream(Protocol):
    """The text of one choice. Implementation: data.output.OutputPath. Not thread-safe, single use."""

    @property
    def num_tokens(self) -> int:
        """The usage so far: every token taken, up to and with the one that completed a stop string."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them up to and with the one that completed the reasoning part's end tag."""
        ...

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> TextDelta:
        """Take the next tokens (and their log probabilities, one each)."""
        ...

    def finish(self) -> TextDelta:
        """The end without a stop: lets out held text; an incomplete character becomes one U+FFFD."""
        ...


class TextService(Protocol):
    """What the doors need to know about text. Implementations: data.service.ModelText; tests have a byte-level one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def template_source(self) -> str:
        """The chat template as the model's files have it."""
        ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = ANY_CALL,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> Encoded:
        """Template, then tokens, and the form of the answer. A message has ``role`` and ``content`` (str or None;
        parts are joined before), and may have ``name``, ``tool_calls``, ``tool_call_id``, ``reasoning_content``.
        ``tools`` are OpenAI's: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
        Raises InvalidRequest when the template refuses them."""
        ...

    async def encode_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        """A plain prompt; BOS where the model wants one, and the text of control tokens as those tokens."""
        ...

    async def encode_infill(self, prefix: str, suffix: str) -> Encoded:
        """A prompt whose answer goes between the two. Raises UnsupportedParameter when the model has no tokens that
        say so."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The token's exact bytes for logprobs and echo; a control token's name in UTF-8."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of whole tokens, control tokens skipped, invalid bytes as U+FFFD."""
        ...

    def open_output(
        self,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        form: ReplyForm = TEXT_ONLY,
        call_ids: str = "",
    ) -> OutputStream:
        """``stops`` apply to visible text alone; one that is complete before token ``min_tokens`` is text. Call i gets
        the id "call_" + ``call_ids`` + i in hex."""
        ...
