"""The contract in memory between Python and native code: the step header, the thread context, slots and rings.

Everything is 64-bit words unless said otherwise. Owns layouts and their version; does not own who fills them
(backend.py) or reads them (kernels).
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 2
"""Part of the kernel cache's key; raise it when a layout here changes meaning without changing text."""

SCRATCH_BYTES: Final = 8 << 20
"""Scratch memory of each thread."""

COUNTERS_PER_SLOT: Final = 4
COUNTER_STRIDE: Final = 64
COUNTER_DONE: Final = 32
"""A slot's work counters, one cache line: four i64 of items taken, then four pairs of i32: items done, items in all."""

FLAG_STRIDE: Final = 128
"""Bytes between two threads' barrier flags (i32)."""

SLOT_WORDS: Final = 4
SLOT_BARRIER: Final = 1
"""A slot is {function address, args address, flags, op index}; flag bit 0: what the call, and those
since the last barrier, wrote is complete before the next call starts."""

RING_HEADER_BYTES: Final = 128
RING_ENTRY_WORDS: Final = 4
"""A ring is 128 bytes of header (i64 entries ever written, i64 capacity, i64 thread), then ``capacity`` (a power of
two) entries {step, slot, start cycles, end cycles}. One writer; entry n lies at n mod capacity."""

SYS_FUTEX_X86: Final = 202
SYS_FUTEX_ARM: Final = 98
FUTEX_WAIT: Final = 128  # FUTEX_WAIT_PRIVATE
FUTEX_WAKE: Final = 129  # FUTEX_WAKE_PRIVATE

HEADER_FIELDS: Final[dict[str, str]] = {
    "T": "i64",  # token rows
    "S": "i64",  # sequences
    "R": "i64",  # logits rows
    "screened": "i64",  # how many of them, the first ones, a screened head may answer
    "step": "i64",
    "token_ids": "ptr",  # i32[T]
    "positions": "ptr",  # i32[T]
    "seq_start": "ptr",  # i32[S + 1]
    "context_len": "ptr",  # i32[S]
    "row_seq": "ptr",  # i32[T]: the sequence of each token row
    "page_table": "ptr",  # i32[S, page_stride]
    "page_stride": "i64",  # in entries
    "logit_rows": "ptr",  # i32[R]
    # ports.kernels.SampleBatch, one entry per logits row
    "temperature": "ptr",  # f32[R]
    "top_k": "ptr",  # i32[R]
    "top_p": "ptr",  # f32[R]
    "min_p": "ptr",  # f32[R]
    "repetition": "ptr",  # f32[R]
    "presence": "ptr",  # f32[R]
    "frequency": "ptr",  # f32[R]
    "seed": "ptr",  # u64[R]
    "position": "ptr",  # i32[R]
    "forced": "ptr",  # i32[R]
    "num_top": "ptr",  # i32[R]
    "history_start": "ptr",  # i32[R + 1]
    "history_token": "ptr",  # i32[...]
    "history_count": "ptr",  # i32[...]
    "bias_start": "ptr",  # i32[R + 1]
    "bias_token": "ptr",  # i32[...]
    "bias_value": "ptr",  # f32[...]
    "mask_row": "ptr",  # i32[R]
    "masks": "ptr",  # u32[M, mask_stride]
    "mask_stride": "i64",  # in u32 words
    # ports.kernels.SampleOut
    "out_token": "ptr",  # i32[R]
    "out_logprob": "ptr",  # f32[R]
    "out_top_token": "ptr",  # i32[R, ports.sampling.MAX_LOGPROBS]
    "out_top_logprob": "ptr",  # f32[R, ports.sampling.MAX_LOGPROBS]
}

CONTEXT_FIELDS: Final[dict[str, str]] = {
    "self": "ptr",  # this record
    "thread": "i64",
    "num_threads": "i64",
    "header": "ptr",
    "slots": "ptr",
    "num_slots": "i64",
    "scratch": "ptr",  # SCRATCH_BYTES, 64-byte aligned
    "flags": "ptr",  # barrier flags, FLAG_STRIDE apart
    "sleepers": "ptr",  # i32: threads asleep in a barrier
    "epoch": "i64",  # barriers passed by this thread
    "spin_cycles": "i64",  # how long to spin before sleeping
    "syscall": "ptr",  # libc's syscall()
    "counter_base": "ptr",  # work counters of slot 0
    "counters": "ptr",  # work counters of the slot that runs now
    "ring": "ptr",  # this thread's ring
}
