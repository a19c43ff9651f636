"""A refused value of a call of requests, windows, the host tier, a group or a layout: a typed error, no change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    ForwardPlan,
    HiSparse,
    PagePool,
    SlotPool,
    device_only,
    levels,
    mirrored,
    slot_column,
)
from batchstate.errors import BatchStateError
from batchstate.forward.token_array import TokenArray
from batchstate.kv.host_pool import HostKVPool, KVBuffer
from batchstate.runtime import Runtime, open_runtime
from batchstate.transport.plan import KVLayout
from tests.worlds import Pools, Tiered

PROMPT, MOST, HOT = 12, 40, 8


class Found(Batch):
    """A column that the device bounds, and one that it has alone."""

    slots = slot_column()
    lens = mirrored(torch.int64, contract="upper_bound")
    hidden = device_only(torch.float32)


LAYERS = KVBuffer("keys", (2,), torch.float32), KVBuffer("index", (1,), torch.float32, on_device=True)


class World:
    """Requests with pages, one of the tier that decodes and one that arrives, and a batch."""

    def __init__(self, rt: Runtime) -> None:
        pools = Pools.of(rt, pages=24, longest=64)
        world = Tiered.of(pools, LAYERS, hot_tokens=HOT).join(PROMPT, MOST, outside=20)
        self.rt, self.slots, self.pages, self.tier = rt, pools.slots, pools.pages, world.tier
        self.ordinary, self.ready, self.arriving = world.outside, world.ready, world.reserved
        hidden = torch.zeros(1, device=rt.device)
        self.batch = Found.build(rt, slots=self.ordinary, lens=[20], hidden=hidden)
        self.other = SlotPool(rt, 8).take(1)
        self.gone = self.slots.take(1)
        self.slots.free(self.gone, after=None)

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


FREEING = {"release_requests", "truncate", "finish"}


def slotted(name: str, of: Callable[[World], Any], which: str = "ready") -> Call:
    """A method that takes slots first."""

    def call(world: World, given: dict[str, Any]) -> object:
        given = {"slots": getattr(world, which)} | ({"after": None} if name in FREEING else {}) | given
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


NUMBERS: list[Any] = [-1, 2**70, 1.5, [1, 2, 3]]
HANDLES = ["other", "gone", "twice"]
"""Handles of another pool, of a request that has left, and one twice."""

CALLS: dict[str, tuple[Call, dict[str, list[Any]]]] = {
    "release_requests": (slotted("release_requests", _slots, "ordinary"), {"slots": HANDLES}),
    "pages.release_requests": (slotted("release_requests", _pages, "ordinary"), {"slots": HANDLES}),
    "truncate": (
        slotted("truncate", _pages, "ordinary"),
        {"slots": HANDLES, "first": [*NUMBERS, 21, 64], "total_lens": [*NUMBERS, 21]},
    ),
    "reserve": (_reserved, {"lengths": [*NUMBERS, 0, 10], "max_tokens": [*NUMBERS, 0, 10**6]}),
    "map_last_location": (
        lambda w, given: slotted("map_last_location", _tier)(w, {"seq_lens": [PROMPT + 2], "tokens": 2} | given),
        {
            "slots": HANDLES,
            "seq_lens": [*NUMBERS, PROMPT, PROMPT + 3, MOST + 1],
            "tokens": [*NUMBERS, 0, 1, 3],
            "confirmed": [*NUMBERS, PROMPT + 1, PROMPT - 1],
            "backups": [*NUMBERS, -3],
        },
    ),
    "finish": (slotted("finish", _tier), {"slots": [*HANDLES, "arriving"]}),
    "update_device": (
        _updated,
        {
            "column": ["slots", "none"],
            "rows": [*NUMBERS, [1], [0, 0], [-1], [True, False]],
            "values": [torch.tensor([1.5]), torch.tensor([1, 2]), [1]],
            "bound": [None, 1.5, 2**70, [1, 2, 3], [[1]]],
        },
    ),
    "plan": (
        _planned,
        {
            "kv_offset": [*NUMBERS, [1, 2]],
            "window": [-1, 0, 1.5],
            "prompt_ids": [{(5,)}, {0: (5,)}, "5", b"5"],
            "token_arrays": [{"positions": TokenArray(None)}, {"input_ids": TokenArray(None)}],
        },
    ),
    "TokenArray": (
        made(TokenArray, rows=None),
        {"shape": [(-1,), (2**70,), {1, 3}, b"ab", {1: 3}], "fill": [2**70, 1.5]},
    ),
    "KVBuffer": (
        made(KVBuffer, name="a", item_shape=(1,), dtype=torch.int64),
        {"item_shape": [(0,), (-1,), (1.5,), (2**80,)], "dtype": [None, float, "float32"]},
    ),
    "HostKVPool": (
        lambda w, given: made(HostKVPool, num_pages=4, layers=2, item_shape=(1,), dtype=torch.float32)(
            w, {"runtime": w.rt} | given
        ),
        {"layers": [True, "keys", {"keys", "values"}, {"keys": 1}, 0], "dtype": [None, float]},
    ),
    "layout": (
        made(KVLayout, page_size=4, dtype="float32", layers=("a", "b"), item_bytes=16),
        {
            "page_size": [-1, 0],
            "rank": [-1, 1],
            "degree": [-1],
            "heads": [-1, 3],
            "layers": ["ab", {"a", "b"}, (1, 2), ("",)],
            "stage": [("c",), ("b", "a"), ("a", "a"), "ab"],
            "replicated": ["no", 1, None],
            "token_major": ["no"],
            "per_request": ["no"],
        },
    ),
    "join_group": (lambda w, given: w.rt.join_group(), {"joined already": [None]}),
    "agree": (_agreed, {"reports": [[], "other ranks", "a cut report"]}),
}


def argument(world: World, name: str, bad: Any) -> dict[str, Any]:
    """The argument that is wrong."""
    if name == "joined already":
        return {}
    if bad in ("other ranks", "a cut report"):
        assert world.rt.agreement is not None
        bad = [world.rt.agreement.report(), [2**70, 1] if bad == "other ranks" else [0]]
    if name == "slots":
        bad = world.ordinary.take(np.array([0, 0])) if bad == "twice" else getattr(world, bad)
    return {name: bad}


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_value_changes_nothing(name: str, level: str) -> None:
    """A typed error, and every pool, table, request and column as before: at each level of checks."""
    call, arguments = CALLS[name]
    rt = open_runtime("cpu")
    if name in ("join_group", "agree"):
        rt.join_group()
    with levels.checks(level):
        for wrong, bad in ((wrong, bad) for wrong, values in arguments.items() for bad in values):
            world = World(rt)
            given, before = argument(world, wrong, bad), world.state()
            with pytest.raises(BatchStateError):
                call(world, given)
            if name != "reserve":  # which has taken its slot
                assert world.state() == before, (wrong, bad)
