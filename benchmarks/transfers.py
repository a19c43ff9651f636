"""`python -m benchmarks.transfers`: rows moved into the memory of a second process, against the bare engine.

Ours is the whole way: lists of tokens are checked against the lease, turned into rows, coalesced, cut into writes,
checked by the engine, sent and polled. A bare engine gets its addresses precomputed and checks nothing.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import attrs
import numpy as np

from batchstate.errors import TransferError
from batchstate.runtime import Runtime, open_runtime
from batchstate.transport.engines.base import Copies, Engine, Handle, Ints, Peer, Status
from batchstate.transport.plan import KVLayout, chunked, coalesced, location_rows, owned_by
from benchmarks.baselines.bare_engines import Bare, Bytes, Move, wait_until
from benchmarks.comparisons import Asked, Comparison, MismatchError, Row, require_equal, run
from benchmarks.machine import machine
from benchmarks.report import show
from benchmarks.timing import Contender, Effort, one_thread
from benchmarks.transfer_peers import ENGINES, digest, receiver
from examples.console import add_json, write_json

SCATTERED, ADJACENT = 0.9, 4.0
"""The demands on the ratios. For adjacent rows nothing is asked of an engine that packs its rows: none costs much."""

FLOOR = "floor: one copy in memory"

THOROUGH = Effort(rounds=31, sample_us=0)  # a run takes long enough to be a sample
QUICK = Effort(rounds=5, sample_us=0)


@final
@attrs.frozen
class Work:
    """Rows to move.

    Attributes:
        num_rows: how many.
        nbytes: of each.
        adjacent: whether they lie behind each other on both sides; otherwise no two do on either.
    """

    num_rows: int
    nbytes: int
    adjacent: bool

    @property
    def memory(self) -> int:
        """Bytes of the memory on each side."""
        return (2 * self.num_rows + 1) * self.nbytes

    def __str__(self) -> str:
        return f"{self.num_rows:,} {'adjacent' if self.adjacent else 'scattered'} rows of {self.nbytes:,} bytes"


FEW = (Work(512, 4_096, adjacent=False), Work(512, 4_096, adjacent=True))
MANY = (
    Work(8_192, 4_096, adjacent=False),
    Work(1_024, 65_536, adjacent=False),
    Work(8_192, 4_096, adjacent=True),
    Work(8_192, 1_152, adjacent=True),  # a token of multi-head latent attention
)


@final
class Link:
    """Our engine and the bare one, connected to a receiver, over the same memory.

    Args:
        engine: ours.
        bare: the other.
        memory: uint8[...], what is sent from.
        call: asks the receiver.

    Attributes:
        sent: bytes that our engine has written.
    """

    def __init__(self, engine: Engine, bare: Bare, memory: Bytes, call: Callable[..., Any]) -> None:
        self.engine, self.bare, self.memory, self.call = engine, bare, memory, call
        self._region = engine.register(memory, "rows")
        ours, theirs = call("endpoints")
        self._peer: Peer = engine.connect(ours)
        bare.connect(theirs)
        self._tags = itertools.count()
        self.sent = 0

    def mover(self, work: Work, tokens: tuple[Ints, Ints], ranges: Ints, *, coalesce: bool) -> Move:
        """Our way."""
        layout = KVLayout(1, "uint8", ("rows",), work.nbytes)
        here, there = [self._region.index], [next(iter(self._peer.regions))]
        most = self.engine.capabilities.max_rows

        def move() -> None:
            owned_by(tokens[1], ranges)
            rows = location_rows(*tokens, layout, layout, here, there)
            self.write(chunked(coalesced(rows) if coalesce else rows, most))

        return move

    def write(self, writes: list[Copies]) -> None:
        """Writes, and returns when all has landed.

        Raises:
            TransferError: a write failed.
        """
        handles = [self.engine.write(self._peer, rows, b"%d" % next(self._tags)) for rows in writes]
        self.sent += sum(rows.nbytes for rows in writes)
        for handle in handles:
            wait_until(partial(self._ended, handle))
            if handle.status is not Status.DONE:
                raise TransferError(handle.reason, value=handle.tag, remedy="see whether the peer runs")

    def _ended(self, handle: Handle) -> bool:
        return self.engine.poll(handle) is not Status.PENDING


def tokens_of(work: Work) -> tuple[Ints, Ints, Ints]:
    """Source tokens and target tokens int64[n], and the ranges int64[r, 2] of the lease that has the targets."""
    if work.adjacent:
        tokens = np.arange(1, work.num_rows + 1)
        return tokens, tokens, np.array([[1, work.num_rows]])
    random = np.random.default_rng(0)
    sources, targets = (random.permutation(work.num_rows) * 2 + 1 for _ in range(2))
    return sources, targets, np.stack((targets, np.ones_like(targets)), axis=1)


def comparison(link: Link, work: Work) -> Comparison:
    """Our way against the bare engine's; for adjacent rows, also against ours with each row for itself.

    And the floor, of which nothing is asked: one copy of as many bytes within this process. For adjacent rows it stands
    in our place, so that its ratios are the most that memory allows any way to reach.
    """
    target = SCATTERED if not work.adjacent else ADJACENT if link.engine.capabilities.one_sided else None
    sources, targets, ranges = tokens_of(work)
    name = link.engine.name
    ours = {f"{name}, planned": link.mover(work, (sources, targets), ranges, coalesce=True)}
    others = link.bare.movers(sources * work.nbytes, targets * work.nbytes, work.nbytes)
    if work.adjacent:
        others = {f"{name}, not coalesced": link.mover(work, (sources, targets), ranges, coalesce=False)} | others

    source, target_memory = (np.full(work.num_rows * work.nbytes, n, dtype=np.uint8) for n in (1, 2))

    def copy() -> None:
        np.copyto(target_memory, source)

    def verify() -> None:
        copy()
        require_equal("copied bytes", digest(target_memory), digest(source))
        wanted = np.full(work.memory, 0xEE, dtype=np.uint8).reshape(-1, work.nbytes)
        wanted[targets] = link.memory[: work.memory].reshape(-1, work.nbytes)[sources]
        whole = np.concatenate((wanted.reshape(-1), np.full(link.memory.size - work.memory, 0xEE, dtype=np.uint8)))
        for way, move in (ours | others).items():
            link.call("fill", 0xEE)
            move()
            require_equal(f"memory after {way}", digest(whole), link.call("digest"))

    floor = [Contender(FLOOR, copy)]
    return Comparison(
        task=f"transfer of {work}, {name}",
        ours=[*(Contender(way, move) for way, move in ours.items()), *(floor if work.adjacent else ())],
        baselines=[*(Contender(way, move) for way, move in others.items()), *(() if work.adjacent else floor)],
        verify=verify,
        asks={(way, other): Asked(target=target) for way in ours for other in others},
    )


@contextlib.contextmanager
def linked(transport: str, nbytes: int) -> Iterator[Link]:
    """Both engines of a transport, and their receiver; all have ended when the block is left.

    Raises:
        TransferError: the transport cannot be opened here.
    """
    ours, bare_kind = ENGINES[transport]
    memory = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        engine = ours()
        stack.callback(engine.close)
        call = stack.enter_context(receiver(transport, nbytes))
        stack.callback(engine.close)  # before the receiver ends; twice is fine
        bare = bare_kind(memory)
        stack.callback(bare.close)
        yield Link(engine, bare, memory, call)


def works_of(*, quick: bool) -> Sequence[Work]:
    """The work of each transport."""
    return FEW if quick else MANY


def effort_of(*, quick: bool) -> Effort:
    """How often a transfer is measured."""
    return QUICK if quick else THOROUGH


def run_all(runtime: Runtime, transports: Sequence[str], *, quick: bool) -> Iterator[list[Row]]:
    """The rows of each work over each transport in turn. One that cannot be opened here is named on stderr.

    Raises:
        MismatchError: what landed differs.
        TransferError: a transfer failed.
    """
    works, effort = works_of(quick=quick), effort_of(quick=quick)
    for transport in transports:
        with contextlib.ExitStack() as stack:
            try:
                link = stack.enter_context(linked(transport, max(work.memory for work in works)))
            except TransferError as error:
                print(f"benchmarks: without {transport}: {error}", file=sys.stderr)
                continue
            for work in works:
                yield run(runtime, comparison(link, work), effort)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the tables.

    Returns:
        0, or 1 when a transfer failed or bytes differ.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfers", description=__doc__)
    parser.add_argument("--transport", choices=ENGINES, action="append", help="default: all that can be opened")
    parser.add_argument("--quick", action="store_true", help="few rows, few rounds: a trial run")
    add_json(parser)
    args = parser.parse_args(argv)
    runtime = open_runtime("cpu")
    try:
        with one_thread():
            rows = [
                row for some in run_all(runtime, args.transport or tuple(ENGINES), quick=args.quick) for row in some
            ]
    except (MismatchError, TransferError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    facts = machine(runtime)
    show(facts, rows)
    write_json(args.json, {"machine": facts, "quick": args.quick, "rows": [row.as_json() for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
