"""KV of one prompt on its way into paged host memory: written there directly, or received in one piece and copied.

Engines without a direct transfer receive a prompt in a buffer that lies in one piece, and copy its rows to their pages
when all are there. The time is that for which a first decode step waits for its KV: the time to first token,
without the forwards. Both ways run over the same engine, with the same checks, from the same pages of the sender.
"""

from typing import final

import numpy as np

from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, Row, require_equal, run
from benchmarks.counts import Count
from benchmarks.timing import Contender, Effort
from benchmarks.transfer_peers import digest
from benchmarks.transfers import Link, Work, linked, tokens_of

DIRECT, STAGED = "written where it stays", "received in one piece, and copied"

PROMPTS = {
    "pages of 64 tokens": Work(8 * 64, 64 * 1_152, adjacent=False),
    "pages of 1 token": Work(8 * 4_096, 1_152, adjacent=False),
}
"""8 layers of 4,096 tokens of multi-head latent attention: a row is what one page of one layer holds."""
QUICK_PROMPTS = {"pages of 64 tokens": Work(64, 64 * 1_152, adjacent=False)}


@final
class Arrival:
    """Both ways to bring a prompt's rows into the receiver's memory. Behind the rows it has room for all in one piece.

    Attributes:
        copied: bytes that the receiver has copied from one place of its host memory to another.
    """

    def __init__(self, link: Link, work: Work) -> None:
        self._link, self._work, self.copied = link, work, 0
        self.sources, self.targets, ranges = tokens_of(work)
        first = 2 * work.num_rows + 1
        piece = np.arange(first, first + work.num_rows)
        whole = np.array([[first, work.num_rows]])
        self.direct = link.mover(work, (self.sources, self.targets), ranges, coalesce=True)
        self._receive = link.mover(work, (self.sources, piece), whole, coalesce=True)

    @staticmethod
    def memory(work: Work) -> int:
        """Bytes of the memory on each side."""
        return work.memory + work.num_rows * work.nbytes

    def staged(self) -> None:
        """Receives, and copies."""
        self._receive()
        self.copied += self._link.call("copy_rows", 2 * self._work.num_rows + 1, self.targets, self._work.nbytes)

    def verify(self) -> None:
        """Both ways leave the same rows.

        Raises:
            MismatchError: they do not.
        """
        work, call = self._work, self._link.call
        sent = self._link.memory[: work.memory].reshape(-1, work.nbytes)[self.sources]
        wanted = np.full(work.memory, 0xEE, dtype=np.uint8).reshape(-1, work.nbytes)
        wanted[self.targets] = sent
        for way, move in ((DIRECT, self.direct), (STAGED, self.staged)):
            call("fill", 0xEE)
            move()
            require_equal(f"memory after KV {way}", digest(wanted.reshape(-1)), call("digest", work.memory))

    def traffic(self) -> dict[str, int]:
        """Bytes of host memory that each way reads and writes on both sides, by the writes and copies it makes."""
        written = {}
        for way, move in ((DIRECT, self.direct), (STAGED, self.staged)):
            sent, copied = self._link.sent, self.copied
            move()
            written[way] = 2 * (self._link.sent - sent + self.copied - copied)
        return written


def measured(runtime: Runtime, transport: str, effort: Effort, *, quick: bool) -> tuple[list[Row], list[Count]]:
    """The rows and counts of each prompt.

    Raises:
        MismatchError: what landed differs.
        TransferError: the transport cannot be opened here, or a transfer failed.
    """
    prompts = QUICK_PROMPTS if quick else PROMPTS
    rows, counts = [], []
    with linked(transport, max(map(Arrival.memory, prompts.values()))) as link:
        for pages, work in prompts.items():
            arrival = Arrival(link, work)
            megabytes = work.num_rows * work.nbytes / 1e6
            prompt = f"{megabytes:.1f} MB of KV into host {pages}, {link.engine.name}"
            ours, others = Contender(DIRECT, arrival.direct), Contender(STAGED, arrival.staged)
            rows += run(runtime, Comparison(f"time to first token, {prompt}", [ours], [others], arrival.verify), effort)
            traffic = arrival.traffic().items()
            counts += [Count(f"transfer of {prompt}", f"bytes of host memory traffic, {way}", n) for way, n in traffic]
    return rows, counts
