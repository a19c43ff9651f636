"""The registry of micro-cases: tiny programs in pairs that differ in one thing, which makes one of them a race."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import attrs
import numpy.typing as npt
import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime

Values: TypeAlias = Sequence[torch.Tensor | npt.NDArray[Any]] | None
"""What a program computed: read once everything has run. None where no number tells right from wrong."""


class Program(Protocol):
    """A case as it is written: one function for both sides of a pair."""

    __name__: str

    def __call__(self, rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
        """Runs one of the two, with two streams besides the one that is current at first."""
        ...


@final
@attrs.frozen
class Side:
    """One of the two accesses that a race is between.

    Attributes:
        stream: name of the stream, or `host`.
        operation: as the detector calls it on a CPU; an accelerator may dispatch another for the same call.
    """

    stream: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream}"


@final
@attrs.frozen
class Case:
    """One program.

    Attributes:
        pair: name that it shares with its twin.
        group: file that it stands in.
        racy: whether it has the race; its twin has not.
        kind, first, second, rows: the one race that the racy twin has: its kind, the two accesses in program order, and
            what of the memory both touch.
        about: what the pair is about, in a sentence.
        shows: what makes this one racy or safe.
    """

    pair: str
    group: str
    racy: bool
    kind: RaceKind
    first: Side
    second: Side
    rows: str
    about: str
    shows: str
    _program: Program = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """Unlike any other case's."""
        return f"{self.pair} ({'racy' if self.racy else 'safe'})"

    def run(self, rt: CaseRuntime) -> Values:
        """Runs it on a fresh runtime, inside its window if it has one."""
        return self._program(rt, self.racy, rt.stream("left"), rt.stream("right"))


CASES: dict[str, Case] = {}
"""Name -> case; the racy one of a pair stands before the safe one."""

GROUPS = {
    "order": "Who waits for whom",
    "events": "Fences and events",
    "regions": "Parts of one tensor",
    "views": "Views of the same bytes",
    "indexing": "Parts that an index or a mask names",
    "operations": "What operations read, write and make",
    "to_device": "Copies to the device",
    "to_host": "Copies to the host",
    "between_copies": "Copies against copies and operations",
    "lifetimes": "Memory that is freed",
    "launches": "Kernels, graphs, and the library's transfers",
}
"""File that cases stand in -> what they are about."""


def pair(kind: RaceKind, first: str, second: str, rows: str) -> Callable[[Program], Program]:
    """Registers both sides of a program.

    Its name is the pair's. Its docstring says what the pair is about, then, in paragraphs that begin with `Racy:` and
    `Safe:`, what makes the one racy and the other safe.

    Args:
        kind: of the race.
        first: `STREAM: OPERATION` of the access that comes first in the program.
        second: of the other.
        rows: what both touch, as a report says it.
    """

    def register(program: Program) -> Program:
        name = program.__name__.replace("_", " ")
        group = str(getattr(program, "__module__", "")).rpartition(".")[2]
        about, racy, safe = re.split(r" (?:Racy|Safe): ", " ".join((program.__doc__ or "").split()))
        for wrong, shows in ((True, racy), (False, safe)):
            shows = shows.removesuffix(".")
            case = Case(name, group, wrong, kind, _side(first), _side(second), rows, about, shows, program)
            CASES[case.name] = case
        return program

    return register


def _side(text: str) -> Side:
    stream, _, operation = text.partition(": ")
    return Side(stream, operation)
