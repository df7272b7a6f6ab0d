"""SamplingParams: everything the sampler kernel and the stop rules need to know about one request."""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20
"""The largest ``top_logprobs`` of the OpenAI API; the sampler kernel keeps room for as many."""

MAX_SCREENED_TOP_K = 32
"""A row that draws among more tokens than these is never answered by a screened head (see ports.kernels)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Already validated: doors check ranges (and raise InvalidValue) before they build one.

    Distribution: logits -> penalties and bias -> mask -> temperature -> top_k -> top_p -> min_p -> draw.
    ``temperature == 0`` is greedy: argmax after penalties, bias and mask; ties go to the lowest id.
    The draw uses only (seed, position), so it does not depend on company. ``seed`` None means that the
    door draws one; by the time a request reaches serving it is set.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # subtracted once from tokens seen in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best (0..MAX_LOGPROBS)
    prompt_logprobs: int | None = None  # as above, for every prompt token but the first
