"""Every operation of torch, told to the detector: whether it is the host's or the device's, and what it touches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.testing.race.accesses import Accesses
from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.transfers import Transfers
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.refusals import mixed_operands
from batchstate.testing.watching.touches import Operation, tensors_in

_HOSTS = (Place.HOST, Place.PINNED)


@final
class Operations:
    """The watcher of the race detector.

    An operation with an operand on the device is the device's, and runs on the current stream. Others are the host's;
    of what they make on a CPU it shows later where it belongs.

    Args:
        accesses: of the runtime.
        transfers: between host and device.
        lane_of: the lane of a stream, of the library or of torch.
    """

    def __init__(self, accesses: Accesses, transfers: Transfers, lane_of: Callable[[Any], Lane]) -> None:
        self._accesses = accesses
        self._transfers = transfers
        self._lane_of = lane_of

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `modes.Watcher`."""
        __tracebackhide__ = True
        accesses = self._accesses
        if accesses.silent:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.touches_nothing:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and accesses.on_cpu and accesses.memories.of(result) is None:
                accesses.keep(result, Place.UNDECIDED if lifted else Place.HOST)
            return result
        tensors = [one for value in (*args, *kwargs.values()) for one in tensors_in(value)]
        if operation.name == "copy_" and len(args) > 2 and args[2]:
            self._transfers.decide(args[0], args[1])
        if any(accesses.place(one) is Place.DEVICE for one in tensors):
            if operation.name == "copy_" and self._transfers.crosses(args[0], args[1]):
                return self._transfers.copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
            return self._on_device(operation, func, args, kwargs, tensors)
        return self._on_host(operation, func, args, kwargs, tensors)

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """See `modes.Watcher`."""
        accesses, transfers = self._accesses, self._transfers
        if accesses.silent or not args or not isinstance(args[0], torch.Tensor):
            return False, None
        tensor = args[0]
        with torch._C.DisableTorchFunction():
            place = accesses.place(tensor)
            if name == "record_stream":
                accesses.hand(tensor, self._lane_of(args[1]))
                return accesses.on_cpu, None
            if not accesses.on_cpu:
                return False, None  # there all of these dispatch what they do
            if name == "is_pinned":
                return True, place is Place.PINNED
            if place is Place.DEVICE:
                return transfers.to_host(name, tensor, args[1:], kwargs)
            if name == "pin_memory":
                return True, transfers.pinned_copy(tensor)
            if name == "to" and place in _HOSTS:
                return transfers.to_device(tensor, args[1:], kwargs)
            if name == "tolist" and place is Place.PINNED:
                accesses.host_access(tensor, "tolist", writes=False)
        return False, None

    # On the device

    def _on_device(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        __tracebackhide__ = True
        accesses = self._accesses
        if accesses.on_cpu:
            self._refuse_host(operation, tensors)
        touches = operation.touches(args, kwargs, accesses.read_index)
        if not accesses.on_cpu:
            touches = [one for one in touches if one.tensor.device.type != "cpu" or accesses.memories.of(one.tensor)]
        with accesses.accessing(EventKind.OPERATION, operation.name, touches) as entry:
            result = func(*args, **kwargs)
        for one in tensors_in(result):
            if accesses.memories.of(one) is None and (accesses.on_cpu or one.device.type != "cpu"):
                accesses.made(one, entry)
        # An index of the host is brought there first, and that copy waits.
        from_host = operation.takes_host_index and any(one.ndim and accesses.place(one) in _HOSTS for one in tensors)
        if operation.waits or from_host or operation.by_mask(args):
            accesses.synchronises(operation.name, entry.lane.seen)
        elif operation.name == "_to_copy" and not accesses.on_cpu:
            self._transfers.converted(entry, args[0], result, bool(kwargs.get("non_blocking", False)))
        return result

    def _refuse_host(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
        for one in tensors:
            if one.ndim and self._accesses.place(one) in _HOSTS and not operation.takes_host_index:
                raise mixed_operands(operation.name, one)

    # On the host

    def _on_host(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        accesses = self._accesses
        if kwargs.get("pin_memory") and accesses.on_cpu:
            result = func(*args, **{**kwargs, "pin_memory": False})
            accesses.pinned(result)
            return result
        if any(accesses.place(one) is Place.PINNED for one in tensors):
            for touch in operation.touches(args, kwargs, accesses.read_index):
                if accesses.place(touch.tensor) is Place.PINNED:
                    accesses.host_touches(touch.tensor, touch.region, operation.name, writes=touch.writes)
        result = func(*args, **kwargs)
        from_host = any(accesses.place(one) in _HOSTS for one in tensors)
        for one in tensors_in(result):
            self._made(operation, one, args, kwargs, from_host)
        return result

    def _made(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        from_host: bool,
    ) -> None:
        accesses = self._accesses
        known = accesses.memories.of(tensor)
        if accesses.on_cpu:
            if from_host and known is None:
                accesses.keep(tensor, Place.HOST)
            elif not from_host:
                accesses.undecided(tensor, operation.name)
        elif tensor.device.type != "cpu":
            entry = accesses.access(EventKind.OPERATION, operation.name, ())
            if known is None:
                accesses.made(tensor, entry)
            if operation.name == "_to_copy":
                self._transfers.converted(entry, args[0], tensor, bool(kwargs.get("non_blocking", False)))
