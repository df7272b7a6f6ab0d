"""The page pool: which sequence holds which KV page; sharing of equal prefixes, forks, eviction.

Owns every page's state. A page is *free*, *held* by one or more sequences, or *cached*: full, held by nobody, kept
because a later prompt may begin with the same tokens. Does not own the bytes of a page (the kernels', which
`copy_page` reaches).

Full pages form a tree: a node's key is (its parent node or the namespace, the page's own tokens). A dict compares
keys in full, and node numbers are never used twice, so two prompts share a page exactly when all their tokens up to
its end are equal; no collision of hashes can mix them. Whoever holds a page holds the pages before it. A page that
others can see (shared, or a node) is copied before it is written.

Every page's state also stands in a byte map that others may look at (the console draws it).

Handles carry a generation: a handle that was released raises StaleHandle for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from ai_engine.ports.errors import EngineError, StaleHandle
from ai_engine.ports.kernels import I32
from ai_engine.ports.runtime import KvBudget
from ai_engine.runtime.buddy import BuddyRuns
from ai_engine.runtime.eviction import EvictionPolicy, PageStats

SLOT_BITS: Final = 32
FREE, CACHED, HELD, SHARED = range(4)
"""A page's state in the map; shared is held by more than one sequence."""
LONG_PAGES: Final = 4
"""A sequence of at least as many pages gets a run of neighbouring pages set aside when it is opened."""


class PageMap(Protocol):
    """A byte per page, as bytearray."""

    def __getitem__(self, page: int, /) -> int: ...

    def __setitem__(self, page: int, state: int, /) -> None: ...


class _Node(PageStats):
    """A full page in the tree of prefixes."""

    __slots__ = ("children", "id", "key", "page", "parent", "stamp")

    def __init__(self, id: int, key: tuple[int | str, bytes], page: int, parent: _Node | None, tick: int, depth: int):
        super().__init__(tick, depth)
        self.id, self.key, self.page, self.parent = id, key, page, parent
        self.children = 0
        self.stamp = 0  # changes whenever the node stops being a candidate for eviction


class _Seq:
    """One open sequence: its pages in order, the first of which are nodes, and how many tokens are computed."""

    __slots__ = ("handle", "namespace", "nodes", "num_tokens", "pages", "reserve_end", "reserve_first", "slot")

    def __init__(self, handle: int, slot: int, namespace: str) -> None:
        self.handle, self.slot, self.namespace = handle, slot, namespace
        self.pages: list[int] = []
        self.nodes: list[_Node] = []
        self.num_tokens = 0
        self.reserve_first = self.reserve_end = 0  # free pages set aside; others in need take them from the end


