"""Whatever is passed to a call of requests, windows, the host tier, a group or a layout: a typed error, no change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    ForwardPlan,
    HiSparse,
    HostKVPool,
    PagePool,
    SlotPool,
    device_only,
    levels,
    mirrored,
    slot_column,
)
from batchstate.errors import BatchStateError
from batchstate.forward.token_array import TokenArray
from batchstate.kv.host_pool import KVBuffer
from batchstate.runtime import Runtime, open_runtime
from batchstate.transport.plan import KVLayout
from batchstate.violations import Violation

PROMPT, MOST, HOT = 12, 40, 8


class Found(Batch):
    """A column that the device bounds, and one that it has alone."""

    slots = slot_column()
    lens = mirrored(torch.int64, contract="upper_bound")
    hidden = device_only(torch.float32)


class World:
    """Requests with pages, one of the tier that decodes and one that arrives, and a batch."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.slots = SlotPool(rt, 8)
        self.pages = PagePool(rt, self.slots, 24, 4, max_tokens_per_request=64)
        layers = [KVBuffer("keys", (2,), torch.float32), KVBuffer("index", (1,), torch.float32, on_device=True)]
        self.host = HostKVPool(rt, 160, 1, layers=layers)
        kv = rt.device_zeros((self.pages.location_capacity, 2), torch.float32)
        self.tier = HiSparse(self.pages, self.host, [kv], hot_tokens=HOT)
        self.ordinary, self.ready, self.arriving = (self.slots.take(1) for _ in range(3))
        self.pages.extend(self.ordinary, 20)
        self.pages.commit(self.ordinary, 20)
        for one in (self.ready, self.arriving):
            self.tier.reserve(one, PROMPT, MOST)
        self.tier.admit_direct(self.ready)
        hidden = torch.zeros(1, device=rt.device)
        self.batch = Found.build(rt, slots=self.ordinary, lens=[20], hidden=hidden)
        self.other = SlotPool(rt, 8).take(1)
        self.gone = self.slots.take(1)
        self.slots.free(self.gone)

    def state(self) -> list[object]:
        """All that a call could have changed, as far as it shows."""
        slots = self.ordinary, self.ready, self.arriving
        return [
            self.slots.stats,
            self.pages.stats,
            self.tier.stats,
            [(self.tier.states(one), self.tier.lengths(one).tolist()) for one in slots],
            [(self.pages.allocated(one).tolist(), self.pages.committed(one).tolist()) for one in slots],
            self.pages.page_table.tolist(),
            [value.np.tolist() for value in (self.batch.lens, self.batch.slots)],
            [(one.what, one.slots.tolist(), one.tokens) for one in self.tier.in_flight()],
            (self.rt.agreement, self.rt.step),
        ]


Call = Callable[[World, dict[str, Any]], object]


def slotted(name: str, of: Callable[[World], Any], which: str = "ready") -> Call:
    """A method that takes slots first."""

    def call(world: World, given: dict[str, Any]) -> object:
        given = {"slots": getattr(world, which)} | given
        return getattr(of(world), name)(given.pop("slots"), **given)

    return call


def _pages(world: World) -> PagePool:
    return world.pages


def _slots(world: World) -> SlotPool:
    return world.slots


def _tier(world: World) -> HiSparse:
    return world.tier


def _planned(world: World, given: dict[str, Any]) -> object:
    arguments: dict[str, Any] = {"slots": world.ordinary, "seq_lens": [20], "query_lens": 1} | given
    return ForwardPlan.of(arguments.pop("slots"), arguments.pop("seq_lens"), arguments.pop("query_lens"), **arguments)


def _updated(world: World, given: dict[str, Any]) -> object:
    right: dict[str, Any] = {"column": "lens", "rows": [0], "values": torch.tensor([3]), "bound": 5}
    return world.batch.update_device(**right | given)


def _reserved(world: World, given: dict[str, Any]) -> object:
    right: dict[str, Any] = {"slots": world.slots.take(1), "lengths": 3, "max_tokens": 9}
    return world.tier.reserve(**right | given)


def _agreed(world: World, given: dict[str, Any]) -> object:
    assert world.rt.agreement is not None
    return world.rt.agreement.agree(**given)


def made(kind: Callable[..., object], **right: Any) -> Call:
    """A constructor."""
    return lambda _, given: kind(**right | given)


NUMBERS: list[Any] = [None, "x", 1.5, -1, 2**70, object(), [1, 2, 3], [[1]], True, np.nan, b"1", {}]
FENCES: list[Any] = ["x", 1, object(), [None]]
HANDLES: list[Any] = [None, "x", 1, [1], np.array([1]), object(), "other", "gone", "twice"]
"""The last three are handles of another pool, of a request that has left, and one twice."""

