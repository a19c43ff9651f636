"""Six journeys of a value through the package, run for real: which files each of them crosses, in order.

The layout page of the docs lists them, and a test holds how many there are.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import batchstate
from batchstate import (
    Batch,
    FutureMap,
    Locations,
    MirroredTensor,
    PagePool,
    SlotPool,
    checks,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.kv.host_pool import HostRanges
from batchstate.runtime import open_runtime
from batchstate.testing import ManualStream
from batchstate.transport.engines.in_process import InProcessEngine, Network
from batchstate.transport.plan import KVLayout
from batchstate.transport.receiver import Receiver
from batchstate.transport.sender import Sender
from batchstate.transport.workers import Description
from batchstate.violations import Violation
from tests.interpreted import interpreted_core

PACKAGE = Path(batchstate.__file__).parent

Steps = Iterator[None]
Journey = Callable[[], Steps]
"""What runs before its first `yield` is set-up."""


class Decode(Batch):
    """A batch of two columns."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


def keep_through_filter() -> Steps:
    """`keep` through `Batch.filter`."""
    runtime = open_runtime("cpu")
    batch = Decode.build(runtime, slots=SlotPool(runtime, size=4).take(3), seq_lens=[1, 2, 3])
    yield
    batch.filter([True, False, True])


def slot_from_take_to_reap() -> Steps:
    """A slot, from `take` over a fenced `free` to `reap`."""
    runtime = open_runtime("cpu")
    pool = SlotPool(runtime, size=4)
    pool.table("lengths")
    stream = ManualStream()
    fence = stream.record()
    yield
    slots = pool.take(2)
    pool.free(slots, after=fence)
    stream.complete()
    pool.reap()


def token_to_the_host() -> Steps:
    """A token, from `publish` to the host."""
    runtime = open_runtime("cpu")
    pool = SlotPool(runtime, size=4)
    relay = FutureMap(pool, {"token": relay_field(torch.int64, read_by="host")})
    slots = pool.take(2)
    yield
    relay.publish(slots, token=torch.tensor([7, 8]))
    _ = relay.prefetch(slots, "token").resolve()["token"].np


def page_to_the_device() -> Steps:
    """A page, from `extend` to the upload of its locations."""
    runtime = open_runtime("cpu")
    pool = SlotPool(runtime, size=4)
    table = pool.table("req_to_token", (16,), torch.int32, holds="location")
    pages = PagePool(runtime, pool, num_pages=8, page_size=4, max_tokens_per_request=16, req_to_token=table)
    slots = pool.take(2)
    batch = Decode.build(runtime, slots=slots, seq_lens=[5, 3])
    yield
    batch.upload(writes=[pages.extend(slots, [5, 3]).entry()])


def mirror_equal_to_the_report() -> Steps:
    """`MIRROR_EQUAL`, from the check to the printed report."""
    runtime = open_runtime("cpu")
    value = MirroredTensor.from_host(runtime, [1, 2, 3])
    value.device.data[1] = 9
    yield
    try:
        value.check()
    except Violation as violation:
        str(violation)


def kv_row_between_workers() -> Steps:
    """A KV row, from the prefill worker's memory into that of the decode worker."""
    network = Network(7)
    layout = KVLayout(4, "uint8", ("keys",), 8, 0, 1, 2)
    sides: list[Any] = []
    for kind, name in ((Receiver, "decode"), (Sender, "prefill-0")):
        engine = InProcessEngine(network)
        region = engine.register(np.zeros((16, 8), dtype=np.uint8), "keys")
        described = Description(name, engine.instance, layout, engine.endpoint())
        sides.append(kind(engine, described, [region], clock=lambda: float(network.now)))
    receiver, sender = sides
    receiver.accept(sender.introduce())
    sender.accept(receiver.introduce())
    runtime = open_runtime("cpu")
    sources, written = Locations.from_host(runtime, np.arange(1, 9)), runtime.record()
    lease = receiver.lease("request", 8, ["prefill-0"])
    ranges = HostRanges(1, 1, 1, np.array([4]), np.array([8]), lease.ended)
    yield
    receiver.grant(lease, ranges)
    for _, message in receiver.outbox:
        sender.on_message(message, "decode")
    (transfer,) = sender.poll()
    sender.send(transfer, sources, 0, last=True, after=written)
    while not receiver.poll():
        network.step()
        sender.poll()


JOURNEYS: dict[Journey, int] = {
    keep_through_filter: 7,
    slot_from_take_to_reap: 11,
    token_to_the_host: 13,  # results on their way to the host have a file of their own, as have forwards that end
    page_to_the_device: 16,
    mirror_equal_to_the_report: 6,
    kv_row_between_workers: 12,
}
"""Journey -> the most files that it may cross."""


def files_of(journey: Journey) -> list[str]:
    """The files of the package whose functions run, in the order in which they are first entered; checks on `full`."""
    entered: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents and "testing" not in path.parts:
                entered.setdefault(path.relative_to(PACKAGE).as_posix())

    with checks("full"), interpreted_core():  # a profiler sees no functions of a compiled core
        steps = journey()
        next(steps)
        before = sys.getprofile()
        sys.setprofile(enter)
        try:
            next(steps, None)
        finally:
            sys.setprofile(before)
    return list(entered)
