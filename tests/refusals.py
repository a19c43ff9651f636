"""Refused calls of pools and of the relay, a table each, for unit tests and machines; and how a test asks for one."""

from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import pytest
import torch

from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.future_map import FutureMap, relay_field
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor, Pages, Slots
from batchstate.pools import SlotPool
from batchstate.runtime import open_runtime
from batchstate.violations import Code, Violation
from tests.doubles import forged
from tests.selfcheck.machine import misuses

Expected = type[BatchStateError] | Code
"""The type of the error, or the code of the invariant that is broken."""


def refuses(expected: Expected, words: str, call: Callable[[], object]) -> None:
    """Runs `call`, which has to be refused in these words (a pattern)."""
    with pytest.raises(BatchStateError, match=words) as caught:
        call()
    error = caught.value
    assert (error.code if isinstance(error, Violation) else type(error)) is expected


# A pool of slots


def _forged(pool: SlotPool, slot: int) -> Slots:
    return forged(Slots, pool.runtime, [slot], [1], pool.pool_id)


def _adopt(pool: SlotPool, *shape: int) -> object:
    return pool.adopt(pool.runtime.device_zeros(shape, torch.int32), "adopted")


def _hybrid(states: Any, states_per_slot: Any = 1) -> Callable[[SlotPool], object]:
    return lambda pool: HybridSlotPool(pool.runtime, 1, states=states, states_per_slot=states_per_slot)


SLOTS = misuses(
    ("take -1", ArgumentError, lambda pool: pool.take(-1)),
    ("free pages", Code.UNIT_MISMATCH, lambda pool: pool.free(Pages.from_host(pool.runtime, [1]), after=None)),
    ("free a slot of no pool", ArgumentError, lambda pool: pool.free(Slots.from_host(pool.runtime, [1]), after=None)),
    ("free slot 0", Code.SLOT_ZERO_ALLOCATED, lambda pool: pool.free(_forged(pool, 0), after=None)),
    ("free slot -1", Code.SLOT_OUT_OF_RANGE, lambda pool: pool.free(_forged(pool, -1), after=None)),
    ("free beyond the last", Code.SLOT_OUT_OF_RANGE, lambda pool: pool.free(_forged(pool, pool.capacity), after=None)),
    ("query a slot out of range", Code.SLOT_OUT_OF_RANGE, lambda pool: pool.is_live([pool.capacity])),
    ("query half a slot", DtypeError, lambda pool: pool.is_live([0.5])),
    ("adopt a table sized by size", Code.TABLE_CAPACITY, lambda pool: _adopt(pool, pool.size)),
    ("adopt a scalar", ShapeError, _adopt),
    ("a table of a negative width", ArgumentError, lambda pool: pool.table("t", (-1,))),
    ("a pool of no slots", ArgumentError, lambda pool: SlotPool(pool.runtime, 0)),
    ("a pool beyond int32", ArgumentError, lambda pool: SlotPool(pool.runtime, 2**31 - 2, reserve=1)),
    ("a negative reserve", ArgumentError, lambda pool: SlotPool(pool.runtime, 1, reserve=-1)),
    ("states that do not suffice for one slot", ArgumentError, _hybrid(1, 2)),
    ("states of no kind", ArgumentError, _hybrid({})),
    ("states called slots", ArgumentError, _hybrid({"slot": 1})),
    ("states per slot of a kind that is not there", ArgumentError, _hybrid({"mamba": 2}, {"swa": 1})),
    ("no states per slot", ArgumentError, _hybrid(1, 0)),
)


# A pool of pages, and the handle of a live request

PageCase = tuple[PagePool, Slots]


def _pages_of_two(it: PageCase) -> bool:
    return it[0].page_size > 1


def _has_pages(it: PageCase) -> bool:
    return bool(it[0].allocated(it[1])[0])


def _none(it: PageCase) -> Slots:
    return it[0].slots.take(0)


def _foreign(it: PageCase) -> Slots:
    return SlotPool(it[0].runtime, 2).take(1)


def _made(it: PageCase, **options: Any) -> PagePool:
    arguments = {"slots": it[0].slots, "num_pages": 4, "page_size": 4, "max_tokens_per_request": 4}
    return PagePool(it[0].runtime, **{**arguments, **options})


