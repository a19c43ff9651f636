"""What code says to `torch.cuda` about streams, events and graphs of a GPU, told to the race detector.

Each function and method runs as it would; what it orders is noted. They are replaced where `torch.cuda` has them as
Python, so that names the code has imported early go on working. All attributes are put back later. What is known of an
event lies in its attributes: torch 2.11 frees events without clearing the weak references to them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from batchstate.testing.cuda._names import assigned_name
from batchstate.testing.cuda._streams import generic, make_event, make_stream
from batchstate.testing.cuda._torch import replace

if TYPE_CHECKING:
    from batchstate.testing.cuda.watching import WatchedCuda


KINDS: tuple[Any, Any, Any] = torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph
"""Classes whose methods are noted."""


@contextlib.contextmanager
def observed(rt: "WatchedCuda") -> Iterator[None]:
    """A window in which `rt` is told of streams, events, graphs and waits; afterwards torch is as it was."""
    c: Any = torch._C
    with contextlib.ExitStack() as stack:
        for owner, attributes in (
            (torch.cuda.Stream, {"__new__": _makes(torch.cuda.Stream, rt.new_stream)}),
            (torch.cuda.Event, {"__new__": _makes(torch.cuda.Event, rt.new_event)}),
            (KINDS[0], _stream_methods(rt, KINDS[0])),
            (KINDS[1], _event_methods(rt, KINDS[1])),
            (KINDS[2], _graph_methods(rt, KINDS[2])),
            (torch.Tensor, {"record_stream": _record_stream(rt), "tolist": _to_list(rt)}),
            (
                torch,
                {"Stream": generic(torch.cuda.Stream, make_stream), "Event": generic(torch.cuda.Event, make_event)},
            ),
            (
                c,
                {
                    "_cuda_synchronize": _waits_for_all(rt, c._cuda_synchronize),
                    "_accelerator_synchronizeDevice": _waits_for_all(rt, c._accelerator_synchronizeDevice),
                    "_accelerator_getStream": lambda index=0: torch.cuda.current_stream(),
                },
            ),
        ):
            for name, value in attributes.items():
                replace(stack, owner, name, value)
        yield


def _waits_for_all(rt: "WatchedCuda", synchronize: Callable[..., None]) -> Callable[..., None]:
    def waits(*args: Any) -> None:
        synchronize(*args)
        rt.all_is_over()

    return waits


def _record_stream(rt: "WatchedCuda") -> Callable[..., None]:
    record_stream: Any = torch.Tensor.record_stream

    def recorded(self: torch.Tensor, stream: Any) -> None:
        record_stream(self, stream)
        rt.keep_for(self, stream)

    return recorded


def _to_list(rt: "WatchedCuda") -> Callable[..., Any]:
    to_list: Any = torch.Tensor.tolist

    def read(self: torch.Tensor) -> Any:
        rt.host_reads(self, "tolist")
        return to_list(self)

    return read


def _makes(kind: Any, told: Callable[[Any, str | None], None]) -> Callable[..., Any]:
    make = kind.__new__

    def new(cls: Any, *args: Any, **given: Any) -> Any:
        made = make(cls, *args, **given)
        if "stream_id" not in given:  # else it is one that there was
            told(made, assigned_name())
        return made

    return new


def _stream_methods(rt: "WatchedCuda", kind: Any) -> dict[str, Any]:
    query, synchronize = kind.query, kind.synchronize

    def waits(self: Any) -> None:
        fence = rt.end_of(self)
        synchronize(self)
        rt.host_waited(fence)

    return {"query": lambda self: rt.stream_done(self, lambda: query(self)), "synchronize": waits}


def _event_methods(rt: "WatchedCuda", kind: Any) -> dict[str, Any]:
    record, wait, query, synchronize = kind.record, kind.wait, kind.query, kind.synchronize

    def recorded(self: Any, stream: Any = None) -> None:
        record(self, stream)
        rt.recorded_event(self, stream)

    def waited(self: Any, stream: Any = None) -> None:
        wait(self, stream)
        rt.stream_waits(self, stream)

    def waits(self: Any) -> None:
        fence = rt.fence_of(self)
        synchronize(self)
        rt.host_waited(fence)

    def asked(self: Any) -> bool:
        return rt.event_done(self, lambda: query(self))

    return {"record": recorded, "wait": waited, "query": asked, "synchronize": waits}


def _graph_methods(rt: "WatchedCuda", kind: Any) -> dict[str, Any]:
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    def begins(self: Any, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        rt.capture_begins(self)

    def ends(self: Any) -> None:
        rt.capture_ends()
        end(self)

    def replays(self: Any) -> None:
        rt.replays(self)
        replay(self)

    return {"capture_begin": begins, "capture_end": ends, "replay": replays}
