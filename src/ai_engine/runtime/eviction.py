"""Which cached page is given up first: policies behind one small interface.

Owns the ranking. Does not own the pages: the pool asks for a priority whenever a page becomes a candidate (nobody
holds it and no cached page continues it), and takes the lowest.
"""

from __future__ import annotations

from typing import Final, Protocol

from ai_engine.ports.errors import ConfigError


class PageStats:
    """What a policy may look at. Ticks count the pool's operations; ``depth`` is the page's place in its sequence."""

    __slots__ = ("created_tick", "depth", "used_tick", "uses")

    def __init__(self, tick: int, depth: int) -> None:
        self.created_tick = self.used_tick = tick
        self.depth, self.uses = depth, 1


class EvictionPolicy(Protocol):
    def priority(self, page: PageStats) -> float:
        """The lowest is evicted first."""
        ...

    def evicted(self, priority: float) -> None:
        """A page of this priority was evicted."""
        ...


class Lru:
    """Least recently used."""

    def priority(self, page: PageStats) -> float:
        return page.used_tick

    def evicted(self, priority: float) -> None:
        pass


class Fifo:
    """Oldest first, however often used."""

    def priority(self, page: PageStats) -> float:
        return page.created_tick

    def evicted(self, priority: float) -> None:
        pass


class Hybrid:
    """Recency and frequency times cost: GreedyDual-Size-Frequency (Cherkasova, 1998). A page is worth its uses times
    what its recomputation costs, which grows with the context before it; the worth of what was evicted last is added,
    so that pages that were popular long ago go too."""

    cost_per_depth: Final = 1 / 64

    def __init__(self) -> None:
        self._age = 0.0

    def priority(self, page: PageStats) -> float:
        return self._age + page.uses * (1.0 + page.depth * self.cost_per_depth)

    def evicted(self, priority: float) -> None:
        self._age = priority


POLICIES: Final[dict[str, type[Lru] | type[Fifo] | type[Hybrid]]] = {"lru": Lru, "fifo": Fifo, "hybrid": Hybrid}


def make_policy(name: str) -> EvictionPolicy:
    """Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"--eviction is {name!r}; use one of {', '.join(POLICIES)}", param="eviction")
    return POLICIES[name]()
