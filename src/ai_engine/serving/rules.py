"""Lists of small functions: when does a choice stop, may another one start. A new rule is a new line in a list.

Owns the decisions; scheduler.py and loop.py own what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ai_engine.ports.runtime import KvBudget, Limits
from ai_engine.ports.serving import Terminal
from ai_engine.serving.state import Choice, State

# Stop rules: asked after each token, which is the last of choice.tokens.


def _at_eos(choice: Choice, limits: Limits, eos_ids: frozenset[int]) -> Terminal | None:
    """Under a constraint it comes only where the text is whole, and then nothing else can come."""
    params = choice.params
    wanted = not params.ignore_eos and choice.num_output >= params.min_tokens
    ends = choice.tokens[-1] in eos_ids and (wanted or choice.group.grammar is not None)
    return "stop" if ends else None


def _at_stop_token(choice: Choice, limits: Limits, eos_ids: frozenset[int]) -> Terminal | None:
    params = choice.params
    ends = choice.tokens[-1] in params.stop_token_ids and choice.num_output >= params.min_tokens
    return "stop" if ends else None


def _at_max_tokens(choice: Choice, limits: Limits, eos_ids: frozenset[int]) -> Terminal | None:
    return "length" if choice.output_left <= 0 else None


def _at_context_limit(choice: Choice, limits: Limits, eos_ids: frozenset[int]) -> Terminal | None:
    return "length" if len(choice.tokens) >= limits.max_context else None


StopRule = Callable[[Choice, Limits, frozenset[int]], Terminal | None]
STOP_RULES: Final[Sequence[StopRule]] = (_at_eos, _at_stop_token, _at_max_tokens, _at_context_limit)


def stop_reason(choice: Choice, limits: Limits, eos_ids: frozenset[int]) -> Terminal | None:
    for rule in STOP_RULES:
        reason = rule(choice, limits, eos_ids)
        if reason is not None:
            return reason
    return None


# Admission rules: may this choice be opened now? Each sees the budget as it is, with nothing of the choice in it.


def _has_seat(state: State, choice: Choice, budget: KvBudget) -> bool:
    return len(state.running) < state.max_running


def _has_rows(state: State, choice: Choice, budget: KvBudget) -> bool:
    """Prompts that would not get a row for a while wait in the queue, where they pin no pages. A tenant waits for its
    own: those of others let it go first; and a short prompt waits for short ones only, as it goes before the long."""
    own = [c for c in state.running if c.tenant == choice.tenant]
    if not state.is_long(choice):
        own = [c for c in own if not state.is_long(c)]
    return sum(c.uncomputed for c in own) < 2 * state.limits.max_step_tokens


def _has_pages(state: State, choice: Choice, budget: KvBudget) -> bool:
    """Room for all it has to compute and some output, after what those who run were promised. A fork shares its
    prompt's full pages; other cached prefixes are not counted on. Whoever runs alone needs no reserve: preemption makes
    room."""
    tokens, growth = len(choice.tokens), state.config.growth_tokens
    if not state.running:
        return _pages(tokens, budget) <= budget.available
    promised = sum(state.pages_needed(c.seq_id, c.uncomputed + min(c.output_left, growth)) for c in state.running)
    shared = (choice.prompt_len - 1) // budget.page_tokens if choice.group.holds_prompt else 0
    # one more page: a fork's copy of its shared last page
    needed = _pages(tokens + min(choice.output_left, growth), budget) - shared + 1
    return promised + needed <= budget.available


def _pages(num_tokens: int, budget: KvBudget) -> int:
    return -(-num_tokens // budget.page_tokens)


AdmissionRule = Callable[[State, Choice, KvBudget], bool]
ADMISSION_RULES: Final[Sequence[AdmissionRule]] = (_has_seat, _has_rows, _has_pages)


def may_start(state: State, choice: Choice, budget: KvBudget) -> bool:
    return all(rule(state, choice, budget) for rule in ADMISSION_RULES)