class PagePool:
    """``num_pages`` pages of ``page_tokens`` tokens. All methods are microseconds; none is thread-safe.

    ``table[slot(handle)]`` is a sequence's page table, ``max_seq_pages`` wide. ``page_map`` (num_pages long, zeros at
    first) takes each page's state: FREE, CACHED, HELD, SHARED.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        max_seq_pages: int,
        policy: EvictionPolicy,
        copy_page: Callable[[int, int], None],
        *,
        share_prefixes: bool = True,
        page_map: PageMap | None = None,
    ) -> None:
        self.page_map: PageMap = bytearray(num_pages) if page_map is None else page_map
        self.num_pages, self.page_tokens, self.share_prefixes = num_pages, page_tokens, share_prefixes
        self.table: I32 = np.zeros((16, max_seq_pages), np.int32)
        self.num_evicted = self.num_copied = self.num_hit_tokens = 0
        self._policy, self._copy_page = policy, copy_page
        self._buddy = BuddyRuns(num_pages)
        self._refs = [0] * num_pages
        self._node_of: list[_Node | None] = [None] * num_pages
        self._index: dict[tuple[int | str, bytes], _Node] = {}
        self._candidates: list[tuple[float, int, int, _Node]] = []  # heap of (priority, serial, stamp, node)
        self._slots: list[_Seq | None] = []
        self._free_slots: list[int] = []
        self._generations: list[int] = []
        self._reserving: dict[int, _Seq] = {}
        self._num_reserved = self._num_cached = self._num_held = 0
        self._tick = self._next_node = self._serial = 0

    # --- what callers ask

    def budget(self) -> KvBudget:
        free = self._buddy.num_free + self._num_reserved
        return KvBudget(self.page_tokens, self.num_pages, free, self._num_cached, self._num_held)

    @property
    def num_open(self) -> int:
        return len(self._slots) - len(self._free_slots)

    def slot(self, handle: int) -> int:
        return self._get(handle).slot

    def namespace(self, handle: int) -> str:
        return self._get(handle).namespace

    def num_tokens(self, handle: int) -> int:
        """Tokens whose keys and values are in the pages."""
        return self._get(handle).num_tokens

    def pages(self, handle: int) -> list[int]:
        return list(self._get(handle).pages)

    def fragmentation(self) -> float:
        """Share of the free pages outside the largest free run."""
        free = self._buddy.num_free
        return 1.0 - self._buddy.largest_run / free if free else 0.0

    def pages_needed(self, handle: int, num_tokens: int) -> int:
        """Pages to be taken before ``num_tokens`` more fit, a copy of a shared last page included."""
        seq = self._get(handle)
        need = -(-(seq.num_tokens + num_tokens) // self.page_tokens) - len(seq.pages)
        return max(0, need) + (num_tokens > 0 and self._must_copy(seq))

    def cached_tokens(self, namespace: str, tokens: I32) -> int:
        """What `open` would find computed; changes nothing."""
        return len(self._lookup(namespace, tokens)) * self.page_tokens

    # --- life of a sequence

    def open(self, namespace: str, tokens: I32, *, expect_tokens: int = 0, reuse: bool = True) -> tuple[int, int]:
        """A new sequence that holds the cached pages its ``tokens`` begin with; at least one token is left to compute.
        Returns (handle, cached tokens). ``expect_tokens`` is how long it may get, for setting pages aside."""
        seq = self._new(namespace)
        self._tick += 1
        if reuse and self.share_prefixes:
            self._match(seq, tokens)
        num_pages = -(-max(len(tokens), expect_tokens) // self.page_tokens) - len(seq.pages)
        if num_pages >= LONG_PAGES <= self._buddy.num_free:
            self._set_aside(seq, min(num_pages, self.num_pages // 4))
        return seq.handle, seq.num_tokens

    def fork(self, source: int, namespace: str, num_tokens: int) -> int:
        """A new sequence that shares the first ``num_tokens`` computed tokens of another of the same namespace."""
        origin = self._get(source)
        assert 0 <= num_tokens <= origin.num_tokens, (num_tokens, origin.num_tokens)
        assert namespace == origin.namespace, (namespace, origin.namespace)
        seq = self._new(namespace)
        self._tick += 1
        seq.num_tokens = num_tokens
        seq.pages = origin.pages[: -(-num_tokens // self.page_tokens)]
        seq.nodes = origin.nodes[: num_tokens // self.page_tokens]
        for page in seq.pages:
            self._hold(page)
        self.table[seq.slot, : len(seq.pages)] = seq.pages
        return seq.handle

    def extend(self, handle: int, num_tokens: int) -> None:
        """Take the pages that ``num_tokens`` more tokens need. EngineError, and nothing taken, when there are too
        few."""
        seq = self._get(handle)
        if num_tokens == 0:
            return
        pages, copy = seq.pages, self._must_copy(seq)
        missing = -(-(seq.num_tokens + num_tokens) // self.page_tokens) - len(pages)
        if missing <= 0 and not copy:
            return
        budget = self._buddy.num_free + self._num_reserved + self._num_cached
        if max(missing, 0) + copy > budget:
            raise EngineError(f"the step needs {max(missing, 0) + copy} KV pages, but only {budget} can be had")
        row = self.table[seq.slot]
        if copy:
            at = seq.num_tokens // self.page_tokens
            old, new = pages[at], self._take(seq)
            self._copy_page(old, new)
            self.num_copied += 1
            pages[at] = row[at] = new
            self._drop(old)
        for _ in range(missing):
            page = self._take(seq)
            row[len(pages)] = page
            pages.append(page)

    def commit(self, handle: int, tokens: I32, num_tokens: int) -> None:
        """``num_tokens`` more are computed; ``tokens`` are all of the sequence's. Pages that became full join the
        tree."""
        seq = self._get(handle)
        seq.num_tokens += num_tokens
        if self.share_prefixes:
            while len(seq.nodes) < seq.num_tokens // self.page_tokens:
                self._register(seq, tokens)

    def release(self, handle: int) -> None:
        """End of a sequence: full pages stay cached, the others are free at once."""
        seq = self._get(handle)
        self._let_go(seq)
        self._slots[seq.slot] = None
        self._free_slots.append(seq.slot)

    def drop_cache(self) -> int:
        """Free every cached page; returns how many."""
        count = 0
        while self._num_cached:
            self._buddy.put(self._evict())
            count += 1
        return count

    # --- inside

    def _get(self, handle: int) -> _Seq:
        slot = handle & ((1 << SLOT_BITS) - 1)
        seq = self._slots[slot] if slot < len(self._slots) else None
        if seq is None or seq.handle != handle:
            raise StaleHandle(f"KV handle {handle:#x} was released or never made; each handle is released once")
        return seq

    def _new(self, namespace: str) -> _Seq:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._slots)
            self._slots.append(None)
            self._generations.append(0)
            if slot == len(self.table):
                self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self._generations[slot] += 1
        seq = self._slots[slot] = _Seq(self._generations[slot] << SLOT_BITS | slot, slot, namespace)
        return seq

    def _lookup(self, namespace: str, tokens: I32) -> list[_Node]:
        """The longest chain of nodes that the tokens begin with, short of their last token."""
        nodes: list[_Node] = []
        num_pages = max(0, len(tokens) - 1) // self.page_tokens
        if num_pages == 0 or not self._index:
            return nodes
        size = 4 * self.page_tokens
        raw = np.ascontiguousarray(tokens[: num_pages * self.page_tokens], np.int32).tobytes()
        parent: int | str = namespace
        for start in range(0, len(raw), size):
            node = self._index.get((parent, raw[start : start + size]))
            if node is None:
                break
            nodes.append(node)
            parent = node.id
        return nodes

    def _match(self, seq: _Seq, tokens: I32) -> None:
        """Hold the cached pages that the tokens begin with."""
        nodes = self._lookup(seq.namespace, tokens)
        if not nodes:
            return
        for node in nodes:
            node.uses += 1
            self._hold(node.page)
        seq.nodes = nodes
        seq.pages = [node.page for node in nodes]
        seq.num_tokens = len(nodes) * self.page_tokens
        self.num_hit_tokens += seq.num_tokens
        self.table[seq.slot, : len(nodes)] = seq.pages

    def _register(self, seq: _Seq, tokens: I32) -> None:
        """Make the first full page that is no node yet one; where an equal node exists, share it and free the page."""
        at, size = len(seq.nodes), self.page_tokens
        parent = seq.nodes[-1] if at else None
        key = (parent.id if parent else seq.namespace, tokens[at * size : (at + 1) * size].tobytes())
        page, node = seq.pages[at], self._index.get(key)
        assert (self._refs[page], self._node_of[page]) == (1, None), "a page that others see was written"
        if node is None:
            node = _Node(self._next_node, key, page, parent, self._tick, at)
            self._next_node += 1
            self._index[key] = self._node_of[page] = node
            if parent is not None:
                parent.children += 1
        else:
            self._hold(node.page)
            seq.pages[at] = self.table[seq.slot, at] = node.page
            self._drop(page)
        seq.nodes.append(node)

    def _must_copy(self, seq: _Seq) -> bool:
        """Whether the page that the next token goes to can be seen by others."""
        at, used = divmod(seq.num_tokens, self.page_tokens)
        return used > 0 and (self._refs[seq.pages[at]] > 1 or self._node_of[seq.pages[at]] is not None)

    def _hold(self, page: int) -> None:
        if self._refs[page] == 0:  # a cached page: free ones are taken, not held
            node = self._node_of[page]
            assert node is not None, page
            node.stamp += 1
            self._num_cached -= 1
            self._num_held += 1
        self._refs[page] += 1
        self.page_map[page] = HELD if self._refs[page] == 1 else SHARED

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] > 0:
            self.page_map[page] = HELD if self._refs[page] == 1 else SHARED
            return
        self._num_held -= 1
        node = self._node_of[page]
        if node is None:
            self.page_map[page] = FREE
            self._buddy.put(page)
            return
        self.page_map[page] = CACHED
        self._num_cached += 1
        node.used_tick = self._tick
        if node.children == 0:
            self._offer(node)

    def _let_go(self, seq: _Seq) -> None:
        self._tick += 1
        for page in reversed(seq.pages):
            self._drop(page)
        count = seq.reserve_end - seq.reserve_first
        if count:
            self._buddy.put_run(seq.reserve_first, count)
            self._num_reserved -= count
            del self._reserving[seq.handle]
        seq.pages, seq.nodes, seq.num_tokens, seq.reserve_first, seq.reserve_end = [], [], 0, 0, 0

    def _take(self, seq: _Seq) -> int:
        """A free page: from the sequence's own run, any free run, another's run; else the page given up first."""
        page: int | None
        if seq.reserve_first < seq.reserve_end:
            page = seq.reserve_first
            seq.reserve_first += 1
            self._unreserved(seq)
        else:
            page = self._buddy.take()
            if page is None:
                page = self._take_reserved() if self._reserving else self._evict()
        self._refs[page] = 1
        self.page_map[page] = HELD
        self._num_held += 1
        return page

    def _set_aside(self, seq: _Seq, num_pages: int) -> None:
        order = max(num_pages - 1, 1).bit_length()
        first = self._buddy.take(order)
        while first is None and order > 2:
            order -= 1
            first = self._buddy.take(order)
        if first is None:
            return
        count = min(num_pages, 1 << order)
        self._buddy.put_run(first + count, (1 << order) - count)
        seq.reserve_first, seq.reserve_end = first, first + count
        self._num_reserved += count
        self._reserving[seq.handle] = seq

    def _take_reserved(self) -> int:
        """The last page that was set aside for some sequence."""
        seq = next(iter(self._reserving.values()))
        seq.reserve_end -= 1
        self._unreserved(seq)
        return seq.reserve_end

    def _unreserved(self, seq: _Seq) -> None:
        self._num_reserved -= 1
        if seq.reserve_first == seq.reserve_end:
            del self._reserving[seq.handle]

    def _offer(self, node: _Node) -> None:
        """Make a cached node without children a candidate for eviction."""
        self._serial += 1
        heapq.heappush(self._candidates, (self._policy.priority(node), self._serial, node.stamp, node))
        if len(self._candidates) > 64 + 4 * self._num_cached:  # mostly stale entries: sweep
            self._candidates = [entry for entry in self._candidates if entry[2] == entry[3].stamp]
            heapq.heapify(self._candidates)

    def _evict(self) -> int:
        """Forget the candidate of lowest priority; returns its page, which is nobody's then."""
        while True:
            priority, _, stamp, node = heapq.heappop(self._candidates)
            if node.stamp == stamp:
                break
        node.stamp += 1
        self._policy.evicted(priority)
        del self._index[node.key]
        self._node_of[node.page] = None
        self.page_map[node.page] = FREE
        self._num_cached -= 1
        self.num_evicted += 1
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if parent.children == 0 and self._refs[parent.page] == 0:
                self._offer(parent)
        return node.page

    # --- invariants

    def check_integrity(self) -> None:
        """AssertionError unless every page is in exactly one state and all counts and links agree. Slow; for tests."""
        owners = [0] * self.num_pages
        seqs = [seq for seq in self._slots if seq is not None]
        for seq in seqs:
            assert len(set(seq.pages)) == len(seq.pages), "a sequence holds a page twice"
            for page in seq.pages:
                owners[page] += 1
            assert [node.page for node in seq.nodes] == seq.pages[: len(seq.nodes)]
            assert all(self._index[node.key] is node for node in seq.nodes)
            assert not self.share_prefixes or len(seq.nodes) == seq.num_tokens // self.page_tokens
            assert seq.num_tokens <= len(seq.pages) * self.page_tokens
            assert self.table[seq.slot, : len(seq.pages)].tolist() == seq.pages
            assert (seq.handle in self._reserving) == (seq.reserve_first < seq.reserve_end)
        assert owners == self._refs, "reference counts differ from owners"
        free = self._buddy.pages()
        reserved = [page for seq in seqs for page in range(seq.reserve_first, seq.reserve_end)]
        held = [page for page, count in enumerate(owners) if count]
        cached = [node.page for node in self._index.values() if owners[node.page] == 0]
        assert sorted([*free, *reserved, *held, *cached]) == list(range(self.num_pages)), "a page has not one state"
        states = [CACHED if self._node_of[page] else FREE for page in range(self.num_pages)]
        for page in held:
            states[page] = HELD if owners[page] == 1 else SHARED
        assert [self.page_map[page] for page in range(self.num_pages)] == states, "the page map differs from the pages"
        counts = (self._buddy.num_free, self._num_reserved, self._num_held, self._num_cached)
        assert counts == (len(free), len(reserved), len(held), len(cached)), counts
        self._check_tree()

    def _check_tree(self) -> None:
        children: dict[int, int] = {}
        for node in self._index.values():
            assert self._node_of[node.page] is node
            if node.parent is not None:
                assert self._index.get(node.parent.key) is node.parent, "a node outlived its parent"
                assert self._refs[node.parent.page] >= self._refs[node.page], "a page is held without its prefix"
                children[node.parent.id] = children.get(node.parent.id, 0) + 1
        assert sum(node is not None for node in self._node_of) == len(self._index)
        live = {id(entry[3]) for entry in self._candidates if entry[2] == entry[3].stamp}
        for node in self._index.values():
            assert node.children == children.get(node.id, 0)
            assert (id(node) in live) == (node.children == 0 and self._refs[node.page] == 0), "wrong candidates"
