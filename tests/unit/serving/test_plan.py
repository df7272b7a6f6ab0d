"""plan(): never over a limit, each sequence once, the oldest goes on, the same answer for the same question."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.ports.runtime import KvBudget, Limits, StepPlan
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.cost import CostModel
from ai_engine.serving.lookup import Lookup, TokenIndex
from ai_engine.serving.scheduler import plan
from ai_engine.serving.state import Choice, Group, State

PAGE = 4
PRIOR_S = (0.002, 0.064, 0.002, 0.004, 0.001)
"""Seconds of one unit of each feature of the cost model."""


def choice(order: int, known: int, computed: int, *, scores: bool = False, priority: int = 0) -> Choice:
    request = GenerateRequest(
        request_id=str(order),
        trace_id="",
        prompt=[1] * known,
        params=SamplingParams(seed=0, max_tokens=100, prompt_logprobs=0 if scores else None),
        priority=priority,
    )
    made = Group(request, 0.0, 1).choices[0]
    made.age = (priority, order, 0)
    made.seq_id, made.computed, made.scores_prompt = order, computed, scores
    return made


def guessing(made: Choice, guesses: Sequence[int], *, match: int = 16) -> Choice:
    """The same choice, with guesses for what comes next; ``match`` 16 is nearly sure of them, 2 hopes for half."""
    made.lookup = Lookup(TokenIndex(), 0)
    made.lookup.guesses, made.lookup.match = tuple(guesses), match
    return made


def state(
    choices: Sequence[Choice], limits: Limits, *, closing: Sequence[int] = (), config: ServingConfig | None = None
) -> State:
    by_id = {c.seq_id: c for c in choices}

    def pages_needed(seq_id: int, num_tokens: int) -> int:
        computed = by_id[seq_id].computed
        return -(-(computed + num_tokens) // PAGE) - -(-computed // PAGE)

    made = State(limits, config or ServingConfig(), pages_needed, CostModel(PRIOR_S))
    for c in choices:
        made.add_running(c)
    made.closing = list(closing)
    return made


def limits(max_step_tokens: int = 64, max_seqs: int = 8, max_logit_rows: int = 8) -> Limits:
    return Limits(
        max_context=1000,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        max_logit_rows=max_logit_rows,
        vocab_size=10,
    )


def budget(free: int, held: int = 0) -> KvBudget:
    return KvBudget(PAGE, free + held, free, 0, held)


@st.composite
def situations(draw: st.DrawFn) -> tuple[State, KvBudget]:
    made_limits = limits(draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    most = min(made_limits.max_step_tokens, made_limits.max_seqs, made_limits.max_logit_rows)
    choices = []
    for order in range(1, draw(st.integers(0, most)) + 1):
        known = draw(st.integers(1, 60))
        computed = draw(st.one_of(st.just(known - 1), st.integers(0, known - 1)))
        made = choice(order, known, computed, scores=draw(st.booleans()), priority=draw(st.integers(0, 1)))
        if draw(st.booleans()):
            guessing(made, range(draw(st.integers(0, 15))), match=draw(st.sampled_from([2, 16])))
        choices.append(made)
    held = sum(-(-c.computed // PAGE) for c in choices)
    closing = draw(st.sampled_from([(), (), (77,)]))
    config = ServingConfig(
        min_prefill_tokens=draw(st.integers(1, 20)), step_target_s=draw(st.sampled_from([0.003, 0.01, 0.05]))
    )
    return state(choices, made_limits, closing=closing, config=config), budget(draw(st.integers(0, 12)), held)


@given(situations())
@settings(max_examples=400, deadline=None)
def test_every_plan_is_within_its_limits(situation: tuple[State, KvBudget]) -> None:
    s, b = situation
    before = [(c.seq_id, c.computed, len(c.tokens)) for c in s.running]
    made, load = plan(s, b)
    by_id = {c.seq_id: c for c in s.running}
    ids = [work.seq_id for work in made.work]
    assert len({*ids, *made.preempt}) == len(ids) + len(made.preempt), "each sequence at most once"
    assert len(ids) <= s.limits.max_seqs
    assert sum(work.num_tokens + len(work.draft) for work in made.work) == load.rows <= s.limits.max_step_tokens
    kept = sum(by_id[work.seq_id].logit_rows(work.num_tokens) + len(work.draft) for work in made.work)
    assert kept == load.logit_rows <= s.limits.max_logit_rows
    assert all(1 <= work.num_tokens <= by_id[work.seq_id].uncomputed for work in made.work)
    assert sum(s.pages_needed(work.seq_id, work.num_tokens + len(work.draft)) for work in made.work) <= b.available
    assert made.release == s.closing
    # progress: the oldest works, or room is being made for it
    if s.running:
        oldest = s.running[0].seq_id
        assert oldest not in made.preempt
        others_hold = any(c.computed for c in s.running[1:])
        if b.available or not s.pages_needed(oldest, 1):
            assert oldest in ids or made.preempt or made.release or not others_hold
        assert made.work or made.preempt or made.release or (not others_hold and b.available == 0)
    # pure
    assert plan(s, b)[0] == made
    assert before == [(c.seq_id, c.computed, len(c.tokens)) for c in s.running]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=StepPlan) == made, "a plan is a plain value"


@given(situations(), st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_guesses_take_only_what_others_left(situation: tuple[State, KvBudget], output_left: int) -> None:
    """The plan without its guesses is the plan of a state that has none; with them it keeps to the step's time."""
    s, b = situation
    for c in s.running:
        c.params = msgspec.structs.replace(c.params, max_tokens=c.num_output + output_left)
    made, load = plan(s, b)
    by_id = {c.seq_id: c for c in s.running}
    for work in made.work:
        c = by_id[work.seq_id]
        assert len(work.draft) <= output_left - 1, "the step itself gives one more"
        if work.draft:
            assert c.lookup is not None
            assert work.draft == c.lookup.guesses[: len(work.draft)]
            assert (work.num_tokens, c.uncomputed) == (1, 1)
    for c in s.running:
        c.lookup = None
    bare, bare_load = plan(s, b)
    assert [msgspec.structs.replace(work, draft=()) for work in made.work] == bare.work
    assert (made.release, made.preempt) == (bare.release, bare.preempt)
    assert s.cost.predict_s(load) <= max(s.config.step_target_s, s.cost.predict_s(bare_load)) + 1e-9


