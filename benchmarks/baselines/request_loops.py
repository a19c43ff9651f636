"""Baselines: a decode step as engines write it that keep an object per request, and the least that a step can do.

All of them do the work of a steady step: each request gets a place for one more token (a page where one begins), the
forward gets ids, positions, lengths and places, its tokens go to the next step and to the host. The forward itself is
`ids + 1`. Nothing is checked. `ChunksInLists` does a mixed step, and `PrefillOfLists` one of prompts.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

PAGE_SIZE = 16
START, LONGEST = 100, 1_124
"""Tokens of a request at first, and at most: it then starts anew, once in a thousand steps."""
PAGES = -(-LONGEST // PAGE_SIZE)


@final
@attrs.frozen(eq=False)
class Inputs:
    """Inputs of the forward from a step: one number per token each, and `kv_lens` one per request.

    A mixed step has the first token of each request too, behind them how many there are, and the last token of each
    request that samples.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor | None = None
    last: torch.Tensor | None = None


@final
@attrs.define(eq=False)
class Request:
    """A request of an engine that keeps an object for each.

    Attributes:
        slot: its row in tables.
        length: tokens with a place in KV memory.
        last: its last token.
        pages: of its tokens, in order.
    """

    slot: int
    length: int
    last: int
    pages: list[int]


