"""An engine whose rows stay where they are, written without a word of this library, under `watch`.

Requests say what their rows hold, rows without one are poisoned, writes are staged, and pages have keys and an index.
"""

from typing import Any, final

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate.watch import POISON, watch, watch_log, watch_pages
from tests.selfcheck.machine import Machine, agree, ask

NUM_ROWS, PAGE = 4, 2
NUM_PAGES = 8 * NUM_ROWS


@final
class HandLog:
    """Writes of one element each, staged and applied together."""

    def __init__(self, device: torch.Tensor) -> None:
        self.device = device
        self.staged: list[tuple[int, int]] = []

    def stage(self, row: int, value: int) -> None:
        self.staged.append((row, value))

    def apply(self) -> None:
        for row, value in self.staged:
            self.device[row] = value
        self.staged.clear()


@final
class HandRows:
    """Rows of requests, with a column that is staged, one that is counted on the host, a mask, and metadata."""

    def __init__(self, zeros: torch.Tensor) -> None:
        self.owners: dict[int, str] = {}
        self.limits = HandLog(zeros.clone())
        self.computed_host = np.zeros(NUM_ROWS, np.int64)
        self.computed = zeros.clone()
        self.mask = torch.zeros(NUM_ROWS, dtype=torch.bool)
        self.weights: torch.Tensor | None = zeros.clone()
        self.metadata = [0] * NUM_ROWS

    def join(self, row: int, name: str, limit: int, masked: bool) -> None:
        self.owners[row] = name
        self.limits.stage(row, limit)
        self.computed_host[row] = limit
        self.computed[row] = 0
        self.weights[row] = limit  # type: ignore[index]
        self.mask[row] = masked
        self.limits.apply()
        self.metadata = self.computed_host.tolist()

    def leave(self, row: int) -> None:
        self.mask[row] = False
        del self.owners[row]

    def step(self) -> None:
        for row in self.owners:
            self.computed_host[row] += 1
            self.computed[row] += 1
        self.metadata = self.computed_host.tolist()


@final
class HandCache:
    """Pages of requests, found again by the tokens in them."""

    def __init__(self) -> None:
        self.free = list(range(NUM_PAGES))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.keys: dict[int, int] = {}
        self.index: dict[int, int] = {}
        self.used = 0

    def take(self, row: int, length: int, key: int) -> None:
        self.tables[row] = [self.free.pop() for _ in range(-(-length // PAGE))]
        self.used += len(self.tables[row])
        self.lengths[row] = length
        if key not in self.index:
            self.index[key] = self.tables[row][0]
            self.keys[self.tables[row][0]] = key

    def grow(self, row: int) -> None:
        self.lengths[row] += 1
        if self.lengths[row] > PAGE * len(self.tables[row]):
            self.tables[row].append(self.free.pop())
            self.used += 1

    def give_back(self, row: int) -> None:
        del self.lengths[row]
        for page in self.tables.pop(row):
            self.used -= 1
            if page in self.keys:
                del self.index[self.keys.pop(page)]
            self.free.append(page)


def _joined(
    records: dict[str, tuple[int, bool]], rows: HandRows, row: int, name: str, limit: int, masked: bool
) -> None:
    records[name] = limit, masked


@final
class WatchedRowsMachine(Machine):
    """Rows that requests take and leave, and their pages."""

    NAME = "watched_rows"
    TARGETS = ("a row taken again", "a page more", "a bound that moves")

    @initialize()
    def begin(self) -> None:
        self.open()
        windows = [
            watch(
                HandRows,
                after=["join", "leave", "step"],
                num_rows=lambda rows: NUM_ROWS,
                key="owners",
                records={"join": _joined},
                from_requests={"limits.device": lambda kept: kept[0], "mask": lambda kept: kept[1] or None},
                pairs=[("computed_host", "computed", "upper_bound")],
                rows=["weights"],
                moves=["leave"],
                vacant={"mask": False, "weights": POISON, "limits.device": POISON},
                made_from={"metadata": ["computed_host"]},
                axis={"weights": 0},
            ),
            watch_log(
                HandLog,
                stage={"stage": lambda row, value: (row, 0, [value])},
                apply=["apply"],
                device="device",
                staged=["staged"],
            ),
            watch_pages(
                HandCache,
                after=["take", "grow", "give_back"],
                holders=lambda pool: pool.tables.values(),
                free="free",
                num_pages=NUM_PAGES,
                lengths=lambda pool: [pool.lengths[row] for row in pool.tables],
                page_size=PAGE,
                keys=lambda pool: pool.keys,
                index=lambda pool: pool.index,
                counters={"used": lambda pool: sum(map(len, pool.tables.values()))},
            ),
        ]
        self.watches: list[Any] = [self._windows.enter_context(window) for window in windows]
        self.rows, self.cache = HandRows(self.on_device(np.zeros(NUM_ROWS, np.int64))), HandCache()
        self.taken, self.steps = 0, 0

    @rule(row=st.integers(0, NUM_ROWS - 1), limit=st.integers(1, 5), masked=st.booleans())
    def join(self, row: int, limit: int, masked: bool) -> None:
        if row in self.rows.owners:
            return
        self.taken += 1
        self.reached("a row taken again", self.taken > NUM_ROWS)
        self.rows.join(row, f"request {self.taken}", 10 * self.taken + limit, masked)
        self.cache.take(row, limit, limit)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.rows.owners:
            row = data.draw(st.sampled_from(sorted(self.rows.owners)), label="row")
            self.rows.leave(row)
            self.cache.give_back(row)

    @rule(times=st.sampled_from([1, 1, 1, 40]))
    def decode(self, times: int) -> None:
        """Steps of all requests; now and then so many that a bound would be reached."""
        for _ in range(times):
            self.rows.step()
        self.reached("a bound that moves", times > 1 and bool(self.rows.owners))
        for row, table in self.cache.tables.items():
            if len(table) < NUM_PAGES // NUM_ROWS:
                self.reached("a page more", self.cache.lengths[row] == PAGE * len(table))
                self.cache.grow(row)

    def check(self) -> None:
        agree(self.watches[0].counters.calls, self.watches[0].counters.checked, "calls that were checked")
        ask(self.watches[0].check, self.rows)
        ask(self.watches[2].check, self.cache)
        if not self.cache.tables:
            ask(self.watches[2].expect_idle, self.cache)
