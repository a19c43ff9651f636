"""`TracedRuntime`, the base of `RaceRuntime` and `SimRuntime`: a window, named streams and pinned memory."""

import abc
import contextlib
from collections import Counter
from typing import Any, Generic, Self, TypeVar

import torch

from batchstate._source_lines import SourceLine, source_line
from batchstate.errors import ArgumentError
from batchstate.races.tracing.dispatch import Tracer, tracing, untraced
from batchstate.races.tracing.memory import MemoryKind
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream

S = TypeVar("S")


class TracedRuntime(Runtime, Generic[S]):
    """A runtime that is told of every operation of torch in a `with` window of it.

    Args:
        inner: has the streams and their windows; None for a CPU.
        steps_in_flight: of that CPU.

    Attributes:
        waited_at: calls of torch that made the host wait, by name and source line. They count as forced syncs.
    """

    _tracer: Tracer[Any]

    def __init__(self, inner: Runtime | None, steps_in_flight: int) -> None:
        inner = CpuRuntime(steps_in_flight=steps_in_flight) if inner is None else inner
        self.waited_at: Counter[tuple[str, SourceLine]] = Counter()
        self._inner = inner
        self._streams: dict[object, S] = {}
        self._window: contextlib.ExitStack | None = None
        self._entered = False
        super().__init__(inner.device, steps_in_flight=inner.steps_in_flight)
        self._streams[inner.current_stream.key] = self._new_stream(inner.current_stream.name)
        self._tracer = self._new_tracer()

    def __enter__(self) -> Self:
        """From now on the tool is told of the operations of this thread."""
        self.check_owner("with")
        if self._entered:
            name = type(self).__name__
            raise ArgumentError(f"a {name} was entered twice", self, "make one for each `with`")
        self._entered = True
        self._window = contextlib.ExitStack()
        self._window.enter_context(self._tracing())
        return self

    def _tracing(self) -> contextlib.AbstractContextManager[None]:
        return tracing(self._tracer)

    def _leave(self) -> None:
        """Ends the window."""
        window, self._window = self._window, None
        if window is not None:
            window.close()

    @abc.abstractmethod
    def _new_tracer(self) -> Tracer[Any]:
        """The tracer that is told of operations."""

    @abc.abstractmethod
    def _new_stream(self, name: str) -> S:
        """The tool's state of a new stream."""

    @abc.abstractmethod
    def _recorded(self, stream: Stream | None, name: str) -> Fence:
        """A fence behind all that a stream, by default the current one, has so far; `name` is for reports."""

    def _known_stream(self, stream: Stream) -> S:
        """The tool's state of a stream.

        Raises:
            ArgumentError: it is another runtime's.
        """
        state = self._streams.get(stream.key)
        if state is None:
            raise ArgumentError(f"{stream!r} is not a stream of this runtime", stream, "use `Runtime.stream`")
        return state

    def _known_current(self) -> S:
        return self._known_stream(self._inner.current_stream)

    def _note_sync(self, name: str) -> None:
        self.waited_at[name, source_line(2)] += 1
        self.counters.forced_syncs += 1

    @property
    def synchronised(self) -> Counter[str]:
        """Calls of torch that made the host wait, by name."""
        calls: Counter[str] = Counter()
        for (name, _), times in self.waited_at.items():
            calls[name] += times
        return calls

    @property
    def pageable_copies(self) -> int:
        """Copies from memory that a factory made (`torch.tensor`), asked not to block: the host waits all the same."""
        return self._tracer.pageable_copies

    @property
    @abc.abstractmethod
    def in_flight_depths(self) -> list[int]:
        """The most steps that were under way at once, of each step with work, oldest first."""

    @property
    def in_flight_depth_max(self) -> int:
        """The most of them."""
        return max(self.in_flight_depths, default=0)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> torch.Tensor:
        """Zeroed host memory that `copy_(non_blocking=True)` uses without the host waiting; `name` is for reports."""
        with untraced():
            tensor = torch.zeros(shape, dtype=dtype, pin_memory=self.device.type != "cpu")
            self._tracer.keep(tensor, MemoryKind.PINNED)
        if name:
            self.name_memory(tensor, name)
        return tensor

    def stream(self, name: str) -> Stream:
        """A new stream."""
        stream = self._inner.stream(name)
        self._streams[stream.key] = self._new_stream(name)
        return stream

    @property
    def current_stream(self) -> Stream:
        """The stream of the innermost `use`."""
        return self._inner.current_stream

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """A window in which `stream` is the current one."""
        self._known_stream(stream)
        return self._inner.use(stream)

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self._inner.capturing