PAGES = misuses(
    ("grow to -1", Code.LENGTH_ORDER, lambda it: it[0].grow(it[1], -1)),
    ("grow beyond a row", Code.LENGTH_ORDER, lambda it: it[0].grow(it[1], it[0].max_tokens_per_request + 1)),
    ("grow to half a token", DtypeError, lambda it: it[0].grow(it[1], 0.5)),
    ("one length too many", ShapeError, lambda it: it[0].grow(it[1], np.array([1, 1]))),
    ("advance by -1", ArgumentError, lambda it: it[0].advance(it[1], -1)),
    ("advance beyond int64", Code.LENGTH_ORDER, lambda it: it[0].advance(it[1], 2**63 - 1)),
    ("truncate to more", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], it[0].committed(it[1]) + 1, after=None)),
    (
        "give back too much",
        Code.LENGTH_ORDER,
        lambda it: it[0].truncate(it[1], first=it[0].committed(it[1]) + 1, after=None),
    ),
    ("give back before -1", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], first=-1, after=None)),
    ("give back half a token", DtypeError, lambda it: it[0].truncate(it[1], first=0.5, after=None)),
    ("give back for too many", ShapeError, lambda it: it[0].truncate(it[1], first=np.array([0, 0]), after=None)),
    ("truncate to -1", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], -1, after=None)),
    ("take -1 pages", ArgumentError, lambda it: it[0].take(-1)),
    ("hold half a page", Code.PAGE_ALIGNMENT, lambda it: it[0].hold(it[1], 1), _pages_of_two),
    ("hold what is not committed", Code.LENGTH_ORDER, lambda it: it[0].hold(it[1], 8 * it[0].page_size)),
    ("share half a page", Code.PAGE_ALIGNMENT, lambda it: it[0].share(it[1], _none(it), 1), _pages_of_two),
    ("share what is not committed", Code.LENGTH_ORDER, lambda it: it[0].share(it[1], _none(it), 8 * it[0].page_size)),
    ("share beyond int64", ArgumentError, lambda it: it[0].share(it[1], _none(it), 2**63)),
    ("share from no request", ArgumentError, lambda it: it[0].share(_none(it), _none(it), 0)),
    ("grow requests of another pool", ArgumentError, lambda it: it[0].grow(_foreign(it), 1)),
    ("hold two requests", (ArgumentError, Code.SLOT_SHARED), lambda it: it[0].hold(it[1].take([0, 0]), 0)),
    ("share into a request with pages", ArgumentError, lambda it: it[0].share(it[1], it[1], 0), _has_pages),
    ("one request twice", Code.SLOT_SHARED, lambda it: it[0].advance(it[1].take([0, 0]))),
    (
        "leave twice in one call",
        Code.SLOT_DOUBLE_FREE,
        lambda it: it[0].release_requests(it[1].take([0, 0]), after=None),
    ),
    ("release padding", Code.SLOT_ZERO_ALLOCATED, lambda it: it[0].release(it[1].pad(2), after=None)),
    (
        "release pages as slots",
        Code.UNIT_MISMATCH,
        lambda it: it[0].release(Pages.from_host(it[0].runtime, [1]), after=None),
    ),
    ("a page size beyond int64", ArgumentError, lambda it: _made(it, page_size=2**62)),
    ("requests beyond int64", ArgumentError, lambda it: _made(it, max_tokens_per_request=2**63)),
    ("pages of no tokens", ArgumentError, lambda it: _made(it, page_size=0)),
)


# A relay


