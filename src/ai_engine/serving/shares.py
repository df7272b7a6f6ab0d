"""Fair shares of what runs: whose prompts a step computes first, and how many seats one tenant may take.

The queue (queue.py) shares admission. That is not enough: a tenant that came first and sits everywhere would make the
next one wait until a long answer ends, and then until the prompts before it are computed. So a tenant with a name
leaves some seats to others, and prompts go in order of the tokens that their tenants were given: the virtual token
counters of Sheng et al. 2024 (Fairness in Serving Large Language Models), kept for tenants that have something open; a
newcomer starts at the lowest of them. Owns counters and the bound on seats; knows no sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Shares:
    """Tokens over weight that each tenant's open sequences were given."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def served(self, tenant: str) -> float:
        found = self._served.get(tenant)
        return min(self._served.values(), default=0.0) if found is None else found

    def serve(self, given: Mapping[str, float], tenants: Iterable[str]) -> None:
        """A step gave these tokens over weight; ``tenants`` have something open, the others are forgotten."""
        self._served = {tenant: self.served(tenant) + given.get(tenant, 0.0) for tenant in tenants}


def seats_of_one(max_running: int) -> int:
    """Seats that one tenant may take: an eighth, and at least one, is left to others."""
    return max(1, max_running - max(1, max_running // 8))
