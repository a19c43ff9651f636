"""The writing side of a pair: one thread packs and sends, one listens for the answers.

Guarantees: each job ends exactly once, unless the engine is closed first. DONE follows the receiver's word alone, that
the rows are in memory; FAILED that it was never sent, or refused; all that was begun when the pair broke is UNKNOWN.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

import attrs
import numpy as np
import torch

from batchstate.transport.copies import Copies
from batchstate.transport.engines.base import Status
from batchstate.transport.engines.paired.packing import gather, pieces, staging
from batchstate.transport.engines.paired.pairs import Pair, said
from batchstate.transport.engines.paired.reception import EndWatch
from batchstate.transport.engines.paired.wire import (
    BYE,
    ENDED,
    GOT,
    LANDED,
    PIECE_COMES,
    WRITE,
    Answer,
    Header,
    answer_room,
)

LOOKS_EVERY = 0.05
"""Seconds between two looks whether the receiver of a broken pair has ended."""


@final
@attrs.define(eq=False)
class Job:
    """One write on its way.

    Attributes:
        tag: its tag.
        copies: its rows, as `packing.in_order` gives them.
        memories: the source regions by index, uint8.
        outgoing: whose it is.
        reason: why it failed; set before the status.
        status: set by a thread of `outgoing`, once.
    """

    tag: bytes
    copies: Copies
    memories: Mapping[int, torch.Tensor]
    outgoing: "Outgoing"
    reason: str = ""
    status: Status = Status.PENDING

    def end(self, status: Status, reason: str = "") -> None:
        """Sets the two."""
        self.reason = reason
        self.status = status


@final
class Outgoing:
    """A pair on which this process writes. Its methods never wait, but for `join`.

    Attributes:
        lost: why the pair is broken, or None.
    """

    def __init__(self, pair: Pair, watch: EndWatch, when_lost: Callable[[str], None]) -> None:
        self.lost: str | None = None
        self._pair: Pair | None = pair
        self._watch = watch
        self._when_lost = when_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._awaiting: deque[Job] = deque()
        self._closing = threading.Event()
        self._ended = False
        self._room_free = threading.Semaphore(2)
        self._flight: deque[list[Callable[[], object]]] = deque()
        self._turn = 0
        self._sender = threading.Thread(target=self._send_all, args=(pair,), name="batchstate sender", daemon=True)
        self._listener = threading.Thread(target=self._listen, args=(pair,), name="batchstate listener", daemon=True)
        self._sender.start()
        self._listener.start()

    def submit(self, job: Job) -> None:
        """Takes a write."""
        with self._lock:
            if self.lost is None:
                self._queue.put(job)
                return
        job.end(Status.FAILED, f"never sent: {self.lost}")

    def finish(self) -> None:
        """Ends the pair behind what was submitted."""
        self._queue.put(None)

    def close(self) -> None:
        """Ends the pair now."""
        self._closing.set()
        if pair := self._pair:
            self._lose(pair, "this engine is closed")

    def join(self, seconds: float) -> None:
        """Waits for the threads, that long at most."""
        self._listener.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it still has a thread."""
        return self._listener.is_alive()

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent can still land, nor a source be read. See `EndWatch`."""
        return self._ended

    def _send_all(self, pair: Pair) -> None:
        rooms = (staging(pair.device), staging(pair.device))
        while (job := self._queue.get()) is not None:
            try:
                self._send(pair, job, rooms)
            except (RuntimeError, MemoryError) as error:
                self._lose(pair, said(error))
        if not self._broken():
            try:
                pair.send(Header(BYE).packed())
            except RuntimeError as error:
                self._lose(pair, said(error))

    def _send(self, pair: Pair, job: Job, rooms: tuple[torch.Tensor, torch.Tensor]) -> None:
        with self._lock:
            if self.lost is not None:
                job.end(Status.FAILED, f"never sent: {self.lost}")
                return
            self._awaiting.append(job)
        rows = job.copies
        announced = Header(WRITE, len(rows), job.tag).packed()
        if not len(rows):
            pair.send(announced)
            return
        for number, cut in enumerate(pieces(rows.lengths)):
            self._room_free.acquire()
            if self._broken():
                return
            if len(self._flight) == len(rooms):
                for ended in self._flight.popleft():  # at once: the receiver has said that it is there
                    ended()
            room = rooms[self._turn]
            self._turn = (self._turn + 1) % len(rooms)
            nbytes = gather(job.memories, rows.source_regions[cut], rows.source_offsets[cut], rows.lengths[cut], room)
            if number:
                begun = [pair.begin(Header(PIECE_COMES).packed())]
            else:
                table = np.stack((rows.target_regions, rows.target_offsets, rows.lengths))
                begun = [pair.begin(announced), pair.send_rows(torch.from_numpy(table).to(pair.device))]
            self._flight.append([*begun, pair.send_rows(room[:nbytes])])

    def _listen(self, pair: Pair) -> None:
        try:
            while True:
                answer = Answer.read(pair.receive(answer_room()))
                if answer.verdict == GOT:
                    self._room_free.release()
                    continue
                with self._lock:
                    job = self._awaiting.popleft() if self._awaiting else None
                if job is None:  # it answers the end
                    pair.part()
                    break
                if len(job.copies):
                    self._room_free.release()
                job.end(Status.DONE if answer.verdict == LANDED else Status.FAILED, answer.reason)
                if answer.verdict == ENDED:
                    self._lose(pair, answer.reason)
                    break
        except RuntimeError as error:
            self._lose(pair, said(error))
        self._sender.join()
        self._pair = None
        while self.lost is not None and not self._ended and not self._closing.is_set():
            self._ended = self._watch.ended()
            self._closing.wait(0.0 if self._ended else LOOKS_EVERY)

    def _broken(self) -> bool:
        return self.lost is not None

    def _lose(self, pair: Pair, reason: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = reason
            begun, self._awaiting = self._awaiting, deque()
            for job in begun:
                job.end(Status.UNKNOWN, f"the pair broke before the receiver's answer: {reason}")
            self._queue.put(None)
            self._room_free.release()
        self._when_lost(reason)
        pair.part()