def test_sure_guesses_are_tried_and_doubtful_ones_are_not() -> None:
    """A row costs 1 ms beside 4.2 ms of a step for one token: worth it from a chance of about a quarter."""
    s = state([guessing(choice(1, 9, 8), range(15))], limits(max_logit_rows=32))
    assert len(plan(s, budget(1000))[0].work[0].draft) > 3
    assert s.running[0].lookup is not None
    s.running[0].lookup._right = [0.1, 0.1, 0.1, 0.1]
    assert plan(s, budget(1000))[0].work[0].draft == ()


def test_in_a_full_batch_a_guess_has_to_be_as_useful_as_a_row_of_the_others() -> None:
    """Alone a chance of a half pays; beside 31 sequences, whose step costs little more per row, it does not."""
    alone = state([guessing(choice(1, 9, 8), range(15), match=2)], limits(max_logit_rows=64))
    crowd = [guessing(choice(1, 9, 8), range(15), match=2), *(choice(n, 9, 8) for n in range(2, 33))]
    full = state(crowd, limits(64, 32, 64))
    alone.step = full.step = 1
    assert plan(alone, budget(1000))[0].work[0].draft
    assert not plan(full, budget(1000))[0].work[0].draft


def test_likely_guesses_are_tried_now_and_then_though_they_seem_too_dear() -> None:
    """A model that has only ever seen one row a step may believe that the next row costs as much again."""
    s = state([guessing(choice(1, 9, 8), range(15))], limits(max_logit_rows=32))
    s.cost = CostModel((0.0, 0.064, 0.090, 0.0, 0.0))
    tried = []
    for s.step in range(1, 129):
        tried.append(len(plan(s, budget(1000))[0].work[0].draft))
    assert [step for step, guesses in enumerate(tried, 1) if guesses] == [64, 128]
    assert max(tried) == 3
    guessing(s.running[0], range(15), match=2)
    assert plan(s, budget(1000))[0].work[0].draft == (0,), "of the doubtful ones no more than one"


