"""Who runs how many tokens this step: ``plan(state, budget)``, pure: no clock, no I/O, changes nothing.

Decodes first, then prompts in the time and rows that are left, then guesses where they pay. The oldest sequence can
always go on: when pages are short the youngest gives its back. What a preemption frees is spent in the next step, when
the runtime has counted it; a sequence that is short and has no younger one to preempt waits. Does not open or release
anything: loop.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ai_engine.ports.runtime import KvBudget, StepPlan, Work
from ai_engine.serving.cost import Load, attended
from ai_engine.serving.state import Choice, State

_WORTHWHILE: Final = 1.5  # where the target is out of reach, a chunk may add half of what the step costs anyway
_MIN_GAIN: Final = 1.03  # guesses must promise this much more than none
_PROBE_STEPS: Final = 64
_PROBE_GUESSES: Final = 3
_STRETCH: Final = 1.3  # a short prompt, or the end of one, may take so much of the target
_MIN_CHANCE: Final = 0.05  # a guess less likely than this is not worth looking at, nor one
_HOPELESS: Final = 0.7  # of this part of what its time gives otherwise


class Ledger:
    """What this step has left, and what has been given out so far."""

    def __init__(self, state: State, budget: KvBudget) -> None:
        self.state = state
        self.rows = state.limits.max_step_tokens
        self.logit_rows = state.limits.max_logit_rows
        self.seqs = state.limits.max_seqs
        self.pages = budget.available
        self.page_tokens = budget.page_tokens
        self.kept_for_oldest = 0  # pages that only state.running[0] may take
        self.load = Load()
        self.work: list[Work] = []
        self.decoding: list[Choice] = []  # who has the first places in ``work``
        self.preempt: list[int] = []
        self.taken: set[int] = set()  # sequences that work or are preempted
        self.freeing = 0  # pages that the preemptions should free

    def pages_for(self, choice: Choice) -> int:
        return self.pages + (self.kept_for_oldest if choice is self.state.running[0] else 0)

    def give(self, choice: Choice, num_tokens: int, pages: int) -> None:
        if choice is self.state.running[0]:
            self.pages += self.kept_for_oldest
            self.kept_for_oldest = 0
        logit_rows = choice.logit_rows(num_tokens)
        self.rows -= num_tokens
        self.logit_rows -= logit_rows
        self.seqs -= 1
        self.pages -= pages
        self.load.add(num_tokens, logit_rows, choice.computed)
        self.taken.add(choice.seq_id)
        self.work.append(Work(choice.seq_id, num_tokens, (), choice.group.request.adapter))

    def guess(self, place: int, choice: Choice, draft: tuple[int, ...], pages: int) -> None:
        """Add a draft to the decode at this place of ``work``."""
        rows, position = len(draft), choice.computed + 1
        self.rows -= rows
        self.logit_rows -= rows
        self.pages -= pages
        self.load.rows += rows
        self.load.logit_rows += rows
        self.load.attended += attended(rows, position)
        self.load.context += rows
        self.work[place] = Work(choice.seq_id, 1, draft, choice.group.request.adapter)

    def short(self, choice: Choice, pages: int) -> None:
        """``choice`` cannot go on for want of ``pages``: nobody younger may take the rest, and the youngest give theirs
        back, unless sequences that end with this plan may free enough."""
        missing = pages - self.pages_for(choice) - self.freeing
        self.pages = 0
        if self.state.closing:
            return
        for victim in reversed(self.state.running):
            if missing <= 0 or victim is choice:
                return
            held = -(-victim.computed // self.page_tokens)
            if held and victim.seq_id not in self.taken:
                self.preempt.append(victim.seq_id)
                self.taken.add(victim.seq_id)
                self.freeing += held
                missing -= held


def _keep_oldest_going(state: State, ledger: Ledger) -> None:
    """Set pages aside for the oldest before anyone else takes one."""
    if state.running:
        oldest = state.running[0]
        pages = state.pages_needed(oldest.seq_id, min(oldest.uncomputed, ledger.page_tokens))
        if pages > ledger.pages:
            ledger.short(oldest, pages)
        else:
            ledger.pages -= pages
            ledger.kept_for_oldest = pages


def _decode(state: State, ledger: Ledger) -> None:
    """One row for everyone with one token to compute."""
    for choice in state.running:
        if choice.uncomputed > 1 or choice.seq_id in ledger.taken:
            continue
        if not (ledger.rows and ledger.seqs and ledger.logit_rows):
            return
        pages = state.pages_needed(choice.seq_id, 1)
        if pages > ledger.pages_for(choice):
            ledger.short(choice, pages)
        else:
            ledger.give(choice, 1, pages)
            ledger.decoding.append(choice)


def _prefill(state: State, ledger: Ledger) -> None:
    """Chunks of prompts, in fair order. The first always advances; the next ones only by a chunk worth its overhead."""
    target_s = state.config.step_target_s if ledger.work else state.config.prefill_target_s
    without_s = state.cost.predict_s(ledger.load)
    if without_s > target_s:  # whatever the step carries (the cores are shared with others): crumbs would gain nothing
        target_s = _WORTHWHILE * without_s
    first = True
    prompts = state.prompts_in_order()
    for place, choice in enumerate(prompts):
        if choice.seq_id in ledger.taken:
            continue
        if not (ledger.rows and ledger.seqs):
            return
        num_tokens = _chunk(state, ledger, choice, target_s, first)
        if num_tokens == 0:
            continue
        first = False
        fits = _within_pages(state, ledger, choice, num_tokens)
        if fits == 0:
            if all(choice.age < other.age for other in prompts[place + 1 :]):  # else it may not hold up the older
                ledger.short(choice, state.pages_needed(choice.seq_id, 1))
        else:
            ledger.give(choice, fits, state.pages_needed(choice.seq_id, fits))


def _chunk(state: State, ledger: Ledger, choice: Choice, target_s: float, first: bool) -> int:
    """Rows for this prompt by time, rows and logits rows; 0: not in this step."""
    least = min(state.config.min_prefill_tokens, choice.uncomputed)
    in_time = state.cost.rows_within(target_s, ledger.load, choice.computed)
    if in_time < choice.uncomputed:  # what nearly fits is not worth another step
        short = choice.uncomputed <= state.config.whole_prompt_tokens and choice.computed == choice.group.cached_tokens
        limit_s = _STRETCH * target_s
        if short and first:  # its first token is not put off, though the others alone take all the time
            limit_s = max(limit_s, state.cost.predict_s(ledger.load) + target_s / 2)
        if short or choice.uncomputed <= in_time + least:
            stretched = state.cost.rows_within(limit_s, ledger.load, choice.computed)
            in_time = choice.uncomputed if stretched >= choice.uncomputed else in_time
    if in_time < least:
        in_time = least if first else 0
    num_tokens = min(in_time, choice.uncomputed, ledger.rows)
    if choice.scores_prompt:
        return min(num_tokens, ledger.logit_rows)
    if num_tokens == choice.uncomputed and ledger.logit_rows == 0:
        return num_tokens - 1  # its last row samples
    return num_tokens


def _within_pages(state: State, ledger: Ledger, choice: Choice, num_tokens: int) -> int:
    """The most of ``num_tokens`` that fit into the pages left; ends at a page's end when cut."""
    while num_tokens > 0:
        over = state.pages_needed(choice.seq_id, num_tokens) - ledger.pages_for(choice)
        if over <= 0:
            return num_tokens
        last_page = -(-(choice.computed + num_tokens) // ledger.page_tokens)
        num_tokens = (last_page - over) * ledger.page_tokens - choice.computed
    return 0


def _speculate(state: State, ledger: Ledger) -> None:
    """Guesses behind the decodes. They take what everyone else has left, within the step's target time."""
    for place, choice in enumerate(ledger.decoding):
        most = _most_guesses(state, ledger, choice)
        count = _worthwhile(state, ledger, choice, most) if most else 0
        pages = 0
        while count > 0:
            pages = state.pages_needed(choice.seq_id, 1 + count) - state.pages_needed(choice.seq_id, 1)
            if pages <= ledger.pages:
                assert choice.lookup is not None
                ledger.guess(place, choice, choice.lookup.guesses[:count], pages)
                break
            count -= 1


def _most_guesses(state: State, ledger: Ledger, choice: Choice) -> int:
    """By rows, and by what the answer may still hold: the step gives one token more than it accepts guesses."""
    if choice.lookup is None:
        return 0
    left = min(choice.output_left, state.limits.max_context - len(choice.tokens)) - 1
    return max(0, min(len(choice.lookup.guesses), ledger.rows, ledger.logit_rows, left))


def _worthwhile(state: State, ledger: Ledger, choice: Choice, most: int) -> int:
    """The number of guesses that gives the step the most useful rows per second: certain ones, and guesses by their
    chance to be right. 0 unless they give clearly more than none; but now and then a few likely ones are tried all the
    same, since what a row more costs is only learned from steps that have one."""
    assert choice.lookup is not None
    cost, rows, step_s = state.cost, ledger.load.rows, state.cost.predict_s(ledger.load)
    row_s, bend_s = cost.row_s(choice.computed + 1, samples=True), cost.bend_s(rows, ledger.load.logit_rows)
    best, best_rate = 0, _MIN_GAIN * rows / max(step_s, 1e-9)
    useful, chance, probe = float(rows), 1.0, 0
    probing = state.step % _PROBE_STEPS == 0
    least = _MIN_CHANCE if probing else max(_MIN_CHANCE, _HOPELESS * best_rate * row_s)
    for count in range(1, most + 1):
        chance *= choice.lookup.chance(count - 1)
        useful += chance
        seconds = step_s + count * row_s + cost.bend_s(rows + count, ledger.load.logit_rows + count) - bend_s
        if seconds > state.config.step_target_s or chance < least:
            break
        if useful / seconds > best_rate:
            best, best_rate = count, useful / seconds
        if probing and best == 0 and count <= _PROBE_GUESSES and chance >= 0.5:
            probe = count
    return best or probe


Stage = Callable[[State, Ledger], None]
STAGES: Final[Sequence[Stage]] = (_keep_oldest_going, _decode, _prefill, _speculate)


def plan(state: State, budget: KvBudget) -> tuple[StepPlan, Load]:
    """The step's plan, and the load it puts on the machine."""
    ledger = Ledger(state, budget)
    for stage in STAGES:
        stage(state, ledger)
    return StepPlan(state.step + 1, ledger.work, list(state.closing), ledger.preempt), ledger.load