CALLS: dict[str, tuple[Call, dict[str, list[Any]]]] = {
    "release_requests": (slotted("release_requests", _slots, "ordinary"), {"slots": HANDLES, "after": FENCES}),
    "pages.release_requests": (slotted("release_requests", _pages, "ordinary"), {"slots": HANDLES, "after": FENCES}),
    "truncate": (
        slotted("truncate", _pages, "ordinary"),
        {"slots": HANDLES, "first": [*NUMBERS[1:], 21, 64], "total_lens": [*NUMBERS[1:], 21], "after": FENCES},
    ),
    "reserve": (
        _reserved,
        {"lengths": [*NUMBERS, 0, 10], "max_tokens": [*NUMBERS, 0, 10**6], "writer": FENCES},
    ),
    "map_last_location": (
        lambda w, given: slotted("map_last_location", _tier)(w, {"seq_lens": [PROMPT + 2], "tokens": 2} | given),
        {
            "slots": HANDLES,
            "seq_lens": [*NUMBERS, PROMPT, PROMPT + 3, MOST + 1],
            "tokens": [*NUMBERS[:-5], 0, 1, 3],
            "confirmed": [*NUMBERS[1:], PROMPT + 1, PROMPT - 1],
            "backups": [*NUMBERS[1:8], -3],
        },
    ),
    "back_up": (lambda w, given: w.tier.back_up(**given), {"plan": NUMBERS}),
    "finish": (slotted("finish", _tier), {"slots": [*HANDLES, "arriving"], "after": FENCES}),
    "update_device": (
        _updated,
        {
            "column": [*NUMBERS, "slots", "none"],
            "rows": [*NUMBERS[:-5], [1], [0, 0], [-1], [True, False]],
            "values": [*NUMBERS, torch.tensor([1.5]), torch.tensor([1, 2])],
            "bound": [None, "x", 1.5, 2**70, object(), [1, 2, 3], [[1]]],
        },
    ),
    "plan": (
        _planned,
        {"kv_offset": [*NUMBERS[1:8], [1, 2]], "window": ["x", 1.5, -1, 0, object(), [1]]},
    ),
    "token arrays": (_planned, {"token_arrays": [{"positions": TokenArray(None)}, {"input_ids": TokenArray(None)}]}),
    "TokenArray": (
        made(TokenArray, rows=None),
        {"dtype": ["int64", np.int64, None, 1], "shape": [5.5, "x", (-1,), (2**70,)], "fill": ["x", [1], 2**70, 1.5]},
    ),
    "KVBuffer": (
        made(KVBuffer, name="a", item_shape=(1,), dtype=torch.int64),
        {"name": [None, 1, b"a"], "item_shape": [None, 1, "x", (0,), (-1,), (1.5,), (2**80,)], "on_device": [1, None]},
    ),
    "layout": (
        made(KVLayout, page_size=4, dtype="float32", layers=("a", "b"), item_bytes=16),
        {
            "page_size": [*NUMBERS, 0],
            "rank": [*NUMBERS, 1],
            "degree": NUMBERS,
            "heads": [*NUMBERS, 3],
            "stage": [None, 1, "x", ("c",), ("b", "a"), ("a", "a"), (1,)],
            "per_request": [None, 1, "x"],
        },
    ),
    "join_group": (lambda w, given: w.rt.join_group(), {"joined already": [None]}),
    "agree": (
        _agreed,
        {"reports": [*NUMBERS, [[1.5]], [["x"]], [None], "other ranks"]},
    ),
}


def given_of(world: World, name: str, bad: Any) -> dict[str, Any]:
    """The argument that is wrong."""
    if name == "joined already":
        return {}
    if bad == "other ranks":
        assert world.rt.agreement is not None
        bad = [world.rt.agreement.report(), [2**70, 1]]
    if name == "slots" and isinstance(bad, str) and hasattr(world, bad):
        bad = getattr(world, bad)
    elif name == "slots" and bad == "twice":
        bad = world.ordinary.take(np.array([0, 0]))
    return {name: bad}


def outcome_of(call: Call, world: World, given: dict[str, Any]) -> str:
    """What came of a call, if it was not a typed error."""
    try:
        call(world, given)
    except (BatchStateError, Violation):
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_changes_nothing(name: str, level: str) -> None:
    """A typed error, and every pool, table, request and column as before: at each level of checks."""
    call, arguments = CALLS[name]
    rt = open_runtime("cpu")
    if name in ("join_group", "agree"):
        rt.join_group()
    passed = []
    with levels.checks(level):
        for argument, values in arguments.items():
            for bad in values:
                world = World(rt)
                given, before = given_of(world, argument, bad), world.state()
                outcome = outcome_of(call, world, given)
                if outcome:
                    passed.append((argument, bad, outcome))
                elif name != "reserve":  # which has taken its slot
                    assert world.state() == before, (argument, bad)
    assert passed == []
