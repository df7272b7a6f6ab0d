"""The step loop: one thread that takes arrivals in, opens sequences, plans, runs the step and delivers its chunks.

Owns the state and the life of every request: each accepted one ends in exactly one terminal chunk per choice. The
native step releases the interpreter, so arrivals and cancels collect in the intake meanwhile. Asleep when there is
nothing to do. Does not choose (scheduler.py, rules.py) and knows no event loop (service.py).
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set

import msgspec

from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import AiEngineError, DeadlineExceeded, EngineError
from ai_engine.ports.runtime import Runtime, SeqOutput, StepPlan, StepResult, Work
from ai_engine.ports.serving import Chunk, Terminal, TokenLogprob, Usage
from ai_engine.ports.telemetry import (
    RequestScheduled,
    SequenceOpened,
    SequencePreempted,
    StepDone,
    StepWork,
    Telemetry,
    TokenTimes,
)
from ai_engine.serving import scheduler
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.cost import CostModel, Load, prior_s
from ai_engine.serving.rules import may_start, stop_reason
from ai_engine.serving.state import Choice, Group, State


class Arrive(msgspec.Struct, frozen=True):
    group: Group


class Cancel(msgspec.Struct, frozen=True):
    request_id: str
    index: int | None = None
    stopped: bool = False


class FailAll(msgspec.Struct, frozen=True):
    error: AiEngineError


Command = Arrive | Cancel | FailAll


class StepLoop:
    """``on_chunks(chunks)`` is called in the loop's thread, once per step that made any. Other threads may call `post`
    and read the plain attributes."""

    def __init__(
        self,
        runtime: Runtime,
        on_chunks: Callable[[list[Chunk]], None],
        *,
        config: ServingConfig,
        clock: Clock,
        telemetry: Telemetry,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._runtime = runtime
        self._on_chunks = on_chunks
        self._clock = clock
        self._telemetry = telemetry
        self._eos_ids = eos_ids
        self._now_s = clock.now_s()
        memory = runtime.memory
        cost = CostModel(prior_s(memory.weights, memory.kv_bytes_per_token))
        self.state = State(runtime.limits, config, runtime.pages_needed, cost)
        self._guesses = config.speculation == "lookup"
        self._budget = runtime.budget()
        self._groups: dict[str, Group] = {}
        self._open: dict[int, Choice] = {}  # by seq_id
        self._deadlines: list[tuple[float, str]] = []  # heap
        self._chunks: list[Chunk] = []  # made since the last delivery
        self._arrivals = 0
        self._queued_tokens = 0
        self._seq_ids = 0
        self._intake: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._stepping: StepPlan | None = None  # what the runtime is busy with
        self._thread = threading.Thread(target=self.run, name="step-loop", daemon=True)
        # read by other threads
        self.idle = True
        self.beat_s = clock.now_s()
        self.left_queue_requests = 0  # ever; the other thread counts those that entered
        self.left_queue_tokens = 0
        self.failed_steps = 0  # in a row
        self.last_error = ""
        self.tokens_per_s = 0.0  # rows computed per second of stepping, smoothed

    # other threads

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        self._intake.append(command)
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step that runs, or leave it behind. Requests still open get no more chunks."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def in_step(self) -> list[tuple[Work, str, int]]:
        """(work, request id, tokens computed before) of the step that runs now, while it does not end."""
        plan, open_now = self._stepping, self._open
        choices = [(work, open_now.get(work.seq_id)) for work in (plan.work if plan is not None else ())]
        return [(work, c.group.request.request_id, c.computed) for work, c in choices if c is not None]

    # the loop

    def run(self) -> None:
        """The thread's life: run steps while there is work, sleep while there is none."""
        while not self._stopping:
            self._wake.clear()
            if not self.run_once():
                self.idle = True
                self._wake.wait()

    def run_once(self) -> bool:
        """Take in what came and run a step; False when there was nothing to run."""
        self.beat_s = self._now_s = now = self._clock.now_s()
        self.idle = False
        try:
            self._take_in()
            self._expire(now)
            self._open_ready(now)
            if not self.state.has_work or self._gives_up():
                return False
            self._step(now)
        except Exception as error:  # a bug of ours must not end the loop: it would end every stream
            self._reset(error)
        finally:
            self._flush()
        return True

    def _gives_up(self) -> bool:
        """Only releases are left and the runtime keeps failing: they wait for the next request's plan."""
        return not self._groups and self.failed_steps >= self.state.config.max_failed_steps

    def _flush(self) -> None:
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._on_chunks(chunks)

    def _take_in(self) -> None:
        while self._intake:
            command = self._intake.popleft()
            if isinstance(command, Arrive):
                self._arrive(command.group)
            elif isinstance(command, Cancel):
                self._cancel(command)
            else:
                for group in list(self._groups.values()):
                    self._fail(group.unfinished, command.error)

    def _arrive(self, group: Group) -> None:
        request = group.request
        self._arrivals += 1
        for choice in group.choices:
            choice.age = (request.priority, self._arrivals, choice.index)
        self._groups[request.request_id] = group
        self._queued_tokens += group.expected_tokens
        self.state.queue.push(
            request.request_id,
            group,
            tenant=request.tenant,
            cost_tokens=group.expected_tokens,
            weight=request.weight,
            priority=request.priority,
        )
        if request.timeout_s is not None:
            heapq.heappush(self._deadlines, (group.deadline_s, request.request_id))

    def _cancel(self, command: Cancel) -> None:
        group = self._groups.get(command.request_id)
        for choice in group.unfinished if group is not None else ():
            if command.index in (None, choice.index):
                if command.stopped:
                    self._finish(choice, "stop")
                else:
                    self._finish(choice, "cancelled", code="cancelled")

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            group = self._groups.get(request_id)
            if group is not None and group.deadline_s <= now:
                message = f"the request did not finish within its timeout of {group.request.timeout_s:g} s"
                self._fail(group.unfinished, DeadlineExceeded(message))

    # opening

    def _open_ready(self, now: float) -> None:
        """Open who may start: the parked in order of age, then the queue; nobody passes one who has to wait, unless
        that one waits for its own tenant's seats."""
        barred = self.state.full_tenants()
        while (choice := self._next_waiting(barred)) is not None and may_start(self.state, choice, self._budget):
            if choice.group.queued:
                self.state.queue.pop(barred)
                self._left_queue(choice.group)
            else:
                self.state.parked.remove(choice)
            self._open_choice(choice, now)
            barred = self.state.full_tenants()

    def _next_waiting(self, barred: Set[str]) -> Choice | None:
        parked = next((choice for choice in self.state.parked if choice.tenant not in barred), None)
        if parked is not None:
            return parked
        group = self.state.queue.peek(barred)
        return None if group is None else group.leader

    def _open_choice(self, choice: Choice, now: float) -> None:
        group = choice.group
        self._seq_ids += 1
        spec = choice.spec(self._seq_ids, self._donor(group))
        try:
            cached = self._runtime.open(spec)
        except Exception as error:  # one request's failure, whatever it is
            self._fail([choice], _engine_error(error))
            return
        choice.seq_id, choice.computed = spec.seq_id, cached
        choice.scores_prompt, choice.scored_since_open = spec.params.prompt_logprobs is not None, 0
        self._open[spec.seq_id] = choice
        self.state.add_running(choice)
        self._budget = self._runtime.budget()
        if group.scheduled_s is None:
            group.scheduled_s, group.cached_tokens = now, cached
            self._telemetry.emit(
                RequestScheduled(group.request.request_id, now - group.arrived_s, choice.prompt_len, cached)
            )
        request = group.request
        self._telemetry.emit(
            SequenceOpened(
                spec.seq_id, request.request_id, request.trace_id, choice.index, now, len(choice.tokens), cached
            )
        )

    def _donor(self, group: Group) -> int | None:
        """An open sequence that holds the pages of the group's prompt; one that ends with the next plan still does."""
        if group.donor_id in self._open or group.donor_id in self.state.closing:
            return group.donor_id
        return next((c.seq_id for c in group.choices if c.seq_id and c.computed >= c.prompt_len), None)

    def _left_queue(self, group: Group) -> None:
        group.queued = False
        self._queued_tokens -= group.expected_tokens
        self.left_queue_requests += 1
        self.left_queue_tokens += group.expected_tokens

    # a step

    def _step(self, now: float) -> None:
        state = self.state
        plan, load = scheduler.plan(state, self._budget)
        assert plan.work or plan.release or plan.preempt, "work to do, and nothing planned"
        planned_s = self._clock.now_s()
        state.step = plan.step
        state.closing.clear()
        for seq_id in plan.preempt:
            self._preempt(self._open.pop(seq_id))
        self._stepping = plan
        try:
            result = self._runtime.step(plan)
        except Exception as error:  # whatever it was, only this plan's sequences pay for it
            self._fail_step(plan, error)
            return
        finally:
            self._stepping = None
        self._now_s = self._clock.now_s()
        if plan.work:
            self.failed_steps, self.last_error = 0, ""
        self._budget = result.budget
        predicted_s = state.cost.predict_s(load)
        self._learn(load, result)
        self._emit_step(plan, result, planned_s - now, predicted_s)
        given: defaultdict[str, float] = defaultdict(float)
        for work in plan.work:
            choice = self._open[work.seq_id]
            choice.computed += work.num_tokens
            given[choice.tenant] += work.num_tokens / choice.group.request.weight
            if self._guesses:
                choice.index_prompt(work.num_tokens)
        state.shares.serve(given, {choice.tenant for choice in state.running})
        for output in result.outputs:
            self.deliver(self._open[output.seq_id], output)

    def _preempt(self, choice: Choice) -> None:
        budget, group = self._budget, choice.group
        self._telemetry.emit(
            SequencePreempted(
                seq_id=choice.seq_id,
                request_id=group.request.request_id,
                index=choice.index,
                reason="kv_pages",
                computed_tokens=choice.computed,
                output_tokens=choice.num_output,
                pages_free=budget.available,
                pages_total=budget.total,
            )
        )
        self.state.running.remove(choice)
        choice.seq_id = choice.computed = 0
        self.state.park(choice)

    def _learn(self, load: Load, result: StepResult) -> None:
        seconds = result.ended_s - result.started_s
        if load.rows and seconds > 0:
            self.state.cost.observe(load, seconds)
            rate = load.rows / seconds
            self.tokens_per_s += (rate - self.tokens_per_s) * (0.1 if self.tokens_per_s else 1.0)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """Its sequences are in an undefined state: the runtime is asked to release all of them."""
        self._note_failure(error)
        self.state.closing += [*plan.release, *plan.preempt]
        for group in self._groups.values():
            group.donor_id = 0
        self._fail([self._open[work.seq_id] for work in plan.work], _engine_error(error))
        self._budget = self._runtime.budget()

    def _reset(self, error: Exception) -> None:
        """After a bug of ours: fail every request and start from an empty state."""
        self._note_failure(error)
        state, groups = self.state, list(self._groups.values())
        state.closing = list({*state.closing, *self._open})
        state.running.clear()
        state.parked.clear()
        self._open.clear()
        for choice in (c for group in groups for c in group.unfinished):
            choice.seq_id = 0
            self._fail([choice], _engine_error(error))

    def _note_failure(self, error: Exception) -> None:
        self.failed_steps += 1
        self.last_error = f"{type(error).__name__}: {error}"

    # results

    def deliver(self, choice: Choice, output: SeqOutput) -> None:
        """One choice's share of a step: its tokens up to where a stop rule ends them, as a chunk."""
        if output.failed is not None:
            self._fail([choice], EngineError(f"the model's output is unusable: {output.failed}"))
            return
        tokens: list[int] = []
        finish: Terminal | None = None
        for token in output.tokens:
            choice.tokens.append(token)
            tokens.append(token)
            finish = stop_reason(choice, self.state.limits, self._eos_ids)
            if finish is not None:
                break
        choice.computed += max(0, len(tokens) - 1)  # accepted drafts are computed already
        if tokens:
            self._note_tokens(choice)
            if self._guesses and finish is None:
                choice.guess(len(tokens))
        logprobs = None if output.logprobs is None else output.logprobs[: len(tokens)]
        scores = _fresh_scores(choice, output.prompt_logprobs)
        if finish is not None:
            self._finish(choice, finish, tokens=tokens, logprobs=logprobs, prompt_logprobs=scores)
        elif tokens or scores:
            self._chunks.append(
                Chunk(
                    request_id=choice.group.request.request_id,
                    index=choice.index,
                    tokens=tokens,
                    logprobs=logprobs,
                    prompt_logprobs=scores,
                    step=self.state.step,
                )
            )

    def _note_tokens(self, choice: Choice) -> None:
        group, now = choice.group, self._now_s
        if choice.first_token_s is None:
            choice.first_token_s = now
        else:
            choice.gaps_s.append(now - choice.last_token_s)
        choice.last_token_s = now
        if not group.forked and len(group.choices) > 1:
            group.forked, group.donor_id = True, choice.seq_id
            for sibling in group.unfinished:
                if sibling is not choice:
                    self.state.park(sibling)

    def _fail(self, choices: Sequence[Choice], error: AiEngineError) -> None:
        for choice in choices:
            self._finish(choice, "failed", code=error.code, message=error.message)

    def _finish(
        self,
        choice: Choice,
        finish: Terminal,
        *,
        tokens: Sequence[int] = (),
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """The only way a choice ends: its terminal chunk, its sequence closed, its request forgotten with the last."""
        assert choice.finish is None, (choice.group.request.request_id, choice.index, choice.finish)
        group = choice.group
        choice.finish = finish
        self._open.pop(choice.seq_id, None)
        self.state.close(choice)
        usage = _usage(choice)
        self._chunks.append(
            Chunk(
                request_id=group.request.request_id,
                index=choice.index,
                tokens=list(tokens),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                stop_token=tokens[-1] if finish == "stop" and tokens else None,
                error_code=code,
                error_message=message,
                usage=usage,
                step=self.state.step,
            )
        )
        self._emit_times(choice, usage)
        self._settle(group, choice)

    def _settle(self, group: Group, ended: Choice) -> None:
        """Forget a request without open choices; let another choice lead when the leader ended before the fork."""
        unfinished = group.unfinished
        if not unfinished:
            del self._groups[group.request.request_id]
            if group.queued:
                self.state.queue.remove(group.request.request_id)
                self._left_queue(group)
        elif group.leader is ended and not group.forked:
            group.leader = unfinished[0]
            if not group.queued:
                self.state.park(group.leader)

    # telemetry

    def _emit_step(self, plan: StepPlan, result: StepResult, plan_s: float, predicted_s: float) -> None:
        work = [_step_work(self._open[item.seq_id], item) for item in plan.work]
        decode = sum(item.decode for item in work)
        budget = result.budget
        self._telemetry.emit(
            StepDone(
                step=plan.step,
                started_s=result.started_s,
                ended_s=result.ended_s,
                plan_s=plan_s,
                num_seqs=len(plan.work),
                prefill_tokens=sum(item.prefill for item in work),
                decode_tokens=decode,
                kept_rows=result.kept_rows,
                running=len(self.state.running),
                queued_requests=len(self.state.queue),
                queued_tokens=self._queued_tokens,
                pages_total=budget.total,
                pages_free=budget.free,
                pages_cached=budget.cached,
                pages_held=budget.held,
                evicted_pages=result.evicted_pages,
                preempted=len(plan.preempt),
                work=work,
                predicted_s=predicted_s,
                drafted=sum(item.draft for item in work),
                accepted=sum(max(0, len(output.tokens) - 1) for output in result.outputs),
            )
        )

    def _emit_times(self, choice: Choice, usage: Usage) -> None:
        group, now = choice.group, self._now_s
        first_s, started_s = choice.first_token_s, group.scheduled_s
        self._telemetry.emit(
            TokenTimes(
                request_id=group.request.request_id,
                trace_id=group.request.trace_id,
                finish=choice.finish or "",
                ttft_s=None if first_s is None else first_s - group.arrived_s,
                e2e_s=now - group.arrived_s,
                queue_s=(now if started_s is None else started_s) - group.arrived_s,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                gaps_s=choice.gaps_s,
                ended_s=now,
                index=choice.index,
            )
        )

    # invariants

    def check_integrity(self) -> None:
        """Run after each step in tests: each unfinished choice is in one place, and nothing else is anywhere."""
        state = self.state
        state.check_integrity()
        assert {c.seq_id: c for c in state.running} == self._open
        placed = {id(c) for c in (*state.running, *state.parked)}
        for group in self._groups.values():
            assert group.unfinished
            for choice in group.unfinished:
                waits = group.queued or (not group.forked and choice is not group.leader)
                assert (id(choice) in placed) != waits, (group.request.request_id, choice.index)
        assert {id(c.group) for c in (*state.running, *state.parked)} <= {id(g) for g in self._groups.values()}
        assert all(group.queued for group in state.queue)


def _step_work(choice: Choice, work: Work) -> StepWork:
    """Before the step is accounted for: ``computed`` is still what it was when the step was planned."""
    decode = int(choice.uncomputed == 1)
    context = choice.computed + work.num_tokens + len(work.draft)
    return StepWork(work.seq_id, work.num_tokens - decode, decode, len(work.draft), context)


def _usage(choice: Choice) -> Usage:
    """The prompt is counted once, on choice 0."""
    if choice.index == 0:
        return Usage(choice.prompt_len, choice.num_output, choice.group.cached_tokens)
    return Usage(0, choice.num_output)


def _fresh_scores(choice: Choice, scores: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
    """Those not delivered before: a sequence that was preempted in its prompt scores its start again."""
    if scores is None:
        return None
    fresh = scores[max(0, choice.scored - choice.scored_since_open) :]
    choice.scored_since_open += len(scores)
    choice.scored = max(choice.scored, choice.scored_since_open)
    return fresh or None


def _engine_error(error: Exception) -> AiEngineError:
    return error if isinstance(error, AiEngineError) else EngineError(f"{type(error).__name__}: {error}")
