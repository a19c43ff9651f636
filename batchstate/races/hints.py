"""The missing edge of a report, and how to add it, in words of this library."""

from typing import ClassVar

from batchstate._source_lines import SourceLine
from batchstate.races.history import Entry, History
from batchstate.races.report import Access, RaceKind
from batchstate.races.tracing.clocks import HOST, StreamClock


class HintFor:
    """The missing edge and the remedy of a report.

    Attributes:
        FENCES: prefix of the names of fences that the code has named itself.
    """

    FENCES: ClassVar[str] = ""

    def __call__(
        self,
        history: History,
        stream: StreamClock,
        kind: RaceKind,
        first: Access,
        second: Access,
        dropped: SourceLine | None = None,
    ) -> tuple[str, str]:
        """The edge that is missing, and how to add it.

        `stream` is that of the first access; `dropped` is the line where the last tensor of freed memory was dropped.
        """
        if kind is RaceKind.UNWRITTEN_READ:
            return (
                f"nothing writes any of it between {first.operation} and {second.operation}",
                "write it first, allocate it with zeros, or read only what was written",
            )
        if kind is RaceKind.LEFTOVER_READ and first.does == "gives":
            return (
                "a graph has numbers of the host from its capture",
                "keep the number in a tensor that is filled before each replay, or capture the graph again",
            )
        if kind is RaceKind.LEFTOVER_READ:
            return (
                f"nothing writes it anew between {first.operation} and {second.operation}",
                "write or clear it when it gets its next owner, or read only what that has written",
            )
        if first.does == "frees":
            return (
                "the graph keeps no memory that was there before its capture",
                "keep the tensor for as long as the graph is replayed, or capture the graph again",
            )
        if kind is RaceKind.PROGRAMS_CLASH:
            return (
                f"nothing orders the programs of one launch of {first.operation}",
                "give each program elements of its own, use atomics on both sides, or make two launches of it",
            )
        behind = history.fence_behind(stream, first.event, first.step, named=self.FENCES)
        if kind is RaceKind.FREED_IN_USE and first.does != "allocates":
            where = "" if dropped is None or dropped.line is None else f", dropped at {dropped.line},"
            remedy = self.keep(first, behind)
            if second.lane == HOST:
                remedy = (
                    f"keep it until {first.operation} on {first.lane!r} is over: "
                    "torch keeps pinned memory for copies that it has made itself, and for nothing else"
                )
            return (f"nothing keeps the memory{where} until stream {first.lane!r} is done with it", remedy)
        who = "the host" if second.lane == HOST else f"stream {second.lane!r}"
        early = history.waited_too_early(stream, first, second)
        if early is not None:
            return (
                f"{who} waits for {early.name}, which was recorded before {first.operation} on stream {first.lane!r}",
                self.record_behind(first, early),
            )
        return (f"{who} never waits for {first.operation} on stream {first.lane!r}", self.wait(first, second, behind))

    def keep(self, first: Access, behind: Entry | None) -> str:
        """How memory is kept until an access is over, perhaps with the fence behind it."""
        hold = "" if behind is None else f", or keep the tensor until {behind.name} is complete"
        return (
            f"hand the tensor over with `Runtime.use_on_current_stream` (on an accelerator also `record_stream`) "
            f"before {first.operation} on {first.lane!r}{hold}"
        )

    def record_behind(self, first: Access, early: Entry) -> str:
        """How a fence that was recorded too early is recorded behind an access."""
        return (
            f"record the fence after {first.operation}: "
            f"{early.name} (recorded at {early.source_line.line}) comes before it"
        )

    def wait(self, first: Access, second: Access, behind: Entry | None) -> str:
        """How the second access waits for the first, perhaps with the fence behind it."""
        where = "on the host" if second.lane == HOST else f"on stream {second.lane!r}"
        if behind is None:
            wait = f"record a fence on stream {first.lane!r} after {first.operation}, and wait for it"
        else:
            wait = f"wait for {behind.name} (recorded on stream {first.lane!r} at {behind.source_line.line})"
        return f"{wait} {where} before {second.operation}"


hint_for = HintFor()
