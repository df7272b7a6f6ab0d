"""What the runtime remembers of an open sequence: its tokens, how far it is computed, what its sampler needs.

Owns the token list (sampled tokens are appended here), the history that penalties look at, and the tables from which
a step gathers its sampling arrays. Does not know pages (kv.py) or steps (step.py).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Final

import numpy as np

from ai_engine.ports.errors import EngineError
from ai_engine.ports.kernels import F32, I32
from ai_engine.ports.runtime import SequenceSpec
from ai_engine.ports.sampling import SamplingParams

PARAM_FIELDS: Final = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "repetition": np.float32,
    "presence": np.float32, "frequency": np.float32, "seed": np.uint64, "num_top": np.int32,
}  # fmt: skip
"""Sampling arrays that are the same in every step of a sequence."""


class ParamTable:
    """One row of sampling parameters per slot of the page pool, one array per parameter: a step gathers from them."""

    def __init__(self) -> None:
        self.columns = {name: np.zeros(16, dtype) for name, dtype in PARAM_FIELDS.items()}

    def set(self, slot: int, params: SamplingParams) -> None:
        columns = self.columns
        if slot >= len(columns["seed"]):
            columns = self.columns = {n: np.concatenate([c, np.zeros_like(c)]) for n, c in columns.items()}
        columns["temperature"][slot] = params.temperature
        columns["top_k"][slot] = params.top_k
        columns["top_p"][slot] = params.top_p
        columns["min_p"][slot] = params.min_p
        columns["repetition"][slot] = params.repetition_penalty
        columns["presence"][slot] = params.presence_penalty
        columns["frequency"][slot] = params.frequency_penalty
        columns["seed"][slot] = (params.seed or 0) & 0xFFFFFFFFFFFFFFFF
        columns["num_top"][slot] = -1 if params.logprobs is None else params.logprobs


class History:
    """The distinct tokens of prompt and output, and how often each stands in the output. Grows by one token in O(1)."""

    def __init__(self, tokens: I32, prompt_len: int) -> None:
        distinct = np.unique(tokens[:prompt_len])
        self._token = np.zeros(2 * len(distinct) + 64, np.int32)
        self._count = np.zeros_like(self._token)
        self._token[: len(distinct)] = distinct
        self._at = {token: index for index, token in enumerate(distinct.tolist())}
        for token in tokens[prompt_len:].tolist():
            self.add(token)

    def add(self, token: int) -> None:
        """One more token of the output."""
        index = self._at.get(token)
        if index is None:
            index = self._at[token] = len(self._at)
            if index == len(self._token):
                self._token = np.concatenate([self._token, np.zeros_like(self._token)])
                self._count = np.concatenate([self._count, np.zeros_like(self._count)])
            self._token[index] = token
        self._count[index] += 1

    def arrays(self, guessed: SequenceOf[int] = ()) -> tuple[I32, I32]:
        """(tokens, counts) as they will be when ``guessed`` have been added."""
        size = len(self._at)
        if not guessed:
            return self._token[:size], self._count[:size]
        token, count = self._token[:size].copy(), self._count[:size].copy()
        for guess in guessed:
            found = np.flatnonzero(token == guess)
            if len(found):
                count[found[0]] += 1
            else:
                token, count = np.append(token, np.int32(guess)), np.append(count, np.int32(1))
        return token, count


class Sequence:
    """An open sequence. ``tokens[:num_known]`` are the prompt and all that was sampled; the keys and values of the
    first ``num_computed`` are in its pages. ``guarded`` are the tokens that ``min_tokens`` forbids at first."""

    __slots__ = (
        "bias_token", "bias_value", "guarded", "handle", "history", "matcher", "num_computed", "num_known", "params",
        "prompt_len", "ragged", "seq_id", "slot", "tokens",
    )  # fmt: skip

    def __init__(
        self, spec: SequenceSpec, tokens: I32, capacity: int, handle: int, slot: int, eos_ids: SequenceOf[int]
    ):
        params = spec.params
        self.seq_id, self.handle, self.slot = spec.seq_id, handle, slot
        self.params, self.prompt_len = params, spec.prompt_len
        self.num_known, self.num_computed = len(tokens), 0
        self.tokens: I32 = np.zeros(min(capacity, len(tokens) + params.max_tokens) + 1, np.int32)
        self.tokens[: len(tokens)] = tokens
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self.history = History(tokens, spec.prompt_len) if penalised else None
        self.bias_token: I32 = np.array(list(params.logit_bias), np.int32)
        self.bias_value: F32 = np.array(list(params.logit_bias.values()), np.float32)
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))
        self.guarded: I32 = np.array(sorted(set(ends)) if params.min_tokens > 0 else [], np.int32)
        self.matcher = None if spec.grammar is None else spec.grammar.open()
        self._match(tokens[spec.prompt_len :].tolist())
        self.ragged = penalised or len(self.bias_token) > 0 or len(self.guarded) > 0

    def append(self, tokens: SequenceOf[int]) -> None:
        """Sampled tokens."""
        end = self.num_known + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, end - len(self.tokens)), np.int32)])
        self.tokens[self.num_known : end] = tokens
        self.num_known = end
        if self.history is not None:
            for token in tokens:
                self.history.add(token)
        self._match(tokens)

    def _match(self, tokens: SequenceOf[int]) -> None:
        """Raises EngineError when the grammar does not take tokens that were drawn under it."""
        matcher = self.matcher
        for token in tokens if matcher is not None else ():
            if matcher is not None and not matcher.accept(token):
                raise EngineError(f"the grammar does not take token {token}, which it had allowed")

    def is_guarded(self, position: int) -> bool:
        """Whether the token drawn at ``position`` may not be one of ``guarded``."""
        return len(self.guarded) > 0 and position - self.prompt_len < self.params.min_tokens

    def bias(self, position: int) -> tuple[I32, F32]:
        """(tokens, values) added to the logits of the token drawn at ``position``."""
        if self.matcher is not None or not self.is_guarded(position):
            return self.bias_token, self.bias_value
        banned = np.full(len(self.guarded), -np.inf, np.float32)
        return np.concatenate([self.bias_token, self.guarded]), np.concatenate([self.bias_value, banned])
