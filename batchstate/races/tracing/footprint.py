"""The bytes that the programs of one launch access, and elements that two of them share.

Programs of a launch run in any order and at once. Two that access one element, one of them writing, are a clash, unless
both do it atomically, or atomics of the kernel order them: what is behind an atomic that acquires is behind all that
was before one that releases, at the same address. An interpreter runs one program after the other, so this is the order
that it saw; only atomics of a single element count, as those of locks and counters are.
"""

from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from batchstate._source_lines import SourceLine

Addresses = npt.NDArray[np.uint64]

Program = tuple[int, ...]


class Touch(NamedTuple):
    """One load, store or atomic of one program.

    Attributes:
        number: in the order in which they ran, from 0.
        program: its ids.
        addresses: uint64[n] of its elements; lanes that the mask leaves out are not among them.
        size: bytes of an element.
        writes: whether it writes; an atomic that also reads counts as a write.
        atomic: whether it is one; a volatile load is.
        line: of the kernel.
        behind: program -> the newest of its touches that atomics have put before this one.
    """

    number: int
    program: Program
    addresses: Addresses
    size: int
    writes: bool
    atomic: bool
    line: SourceLine
    behind: dict[Program, int]

    def clashes(self, later: "Touch") -> bool:
        """Whether a later touch of the same element may come first."""
        if self.program == later.program or not (self.writes or later.writes) or (self.atomic and later.atomic):
            return False
        return later.behind.get(self.program, -1) < self.number


class Clash(NamedTuple):
    """Two touches of one element by two programs; of all that these two lines share, the one at the lowest address."""

    first: Touch
    second: Touch
    address: int


@final
class Footprint:
    """The touches of one launch, in the order in which they ran.

    Attributes:
        touches: all of them.
    """

    def __init__(self) -> None:
        self.touches: list[Touch] = []
        self._program: Program | None = None
        self._behind: dict[Program, int] = {}
        self._released: dict[int, dict[Program, int]] = {}

    def add(
        self, program: Program, addresses: Addresses, size: int, line: SourceLine, *, writes: bool, atomic: bool
    ) -> None:
        """A program touches some elements."""
        if program != self._program:
            self._program, self._behind = program, {}
        number = len(self.touches)
        self.touches.append(Touch(number, program, addresses, size, writes, atomic, line, self._behind))

    def orders(self, address: int, *, acquires: bool, releases: bool) -> None:
        """The newest touch is an atomic of one element, which orders its program behind others, or others behind it."""
        touch = self.touches[-1]
        before = self._released.get(address, {})
        if acquires:
            self._behind = _joined(self._behind, before)
        if releases:
            self._released[address] = _joined(_joined(before, self._behind), {touch.program: touch.number})

    def clashes(self) -> Iterator[Clash]:
        """Elements that two programs share, one of them writing: one of each pair of lines."""
        if len({touch.program for touch in self.touches}) < 2 or not any(touch.writes for touch in self.touches):
            return
        grain = np.gcd.reduce([touch.size for touch in self.touches])
        grain = np.gcd.reduce([np.gcd.reduce(touch.addresses, initial=grain) for touch in self.touches])
        units = [_units(touch, int(grain)) for touch in self.touches]
        written = np.unique(np.concatenate([at for at, touch in zip(units, self.touches, strict=True) if touch.writes]))
        who = np.repeat(np.arange(len(units)), [len(at) for at in units])
        every = np.concatenate(units)
        shared = np.isin(every, written)
        every, who = every[shared], who[shared]
        order = np.lexsort((who, every))
        every, who = every[order], who[order]
        starts = np.flatnonzero(np.concatenate(([True], every[1:] != every[:-1])))
        numbers_of: dict[Program, int] = {}
        programs = np.array([numbers_of.setdefault(touch.program, len(numbers_of)) for touch in self.touches])[who]
        several = np.maximum.reduceat(programs, starts) != np.minimum.reduceat(programs, starts)
        ends = np.append(starts[1:], len(every))
        reported: set[tuple[SourceLine, SourceLine]] = set()
        checked: set[tuple[int, ...]] = set()
        for start, end in zip(starts[several].tolist(), ends[several].tolist(), strict=True):
            numbers = tuple(who[start:end].tolist())
            if numbers in checked:  # as for the neighbours of the element
                continue
            checked.add(numbers)
            pair = _clash([self.touches[number] for number in numbers])
            if pair is not None and (pair[0].line, pair[1].line) not in reported:
                reported.add((pair[0].line, pair[1].line))
                yield Clash(*pair, int(every[start]) * int(grain))


def _joined(some: dict[Program, int], more: dict[Program, int]) -> dict[Program, int]:
    return {program: max(some.get(program, -1), more.get(program, -1)) for program in {**some, **more}}


def _units(touch: Touch, grain: int) -> Addresses:
    """The pieces of `grain` bytes that a touch covers, each once."""
    pieces = np.arange(touch.size // grain, dtype=np.uint64)
    return np.unique(np.add.outer(touch.addresses // np.uint64(grain), pieces))


def _clash(touches: list[Touch]) -> tuple[Touch, Touch] | None:
    """The first clash among the touches of one element; each is compared with those since the newest plain write."""
    newest: list[Touch] = []
    for touch in touches:
        for other in newest:
            if other.clashes(touch):
                return other, touch
        if touch.writes and not touch.atomic:
            newest.clear()
        newest.append(touch)
    return None
