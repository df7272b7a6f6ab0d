"""The waiting line: priority first, then start-time fair queueing by tokens per tenant (Goyal, Vin and Cheng 1996).

A request starts at virtual time max(V, the tenant's last finish) and finishes its cost in tokens over its weight later;
the smallest start goes first and moves V. So a tenant that floods waits behind its own requests only, and one of twice
the weight gets twice the tokens. Owns order, not limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    item: T
    tenant: str
    start: float


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, str]] = []  # priority, virtual start, arrival, key
        self._items: dict[str, _Waiting[T]] = {}
        self._virtual = 0.0
        self._finish: dict[str, float] = {}  # tenant -> virtual finish of its last request
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """In order of arrival."""
        return (waiting.item for waiting in self._items.values())

    def push(self, key: str, item: T, *, tenant: str, cost_tokens: int, weight: float = 1.0, priority: int = 0) -> None:
        assert key not in self._items, key
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost_tokens / weight
        self._arrivals += 1
        self._items[key] = _Waiting(item, tenant, start)
        heapq.heappush(self._heap, (priority, start, self._arrivals, key))

    def peek(self, barred: Container[str] = ()) -> T | None:
        """The next one, passing over tenants that may not go now."""
        key = self._next(barred)
        return None if key is None else self._items[key].item

    def pop(self, barred: Container[str] = ()) -> T:
        key = self._next(barred)
        assert key is not None, "nobody waits who may go"
        waiting = self._items.pop(key)
        self._virtual = max(self._virtual, waiting.start)
        self._forget()
        return waiting.item

    def _next(self, barred: Container[str]) -> str | None:
        while self._heap and self._heap[0][3] not in self._items:
            heapq.heappop(self._heap)  # gone while waiting
        if not self._heap:
            return None
        first = self._heap[0][3]
        if self._items[first].tenant not in barred:
            return first
        may_go = (e for e in self._heap if e[3] in self._items and self._items[e[3]].tenant not in barred)
        return min(may_go, default=(0, 0.0, 0, None))[3]

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
