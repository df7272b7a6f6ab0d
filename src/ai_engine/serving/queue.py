"""The waiting line: priority first, then start-time fair queueing by tokens per tenant (Goyal, Vin and Cheng 1996).

A request starts at virtual time max(V, the tenant's last finish) and finishes its cost in tokens later; the smallest
start goes first and moves V. So a tenant that floods waits behind its own requests only. Owns order, not limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, str]] = []  # priority, virtual start, arrival, key
        self._items: dict[str, T] = {}
        self._virtual = 0.0
        self._finish: dict[str, float] = {}  # tenant -> virtual finish of its last request
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """In order of arrival."""
        return iter(self._items.values())

    def push(self, key: str, item: T, *, tenant: str, cost_tokens: int, priority: int = 0) -> None:
        assert key not in self._items, key
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost_tokens
        self._arrivals += 1
        self._items[key] = item
        heapq.heappush(self._heap, (priority, start, self._arrivals, key))

    def peek(self) -> T | None:
        while self._heap and self._heap[0][3] not in self._items:
            heapq.heappop(self._heap)  # removed while waiting
        return self._items[self._heap[0][3]] if self._heap else None

    def pop(self) -> T:
        assert self.peek() is not None, "the queue is empty"
        _, start, _, key = heapq.heappop(self._heap)
        self._virtual = max(self._virtual, start)
        item = self._items.pop(key)
        self._forget()
        return item

    def remove(self, key: str) -> None:
        del self._items[key]
        self._forget()

    def _forget(self) -> None:
        """Drop the counters of tenants that virtual time has caught up with."""
        if not self._items:
            self._heap.clear()
            self._finish.clear()
            self._virtual = 0.0
        elif len(self._finish) > 64 + 2 * len(self._items):
            self._finish = {tenant: at for tenant, at in self._finish.items() if at > self._virtual}
