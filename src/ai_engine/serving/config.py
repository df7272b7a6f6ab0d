"""Every number of the serving layer and its default, in one place; the server's flags take theirs from here. Owns no
behaviour."""

from __future__ import annotations

from typing import Literal

import msgspec


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True):
    # the queue
    max_queue_requests: int = 512
    max_queue_tokens: int = 1_000_000  # expected tokens (prompt and output) of queued requests
    expected_output_tokens: int = 256  # of a choice, when max_tokens is larger: what the queue's sums assume
    min_retry_after_s: float = 1.0
    max_retry_after_s: float = 60.0
    # a step
    step_target_s: float = 0.050  # predicted seconds of a step with running streams in it
    prefill_target_s: float = 0.400  # of a step that nobody is waiting for tokens from
    min_prefill_tokens: int = 8  # a prompt always advances by this much
    whole_prompt_tokens: int = 32  # one of no more is not cut where it nearly fits: it would wait a step per piece
    speculation: Literal["off", "lookup"] = "lookup"  # guess tokens that the prompt or the answer said before
    # constraints
    compile_threads: int = 2
    compile_deadline_s: float = 10.0  # of one; and as long may it wait for a thread. Loading the vocabulary is in it
    max_compiling: int = 64  # requests whose constraint is being compiled or waits for that
    # admission
    max_running: int = 0  # sequences open at once; 0: as many as a step takes
    growth_tokens: int = 64  # room kept for the output of each running sequence before another is admitted
    # health and life cycle
    stall_s: float = 30.0  # a step longer than this makes the server not ready, and is told with all stacks
    fail_stuck_s: float = 120.0  # a step longer than this fails the requests that run in it
    max_failed_steps: int = 3  # this many in a row make it not ready, until a step succeeds
    drain_grace_s: float = 2.0  # for the step loop to end what the deadline cut