class _RequestLoop:
    """Requests, some of which leave and are followed by others before each step."""

    def __init__(self, n: int, churn: int, device: torch.device) -> None:
        self.place = device
        self.pinned = device.type == "cuda"
        self._churn = churn
        self._free = deque(range(1, 4 * n * PAGES))
        self._slots = deque(range(1, 4 * n + 1))
        self.running = [self._arrived() for _ in range(n)]

    def _arrived(self) -> Request:
        pages = [self._free.popleft() for _ in range(-(-START // PAGE_SIZE))]
        return Request(self._slots.popleft(), START, 1, pages)

    def _left(self, request: Request) -> None:
        self._free.extend(request.pages)
        self._slots.append(request.slot)

    def replace_oldest(self) -> list[Request]:
        """The oldest requests leave and others join; who is at the most tokens starts anew. Returns those that join."""
        for request in self.running[: self._churn]:
            self._left(request)
        joined = [self._arrived() for _ in range(self._churn)]
        self.running = self.running[self._churn :] + joined
        if not self._churn and self.running[0].length == LONGEST - 1:
            for request in self.running:
                self._left(request)
            joined = self.running = [self._arrived() for _ in self.running]
        return joined

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=self.pinned).to(self.place, non_blocking=True)


@final
class ListsAndTensors(_RequestLoop):
    """Lists filled request by request, and a pinned tensor made of each; results are waited for.

    Attributes:
        inputs: of the last step.
    """

    name = "a loop that fills lists, five pinned tensors"

    def step(self) -> Inputs:
        """The step."""
        self.replace_oldest()
        ids, positions, places, lens = [], [], [], []
        for request in self.running:
            if request.length % PAGE_SIZE == 0:
                request.pages.append(self._free.popleft())
            ids.append(request.last)
            positions.append(request.length)
            places.append(request.pages[-1] * PAGE_SIZE + request.length % PAGE_SIZE)
            lens.append(request.length + 1)
        most = max(len(request.pages) for request in self.running)
        tables = [request.pages + [0] * (most - len(request.pages)) for request in self.running]
        inputs = Inputs(
            self._tensor(ids, torch.int64),
            self._tensor(positions, torch.int64),
            self._tensor(lens, torch.int32),
            self._tensor(places, torch.int32),
        )
        torch.tensor(tables, dtype=torch.int32, pin_memory=self.pinned).to(self.place, non_blocking=True)
        for request, token in zip(self.running, (inputs.ids + 1).tolist(), strict=True):
            request.length += 1
            request.last = token
        return inputs


@final
class ChunksInLists(_RequestLoop):
    """The loop of `ListsAndTensors`, in which a request may put in a chunk of its prompt.

    Five pinned tensors here too: what there is one of for each request goes to the device in one.
    """

    name = ListsAndTensors.name

    def __init__(self, n: int, churn: int, device: torch.device) -> None:
        super().__init__(n, churn, device)
        for request in self.running:
            self._left(request)
        self.running = []

    def step(self, chunks: Sequence[list[int] | None], samples: Sequence[bool], leaving: int) -> Inputs:
        """The step.

        Args:
            chunks: of each request the ids of its prompt that it puts in, or None where it decodes. There are more of
                them than requests that stay: so many join.
            samples: whether each request has a next token.
            leaving: the oldest ones, so many, leave.
        """
        for request in self.running[:leaving]:
            self._left(request)
        del self.running[:leaving]
        for _ in range(len(chunks) - len(self.running)):
            self.running.append(Request(self._slots.popleft(), 0, 0, []))
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        lens, starts, last = [], [0], []
        sampling = []
        for request, chunk, sampled in zip(self.running, chunks, samples, strict=True):
            length, pages = request.length, request.pages
            if chunk is None:
                if length % PAGE_SIZE == 0:
                    pages.append(self._free.popleft())
                ids.append(request.last)
                positions.append(length)
                places.append(pages[-1] * PAGE_SIZE + length % PAGE_SIZE)
                end = length + 1
            else:
                end = length + len(chunk)
                while len(pages) * PAGE_SIZE < end:
                    pages.append(self._free.popleft())
                ids.extend(chunk)
                positions.extend(range(length, end))
                for i in range(length // PAGE_SIZE, len(pages)):
                    place, first = pages[i] * PAGE_SIZE, i * PAGE_SIZE
                    places.extend(range(place + max(length - first, 0), place + min(end - first, PAGE_SIZE)))
            request.length = end
            lens.append(end)
            starts.append(len(ids))
            if sampled:
                last.append(len(ids) - 1)
                sampling.append(request)
        most = max(len(request.pages) for request in self.running)
        tables = [request.pages + [0] * (most - len(request.pages)) for request in self.running]
        n = len(lens)
        each = self._tensor(lens + starts + last, torch.int32)
        inputs = Inputs(
            self._tensor(ids, torch.int64),
            self._tensor(positions, torch.int64),
            each[:n],
            self._tensor(places, torch.int32),
            each[n : 2 * n + 1],
            each[2 * n + 1 :],
        )
        torch.tensor(tables, dtype=torch.int32, pin_memory=self.pinned).to(self.place, non_blocking=True)
        tokens = inputs.ids.index_select(0, each[2 * n + 1 :]) + 1
        for request, token in zip(sampling, tokens.tolist(), strict=True):
            request.last = token
        return inputs


@final
class PinnedBuffers(_RequestLoop):
    """Pinned buffers made once, a copy of each, and ids that stay on the device; results come a step later.

    As in vLLM: the buffers are filled through numpy, of the block table only what is new, and events say when they may
    be filled again and when results are there. For requests that stay: what moves rows is left out.
    """

    name = "a loop that fills four pinned buffers made once"

    def __init__(self, n: int, churn: int, device: torch.device) -> None:
        super().__init__(n, churn, device)
        shapes = ((torch.int64, (n,)), (torch.int32, (n,)), (torch.int32, (n,)), (torch.int32, (n, PAGES)))
        self._pinned = [torch.zeros(shape, dtype=dtype, pin_memory=self.pinned) for dtype, shape in shapes]
        self._arrays = [pinned.numpy() for pinned in self._pinned]
        self._device = [pinned.to(device, copy=True) for pinned in self._pinned]
        self._ids = torch.ones(n, dtype=torch.int64, device=device)
        self._results = [torch.zeros(n, dtype=torch.int64, pin_memory=self.pinned) for _ in range(2)]
        made: Any = torch.cuda.Event
        self._events = [made() for _ in range(2 if self.pinned else 0)]
        self._steps = 0
        for row, request in enumerate(self.running):
            self._arrays[3][row, : len(request.pages)] = request.pages

    def step(self) -> Inputs:
        """The step."""
        positions, lens, places, tables = self._arrays
        turn, self._steps = self._steps % 2, self._steps + 1
        if self._steps > 1 and self._events:
            self._events[1 - turn].synchronize()  # behind the copies of the step before, both ways
        if self.replace_oldest():
            self._ids.fill_(1)
            for row, request in enumerate(self.running):
                tables[row, : len(request.pages)] = request.pages
        lengths, out = [], []
        for row, request in enumerate(self.running):
            if request.length % PAGE_SIZE == 0:
                page = self._free.popleft()
                tables[row, len(request.pages)] = page
                request.pages.append(page)
            lengths.append(request.length)
            out.append(request.pages[-1] * PAGE_SIZE + request.length % PAGE_SIZE)
            request.length += 1
        positions[:] = lengths
        np.add(positions, 1, out=lens, casting="unsafe")
        places[:] = out
        for device, host in zip(self._device, self._pinned, strict=True):
            device.copy_(host, non_blocking=True)
        ids, self._ids = self._ids, self._ids + 1
        self._results[turn].copy_(self._ids, non_blocking=True)
        if self._events:
            self._events[turn].record()
        if self._steps > 1:
            for request, token in zip(self.running, self._results[1 - turn].tolist(), strict=True):
                request.last = token
        return Inputs(ids, *self._device[:3])


@final
class TensorPerRequest(_RequestLoop):
    """Tables on the device that are written request by request; ids stay on the device, results come a step later."""

    name = "a loop that writes device tables, per request"

    def __init__(self, n: int, churn: int, device: torch.device) -> None:
        super().__init__(n, churn, device)
        self._tokens = torch.ones((4 * n + 1, LONGEST + 1), dtype=torch.int64, device=device)
        self._places = torch.zeros((4 * n + 1, LONGEST + 1), dtype=torch.int32, device=device)
        self._results: torch.Tensor | None = None

    def step(self) -> Inputs:
        """The step."""
        for request in self.replace_oldest():
            self._tokens[request.slot, START] = 1
        places = []
        for request in self.running:
            if request.length % PAGE_SIZE == 0:
                request.pages.append(self._free.popleft())
            places.append(request.pages[-1] * PAGE_SIZE + request.length % PAGE_SIZE)
        out = self._tensor(places, torch.int32)
        for row, request in enumerate(self.running):
            self._places[request.slot, request.length : request.length + 1] = out[row : row + 1]
        slots = self._tensor([request.slot for request in self.running], torch.int64)
        positions = self._tensor([request.length for request in self.running], torch.int64)
        lens = self._tensor([request.length + 1 for request in self.running], torch.int32)
        inputs = Inputs(self._tokens[slots, positions], positions, lens, out)
        sampled = inputs.ids + 1
        self._tokens[slots, positions + 1] = sampled
        if self._results is not None:
            self._results.tolist()
        self._results = sampled.to("cpu", copy=True, non_blocking=True)
        for request in self.running:
            request.length += 1
        return inputs


@final
class Floor:
    """Arrays alone: what is left when a step does nothing for each request, and makes no object twice.

    A gather of generations, fourteen numpy rows into views of staging memory, one copy, a gather and a scatter of ids,
    one copy back. Memory is reused in turns without a look at whether the device still reads it.
    """

    name = "the floor: numpy rows, one copy, one gather, one scatter"

    def __init__(self, n: int, churn: int, device: torch.device) -> None:
        self._n, self._churn, self._place = n, churn, device
        self._columns = np.zeros((10, n), dtype=np.int64)
        self._slots = np.arange(1, n + 1)
        self._lens = np.full(n, START)
        capacity = 4 * n + 1
        self._generations, self._owned = np.ones(capacity, np.int64), np.ones(n, np.int64)
        self._table = np.arange(capacity * PAGES).reshape(capacity, PAGES) + 1
        self._relay = torch.ones(capacity, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros((16, n), dtype=torch.int64, pin_memory=pinned) for _ in range(3)]
        self._rows = [staging.numpy() for staging in self._staging]
        self._device = [torch.zeros((16, n), dtype=torch.int64, device=device) for _ in range(3)]
        self._views = [memory.unbind(0) for memory in self._device]
        self._landing = [torch.zeros(n, dtype=torch.int64, pin_memory=pinned) for _ in range(3)]
        self._turn = 0

    def step(self) -> Inputs:
        """The step."""
        turn = self._turn = (self._turn + 1) % 3
        if self._lens[0] == LONGEST - 1 and not self._churn:
            self._lens[:] = START
            self._relay.fill_(1)
        slots, lens, rows = self._slots, self._lens, self._rows[turn]
        if not (self._generations[slots] == self._owned).all():
            raise RuntimeError("a slot has another owner")
        rows[0] = slots
        rows[1:11] = self._columns
        rows[11] = lens
        np.add(lens, 1, out=rows[12])
        pages = self._table[slots, lens // PAGE_SIZE]
        rows[13] = pages * PAGE_SIZE + lens % PAGE_SIZE
        lens += 1
        self._device[turn].copy_(self._staging[turn], non_blocking=True)
        views = self._views[turn]
        ids = self._relay.index_select(0, views[0])
        sampled = ids + 1
        self._relay.index_copy_(0, views[0], sampled)
        self._landing[turn].copy_(sampled, non_blocking=True)
        return Inputs(ids, views[11], views[12], views[13])


@final
class PrefillOfLists(_RequestLoop):
    """Prompts laid end to end in lists, request by request, and a pinned tensor made of each list."""

    name = "a loop that fills lists, four pinned tensors"

    def __init__(self, prompts: list[list[int]], device: torch.device) -> None:
        super().__init__(len(prompts), 0, device)
        self._prompts = prompts

    def step(self) -> Inputs:
        """The step, after which all requests leave."""
        for request in self.running:
            self._left(request)
        self.running = [self._arrived() for _ in self._prompts]
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        lens: list[int] = []
        for request, prompt in zip(self.running, self._prompts, strict=True):
            ids.extend(prompt)
            positions.extend(range(len(prompt)))
            lens.append(len(prompt))
            for i, page in enumerate(request.pages):
                first = page * PAGE_SIZE
                places.extend(range(first, first + min(PAGE_SIZE, len(prompt) - i * PAGE_SIZE)))
        return Inputs(
            self._tensor(ids, torch.int64),
            self._tensor(positions, torch.int64),
            self._tensor(lens, torch.int32),
            self._tensor(places, torch.int32),
        )