@final
@attrs.frozen(eq=False)
class RelayCase:
    """A relay to be misused, handles of its live requests, at least one, and handles of another pool."""

    relay: FutureMap
    slots: Slots
    foreign: Slots

    @property
    def n(self) -> int:
        return len(self.slots)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.relay.runtime.device)

    def column(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self.zeros(self.n, *shape, dtype=dtype)

    def int32(self) -> torch.Tensor:
        return self.column(dtype=torch.int32)

    def mirrored(self, rows: int, dtype: type = np.int64) -> MirroredTensor:
        return MirroredTensor.from_host(self.relay.runtime, np.zeros(rows, dtype))

    def of_another_runtime(self) -> MirroredTensor:
        return MirroredTensor.from_host(open_runtime(self.relay.runtime.device), np.zeros(self.n, np.int64))


def _publish(**makes: Callable[[RelayCase], Any]) -> Callable[[RelayCase], object]:
    return lambda case: case.relay.publish(case.slots, **{name: make(case) for name, make in makes.items()})


def _not_ragged(case: RelayCase) -> bool:
    return not case.relay.fields["drafts"].ragged


def _publish_behind_padding(case: RelayCase) -> None:
    zero = forged(Slots, case.relay.runtime, [0], [0], case.relay.slots.pool_id)
    case.relay.publish(Slots.cat([zero, case.slots]), token=case.zeros(case.n + 1))


def _publish_for_pages(case: RelayCase) -> None:
    pages: Any = Pages.from_host(case.relay.runtime, [1])
    case.relay.publish(pages, token=case.zeros(1))


def _relay_of(fields: Any) -> Callable[[RelayCase], object]:
    return lambda case: FutureMap(case.relay.slots, fields)


def _field(*arguments: Any, **named: Any) -> Callable[[RelayCase], object]:
    return lambda case: relay_field(*arguments, **named)


RELAY = misuses(
    ("publish an undeclared field", DeclarationError, _publish(tokens=RelayCase.column)),
    ("publish nothing", DeclarationError, _publish()),
    ("publish int32", DtypeError, _publish(token=RelayCase.int32)),
    ("publish a mirrored int32", DtypeError, _publish(token=lambda case: case.mirrored(case.n, np.int32))),
    ("publish a row too many", ShapeError, _publish(token=lambda case: case.zeros(case.n + 1))),
    ("publish a mirrored row too many", ShapeError, _publish(token=lambda case: case.mirrored(case.n + 1))),
    ("publish rows for numbers", ShapeError, _publish(token=lambda case: case.column(1))),
    ("publish drafts without a shape", ShapeError, _publish(drafts=RelayCase.column)),
    ("publish drafts of another shape", ShapeError, _publish(drafts=lambda case: case.column(3))),
    ("publish a scalar", ShapeError, _publish(token=RelayCase.zeros)),
    ("publish from another device", DeviceError, _publish(token=lambda case: torch.zeros(case.n, device="meta"))),
    ("publish a value of another runtime", DeviceError, _publish(token=RelayCase.of_another_runtime)),
    ("publish a sparse tensor", DtypeError, _publish(token=lambda case: case.column().to_sparse())),
    ("publish a good field and a bad one", DtypeError, _publish(token=RelayCase.column, lengths=RelayCase.int32)),
    ("publish twice", Code.SLOT_SHARED, lambda case: case.relay.publish(case.slots.take([0, 0]), token=case.zeros(2))),
    ("publish behind a padded row", Code.SLOT_ZERO_ALLOCATED, _publish_behind_padding),
    ("publish for another pool", ArgumentError, lambda case: case.relay.publish(case.foreign, token=case.zeros(1))),
    ("publish for pages", Code.UNIT_MISMATCH, _publish_for_pages),
    ("publish a list of a row too few", ShapeError, _publish(token=lambda case: [0] * (case.n - 1))),
    ("publish a host number", ShapeError, _publish(token=lambda case: 5)),
    ("publish an array of drafts as numbers", ShapeError, _publish(drafts=lambda case: np.zeros(case.n, np.int64))),
    ("publish half a token", DtypeError, _publish(token=lambda case: [0.5] * case.n)),
    ("publish None in a list", DtypeError, _publish(token=lambda case: [None] * case.n)),
    ("publish more than int64", ValueOverflowError, _publish(token=lambda case: [2**63] * case.n)),
    ("publish a stand-in", Code.SENTINEL_ESCAPED, _publish(token=lambda case: [0] * (case.n - 1) + [-1])),
    ("publish a stand-in as a draft", Code.SENTINEL_ESCAPED, _publish(drafts=lambda c: [[0, -1]] * c.n), _not_ragged),
    (
        "publish a good field and a bad host one",
        ShapeError,
        _publish(token=RelayCase.column, lengths=lambda case: [0] * (case.n + 1)),
    ),
    ("gather what only the host reads", DeclarationError, lambda case: case.relay.gather(case.slots, "accepted")),
    ("gather an undeclared field", DeclarationError, lambda case: case.relay.gather(case.slots, "tokens")),
    ("gather for a slot twice", Code.SLOT_SHARED, lambda case: case.relay.gather(case.slots.take([0, 0]), "token")),
    ("gather for numbers", DtypeError, lambda case: case.relay.gather([1], "token")),
    ("prefetch nothing", DeclarationError, lambda case: case.relay.prefetch(case.slots)),
    ("prefetch a field twice", DeclarationError, lambda case: case.relay.prefetch(case.slots, "token", "token")),
    ("prefetch what the host does not read", DeclarationError, lambda c: c.relay.prefetch(c.slots, "drafts", "token")),
    ("resolve an undeclared field", DeclarationError, lambda case: case.relay.resolve(case.slots, "tokens")),
    ("discard an undeclared field", DeclarationError, lambda case: case.relay.discard(case.slots, "token", "no")),
    ("states of an undeclared field", DeclarationError, lambda case: case.relay.states(case.slots, "tokens")),
    ("a relay without fields", DeclarationError, _relay_of({})),
    ("a field for an unknown reader", DeclarationError, _field(torch.int64, read_by="nobody")),
    ("a field that torch cannot index", DtypeError, _field(torch.float8_e8m0fnu)),
    ("a field for the host that numpy lacks", DtypeError, _field(torch.bfloat16, read_by="host")),
    ("a field of ids that numpy lacks", DtypeError, _field(torch.bfloat16, non_negative=True)),
    ("a field of a negative size", ArgumentError, _field(torch.int64, (-1,))),
)
