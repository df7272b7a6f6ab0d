"""The step loop on a virtual clock, one iteration at a time, with the invariants checked after each."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.ports.errors import EngineError
from ai_engine.ports.runtime import (
    KvBudget,
    Limits,
    MemoryReport,
    SeqOutput,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest, Usage
from ai_engine.ports.telemetry import RequestScheduled, SequencePreempted, StepDone, TokenTimes
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.loop import Arrive, Cancel, StepLoop
from ai_engine.serving.state import Group
from ai_engine.testing import FakeRuntime, HashModel, MemoryTelemetry, ScriptedModel, VirtualClock
from ai_engine.testing.runtime import DEFAULT_LIMITS, NextToken, solo

EOS = 7


class Rig:
    """A loop without its thread, the chunks it delivered, and a check of everything after each iteration."""

    def __init__(self, runtime: FakeRuntime | None = None, **config: Any) -> None:
        self.clock = VirtualClock()
        self.runtime = runtime or FakeRuntime(HashModel(eos_id=EOS, eos_per_mille=20), clock=self.clock)
        self.telemetry = MemoryTelemetry()
        self.chunks: dict[tuple[str, int], list[Chunk]] = {}
        self.loop = StepLoop(
            self.runtime,
            self._deliver,
            config=ServingConfig(**config),
            clock=self.clock,
            telemetry=self.telemetry,
            eos_ids=frozenset({EOS}),
        )
        self.iterations = 0

    def _deliver(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            got = self.chunks.setdefault((chunk.request_id, chunk.index), [])
            assert not got or got[-1].finish is None, "a chunk after the terminal one"
            got.append(chunk)

    def submit(self, request: GenerateRequest) -> None:
        expected = len(request.prompt) + request.params.max_tokens * request.n
        self.loop.post(Arrive(Group(request, self.clock.now_s(), expected)))

    def once(self) -> bool:
        busy = self.loop.run_once()
        self.loop.check_integrity()
        self.runtime.check_integrity()
        self.iterations += 1
        assert self.iterations < 20_000, "it does not end"
        return busy

    def run(self) -> None:
        while self.once():
            pass
        assert self.runtime.open_sequences == 0
        assert self.runtime.budget().held == 0

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks.get((request_id, index), ()) for token in chunk.tokens]

    def end(self, request_id: str, index: int = 0) -> Chunk:
        end = self.chunks[request_id, index][-1]
        assert end.finish is not None
        return end

    def expected(self, request: GenerateRequest, index: int = 0) -> list[int]:
        assert request.params.seed is not None
        params = SamplingParams(seed=request.params.seed + index, max_tokens=request.params.max_tokens)
        spec = SequenceSpec(seq_id=0, tokens=request.prompt, prompt_len=len(request.prompt), params=params)
        tokens = solo(self.runtime, spec)
        return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def request(
    request_id: str, prompt: list[int], n: int = 1, timeout_s: float | None = None, **params: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        trace_id="",
        prompt=prompt,
        params=SamplingParams(**({"seed": 1, "max_tokens": 8} | params)),
        n=n,
        timeout_s=timeout_s,
    )


class CycleModel:
    """The next token depends on the last two and on nothing else, so every answer ends up in a circle: what look-up
    guesses is mostly right. ``eos_per_mille`` of the pairs end the answer."""

    def __init__(self, vocab_size: int = 12, *, eos_per_mille: int = 0) -> None:
        self._vocab_size, self._eos_per_mille = vocab_size, eos_per_mille

    def __call__(self, spec: SequenceSpec, tokens: Sequence[int]) -> int:
        draw = crc32(array("q", tokens[-2:]).tobytes(), 0 if spec.params.temperature == 0 else spec.params.seed or 0)
        if draw // 1000 % 1000 < self._eos_per_mille:
            return EOS
        return EOS + 1 + draw % self._vocab_size


@given(
    seed=st.integers(0, 1 << 32),
    num_pages=st.sampled_from([14, 16, 20, 40, 200]),
    growth=st.sampled_from([0, 8, 64]),
    model=st.sampled_from([HashModel(eos_id=EOS, eos_per_mille=10), CycleModel(), CycleModel(eos_per_mille=100)]),
)
@settings(max_examples=50, deadline=None)
def test_any_workload_ends_as_each_request_would_alone(
    seed: int, num_pages: int, growth: int, model: NextToken
) -> None:
    rng = random.Random(seed)
    clock = VirtualClock()
    limits = Limits(
        max_context=400, max_step_tokens=48, max_seqs=6, max_logit_rows=rng.choice([6, 20]), vocab_size=1000
    )
    rig = Rig(FakeRuntime(model, limits=limits, num_pages=num_pages, clock=clock), growth_tokens=growth)
    requests = [_random_request(f"r{i}", rng) for i in range(25)]
    waiting, cancelled = list(requests), set()
    while rig.once() or waiting:
        for _ in range(rng.randrange(3)):
            if waiting:
                arrived = waiting.pop(0)
                rig.submit(arrived)
                if rng.random() < 0.3:
                    cancelled.add(arrived.request_id)
        if cancelled and rng.random() < 0.3:
            rig.loop.post(Cancel(rng.choice(sorted(cancelled)), rng.choice([None, 0, 1])))
    rig.run()
    assert rig.loop.failed_steps == 0, rig.loop.last_error
    for r in requests:
        for index in range(r.n):
            if rig.end(r.request_id, index).finish == "cancelled":
                assert r.request_id in cancelled
            else:
                assert rig.tokens(r.request_id, index) == rig.expected(r, index)
        if r.params.prompt_logprobs is not None and r.request_id not in cancelled:
            chunks = rig.chunks[r.request_id, 0]
            assert [lp.token for chunk in chunks for lp in chunk.prompt_logprobs or ()] == r.prompt[1:]


def _random_request(request_id: str, rng: random.Random) -> GenerateRequest:
    prompt = [1] * rng.choice([0, 0, 16, 40]) + [rng.randrange(1000) for _ in range(rng.choice([1, 5, 33, 80]))]
    return request(
        request_id,
        prompt,
        n=rng.choice([1, 1, 2, 4]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 2, 10, 40, 100]),
        prompt_logprobs=rng.choice([None, None, 0]),
        logprobs=rng.choice([None, 2]),
    )


def _steps(speculation: str, *requests: GenerateRequest, model: NextToken | None = None) -> tuple[Rig, list[StepDone]]:
    clock = VirtualClock()
    runtime = FakeRuntime(
        model or CycleModel(), clock=clock, seconds_per_step=0.008, seconds_per_row=0.0008, num_pages=512
    )
    rig = Rig(runtime, speculation=speculation)
    for r in requests:
        rig.submit(r)
    rig.run()
    return rig, rig.telemetry.of(StepDone)


def test_speculation_gives_the_same_chunks_in_fewer_steps() -> None:
    asked = [
        request("plain", [1, 2, 3], max_tokens=120, logprobs=2, prompt_logprobs=1),
        request("choices", [4, 5, 6], n=3, max_tokens=80, temperature=1.0),
        request("short", [9, 8], max_tokens=7, logprobs=0),
    ]
    (off, steps_off), (on, steps_on) = (_steps(mode, *asked) for mode in ("off", "lookup"))
    for r in asked:
        for index in range(r.n):
            assert on.tokens(r.request_id, index) == off.tokens(r.request_id, index)
            assert len(on.tokens(r.request_id, index)) == r.params.max_tokens
            assert on.end(r.request_id, index).usage == off.end(r.request_id, index).usage
            logprobs = [
                [lp for chunk in rig.chunks[r.request_id, index] for lp in chunk.logprobs or ()] for rig in (on, off)
            ]
            assert logprobs[0] == logprobs[1]
    assert sum(step.drafted for step in steps_off) == 0
    assert sum(step.accepted for step in steps_on) > 0.7 * sum(step.drafted for step in steps_on) > 50
    assert len(steps_on) < 0.5 * len(steps_off)
    made = sum(step.decode_tokens + step.accepted for step in steps_on)
    assert made == 120 + 3 * 80 + 7 - 2 - 1, "each token is a decode or an accepted guess, but for two prompts' firsts"


def test_speculation_is_off_where_nothing_repeats() -> None:
    """Answers without repetition cost at most 1 % more rows and no more steps."""
    asked = [request(f"r{i}", [i] * 50, max_tokens=200, ignore_eos=True) for i in range(4)]
    (_, off), (_, on) = (_steps(mode, *asked, model=HashModel(1000)) for mode in ("off", "lookup"))
    assert len(on) <= len(off)
    assert sum(step.drafted for step in on) < 0.01 * sum(step.decode_tokens for step in on) + 10


def test_speculation_stops_and_starts_again_with_the_text() -> None:
    """A prompt of pairs that are each followed by another token: after two equal tokens, guesses are nearly always
    wrong at first, later always right."""
    pairs = [token for i in range(40) for token in (20, 21, 100 + i, 300 + i)]
    answer = [token for i in range(60) for token in (20, 21, 500 + i)]
    answer += [token for i in range(60) for token in (20, 21, 22, 23, 24, 25)]
    model = ScriptedModel({tuple(pairs): answer}, eos_id=EOS)
    rig, steps = _steps("lookup", request("r", pairs, max_tokens=len(answer), ignore_eos=True), model=model)
    assert rig.tokens("r") == answer
    half = next(i for i, step in enumerate(steps) if sum(s.decode_tokens + s.accepted for s in steps[:i]) >= 180)
    tried = [sum(step.drafted for step in part) for part in (steps[:20], steps[half - 40 : half])]
    assert tried[1] == 0 < tried[0], "it has given up"
    late = steps[half:]
    assert sum(step.accepted for step in late) > 2 * len(late), "and found its way back"


@pytest.mark.parametrize(
    ("params", "given", "finish"),
    [
        ({}, 5, "stop"),
        ({"ignore_eos": True, "max_tokens": 8}, 8, "length"),
        ({"ignore_eos": True, "stop_token_ids": (35,)}, 7, "stop"),
        ({"ignore_eos": True, "max_tokens": 6}, 6, "length"),
        ({"min_tokens": 6, "max_tokens": 8}, 8, "length"),
    ],
)
def test_an_answer_may_end_among_accepted_guesses(params: dict[str, Any], given: int, finish: str) -> None:
    said = [30, 31, 32, 33, EOS, 34, 35, 36]
    prompt = [*said, 1, 2]
    model = ScriptedModel({tuple(prompt): said}, eos_id=EOS)
    rig, steps = _steps("lookup", request("r", prompt, **({"max_tokens": 20} | params)), model=model)
    assert rig.tokens("r") == said[:given]
    assert rig.end("r").finish == finish
    assert rig.end("r").usage == Usage(10, given)
    assert len(steps) < 6, "the prompt's, two alone, and one with guesses"


def test_a_queued_request_whose_client_left_never_runs() -> None:
    rig = Rig(max_running=1)
    for name in ("runs", "left", "stays"):
        rig.submit(request(name, [1, 2], max_tokens=5, ignore_eos=True))
    rig.once()
    rig.loop.post(Cancel("left"))
    rig.run()
    assert rig.end("left").finish == "cancelled"
    assert [event.request_id for event in rig.telemetry.of(RequestScheduled)] == ["runs", "stays"]
    assert rig.tokens("left") == []


def test_an_old_request_is_not_starved_by_a_stream_of_new_ones() -> None:
    rig = Rig(growth_tokens=0)
    rig.submit(request("old", list(range(600)), max_tokens=100, ignore_eos=True))
    for i in range(400):
        rig.submit(request(f"new{i}", [i, 2], max_tokens=5))
        rig.once()
        if ("old", 0) in rig.chunks and rig.chunks["old", 0][-1].finish:
            break
    assert rig.end("old").finish == "length"


def test_a_preempted_sequence_resumes_before_the_queue_and_gives_the_same_tokens() -> None:
    clock = VirtualClock()
    rig = Rig(FakeRuntime(HashModel(), num_pages=8, clock=clock), growth_tokens=0)
    first, second = (request(name, [i] * 33, max_tokens=60, ignore_eos=True) for i, name in enumerate("ab", 1))
    third = request("c", [3] * 20, max_tokens=2)
    for r in (first, second, third):
        rig.submit(r)
    rig.run()
    told = rig.telemetry.of(SequencePreempted)
    assert len(told) == sum(event.preempted for event in rig.telemetry.of(StepDone)) >= 1
    for event in told:
        assert (event.request_id, event.reason, event.pages_total) == ("b", "kv_pages", 8)
        assert event.computed_tokens >= 33 + event.output_tokens - 1 > 0
        assert event.pages_free < 2
    for r in (first, second, third):
        assert rig.tokens(r.request_id) == rig.expected(r) or EOS in rig.expected(r)
    finished = [event.request_id for event in rig.telemetry.of(TokenTimes)]
    assert finished.index("a") < finished.index("b")


def test_choices_of_a_long_prompt_run_together_in_a_small_pool() -> None:
    rig = Rig(FakeRuntime(HashModel(), num_pages=40), growth_tokens=16)
    rig.submit(request("r", list(range(480)), n=4, max_tokens=16, ignore_eos=True))
    rig.run()
    assert max(event.num_seqs for event in rig.telemetry.of(StepDone)) == 4
    assert sum(event.preempted for event in rig.telemetry.of(StepDone)) == 0


@pytest.mark.parametrize(
    ("script", "params", "given", "finish", "stop_token"),
    [
        ([4, 5, EOS, 9], {}, [4, 5, EOS], "stop", EOS),
        ([4, 5, EOS, 9], {"ignore_eos": True, "max_tokens": 4}, [4, 5, EOS, 9], "length", None),
        ([4, EOS, 5, EOS], {"min_tokens": 3}, [4, EOS, 5, EOS], "stop", EOS),
        ([4, 5, 6], {"stop_token_ids": (5,)}, [4, 5], "stop", 5),
        ([4, 5, 6], {"max_tokens": 2}, [4, 5], "length", None),
        ([EOS], {"max_tokens": 1}, [EOS], "stop", EOS),
    ],
)
def test_stop_rules(
    script: list[int], params: dict[str, Any], given: list[int], finish: str, stop_token: int | None
) -> None:
    rig = Rig(FakeRuntime(ScriptedModel({(1, 2): script}, eos_id=EOS)))
    rig.submit(request("r", [1, 2], **params))
    rig.run()
    assert rig.tokens("r") == given
    assert (rig.end("r").finish, rig.end("r").stop_token) == (finish, stop_token)


def test_context_limit() -> None:
    limits = Limits(max_context=10, max_step_tokens=16, max_seqs=2, max_logit_rows=2, vocab_size=100)
    rig = Rig(FakeRuntime(HashModel(100), limits=limits))
    rig.submit(request("r", [1] * 6, max_tokens=50, ignore_eos=True))
    rig.run()
    assert (rig.end("r").finish, len(rig.tokens("r"))) == ("length", 4)


def test_the_step_time_stays_near_its_target_once_learned() -> None:
    clock = VirtualClock()
    limits = Limits(max_context=8000, max_step_tokens=512, max_seqs=8, max_logit_rows=8, vocab_size=1000)
    runtime = FakeRuntime(
        HashModel(), limits=limits, num_pages=1000, clock=clock, seconds_per_step=0.005, seconds_per_row=0.0005
    )
    rig = Rig(runtime)
    rig.submit(request("stream", [1, 2], max_tokens=100, ignore_eos=True))
    for _ in range(20):
        rig.once()
    rig.submit(request("intruder", list(range(900)) * 5, max_tokens=1))
    rig.run()
    mixed = [e for e in rig.telemetry.of(StepDone) if e.decode_tokens and e.prefill_tokens][3:]
    seconds = [e.ended_s - e.started_s for e in mixed]
    assert len(seconds) > 10
    assert max(seconds) < 0.060
    assert sum(seconds) / len(seconds) > 0.035, "the budget is used"


def test_a_deadline_ends_a_request_between_steps() -> None:
    clock = VirtualClock()
    rig = Rig(FakeRuntime(HashModel(), clock=clock, seconds_per_step=0.1))
    rig.clock = clock
    rig.loop = StepLoop(
        rig.runtime, rig._deliver, config=ServingConfig(), clock=clock, telemetry=rig.telemetry, eos_ids=frozenset()
    )
    rig.submit(request("r", [1], max_tokens=100, timeout_s=0.35, ignore_eos=True))
    rig.run()
    assert rig.end("r").error_code == "deadline_exceeded"
    assert len(rig.tokens("r")) == 4


def test_a_failed_open_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    real = rig.runtime.open

    def fail(spec: SequenceSpec) -> int:
        if spec.tokens[0] == 13:
            raise EngineError("no")
        return real(spec)

    monkeypatch.setattr(rig.runtime, "open", fail)
    rig.submit(request("bad", [13], n=2))
    rig.submit(request("good", [1]))
    rig.run()
    assert [rig.end("bad", i).error_code for i in (0, 1)] == ["engine_error"] * 2
    assert rig.end("good").finish in ("stop", "length")


def test_a_bug_fails_what_runs_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for i in range(3):
        rig.submit(request(f"r{i}", [i + 20, 1], n=2, ignore_eos=True))
    rig.once()

    def broken(*args: object) -> None:
        raise AssertionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(rig.loop, "deliver", broken)
        rig.once()
    rig.submit(request("later", [5]))
    rig.run()
    assert all(rig.end(f"r{i}", k).error_code == "engine_error" for i in range(3) for k in (0, 1))
    assert rig.end("later").finish in ("stop", "length")


def test_a_runtime_that_only_fails_does_not_spin() -> None:
    def broken(plan: StepPlan) -> None:
        raise EngineError("broken")

    rig = Rig(FakeRuntime(HashModel(), on_step=broken))
    rig.submit(request("r", [1]))
    while rig.loop.run_once():
        rig.iterations += 1
        assert rig.iterations < 10
    assert rig.end("r").error_code == "engine_error"
    assert rig.loop.failed_steps >= 3


class _Still:
    """A runtime that costs nothing: the loop's own time is what is left."""

    limits = DEFAULT_LIMITS
    memory = MemoryReport(weights=1000, kv=1, activations=1, workspace=1, kv_bytes_per_token=1)

    def budget(self) -> KvBudget:
        return KvBudget(16, 10_000, 10_000, 0, 0)

    def open(self, spec: SequenceSpec) -> int:
        return 0

    def pages_needed(self, seq_id: int, num_tokens: int) -> int:
        return 0

    def step(self, plan: StepPlan) -> StepResult:
        outputs = [SeqOutput(work.seq_id, [1]) for work in plan.work]
        return StepResult(plan.step, outputs, len(outputs), self.budget(), 0.0, 0.001)


def step_overhead_s(batch: int, steps: int = 300) -> float:
    """CPU seconds of one iteration in steady decode; the best of five runs."""
    delivered: list[Chunk] = []
    loop = StepLoop(
        _Still(),  # type: ignore[arg-type]
        delivered.extend,
        config=ServingConfig(),
        clock=VirtualClock(),
        telemetry=MemoryTelemetry(),
    )
    for i in range(batch):
        loop.post(Arrive(Group(request(f"r{i}", [1], max_tokens=4000), 0.0, 1)))
    loop.run_once()
    best = 1.0
    for _ in range(5):
        start = time.thread_time()
        for _ in range(steps):
            loop.run_once()
        best = min(best, (time.thread_time() - start) / steps)
    assert len(delivered) == batch * (1 + 5 * steps)
    return best


def test_overhead_of_a_step() -> None:
    assert step_overhead_s(1) < 200e-6
    assert step_overhead_s(16) < 1e-3
