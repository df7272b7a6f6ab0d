"""Free pages as aligned runs of 2^k, split and merged as buddies (Knowlton, 1965).

Owns which pages are free. Does not know who holds the others (kv.py).
"""

from __future__ import annotations


class BuddyRuns:
    """``num_free`` pages of ``num_pages``; a run of order k is 2^k pages that starts at a multiple of 2^k."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, num_pages
        self.num_pages = num_pages
        self.num_free = 0
        self._free: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length())]
        self.put_run(0, num_pages)

    def take(self, order: int = 0) -> int | None:
        """First page of a free run of this order, cut from the smallest run that has it; None if there is none."""
        free = self._free
        for at in range(order, len(free)):
            if free[at]:
                page = free[at].popitem()[0]
                while at > order:
                    at -= 1
                    free[at][page + (1 << at)] = None
                self.num_free -= 1 << order
                return page
        return None

    def put(self, page: int, order: int = 0) -> None:
        """Give a run back; it merges with its free buddy as far as that goes."""
        free = self._free
        self.num_free += 1 << order
        while order + 1 < len(free) and free[order].pop(page ^ (1 << order), 0) is None:
            page &= ~(1 << order)
            order += 1
        free[order][page] = None

    def put_run(self, first: int, count: int) -> None:
        """Give ``count`` neighbouring pages back."""
        end = first + count
        while first < end:
            order = (end - first).bit_length() - 1
            if first:
                order = min(order, (first & -first).bit_length() - 1)
            self.put(first, order)
            first += 1 << order

    @property
    def largest_run(self) -> int:
        """Pages of the largest free run."""
        return next((1 << order for order in reversed(range(len(self._free))) if self._free[order]), 0)

    def pages(self) -> list[int]:
        """Every free page, for checks."""
        return [page + i for order, runs in enumerate(self._free) for page in runs for i in range(1 << order)]