def test_guesses_stop_at_the_context_and_at_the_pages() -> None:
    def tried(known: int, pages: int) -> int:
        sure = guessing(choice(1, known, known - 1), range(15))
        assert sure.lookup is not None
        sure.lookup._right = list(sure.lookup._seen)
        return len(plan(state([sure], limits(max_logit_rows=32)), budget(pages))[0].work[0].draft)

    assert tried(997, 1000) == 2, "positions 997 and 998; the token after them is the context's last"
    assert [tried(10, pages) for pages in (0, 1, 2, 9)] == [2, 6, 10, 15], "12, 16 and 20 tokens fill whole pages"


def test_decodes_come_first_and_prompts_take_the_time_that_is_left() -> None:
    s = state([choice(1, 500, 0), choice(2, 9, 8), choice(3, 9, 8)], limits(max_step_tokens=512))
    made, load = plan(s, budget(1000))
    assert [(w.seq_id, w.num_tokens) for w in made.work[:2]] == [(2, 1), (3, 1)]
    chunk = made.work[2].num_tokens
    assert 16 <= chunk < 500
    assert s.cost.predict_s(load) <= s.config.step_target_s


def test_alone_a_prompt_gets_a_longer_step() -> None:
    one = plan(state([choice(1, 500, 0)], limits(max_step_tokens=512)), budget(1000))[0]
    mixed = plan(state([choice(1, 500, 0), choice(2, 9, 8)], limits(512)), budget(1000))[0]
    assert one.work[0].num_tokens > mixed.work[1].num_tokens


def test_the_end_of_a_prompt_that_nearly_fits_is_not_left_for_another_step() -> None:
    def chunk_of(left: int) -> int:
        prompt = choice(2, 100, 100 - left)
        return plan(state([choice(1, 9, 8), prompt], limits(max_step_tokens=512)), budget(1000))[0].work[1].num_tokens

    fits = chunk_of(99)
    assert 16 < fits < 90
    assert [chunk_of(left) for left in (fits, fits + 8, fits + 9)] == [fits, fits + 8, fits]


def test_a_prompt_advances_though_decodes_alone_are_over_the_target() -> None:
    s = state([choice(1, 100, 0), choice(2, 9, 8)], limits(), config=ServingConfig(step_target_s=1e-6))
    assert [w.num_tokens for w in plan(s, budget(1000))[0].work] == [1, 8]


def test_the_youngest_is_preempted_for_the_oldest() -> None:
    s = state([choice(1, 9, 8), choice(2, 9, 8), choice(3, 6, 5)], limits())
    made, _ = plan(s, budget(0))
    assert made.preempt == [3]
    assert [w.seq_id for w in made.work] == [], "1 waits for the pages of 3; 2 must not take them"


def test_who_needs_no_page_goes_on_while_others_wait() -> None:
    s = state([choice(1, 9, 8), choice(2, 8, 7), choice(3, 9, 8)], limits())
    made, _ = plan(s, budget(0))
    assert made.preempt == [3]
    assert [w.seq_id for w in made.work] == [2]


def test_pages_of_ending_sequences_are_awaited_before_anyone_is_preempted() -> None:
    s = state([choice(1, 9, 8), choice(2, 9, 8)], limits(), closing=[9])
    made, _ = plan(s, budget(0))
    assert made == StepPlan(1, [], [9], [])


def test_priority_comes_before_age() -> None:
    s = state([choice(1, 9, 8, priority=1), choice(2, 9, 8)], limits())
    made, _ = plan(s, budget(0))
    assert made.preempt == [1]


def test_prompt_logprobs_are_cut_to_the_logits_rows() -> None:
    s = state([choice(1, 100, 0, scores=True), choice(2, 9, 8)], limits(max_logit_rows=8))
    made, load = plan(s, budget(1000))
    assert [w.num_tokens for w in made.work] == [1, 7]
    assert load.logit_rows == 8


def test_planning_changes_nothing() -> None:
    s = state([choice(1, 9, 8), choice(2, 50, 0)], limits(), closing=[5])
    twin = copy.copy(s.closing)
    plan(s, budget(3))
    assert (s.step, s.closing) == (0, twin)
