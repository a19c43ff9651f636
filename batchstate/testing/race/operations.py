"""Every operation of torch, told to the detector: on which stream it runs, and what it touches."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.detector import Detector, Kept
from batchstate.testing.race.host_memory import HostMemory
from batchstate.testing.race.journal import Entry
from batchstate.testing.race.lifetimes import Lifetimes
from batchstate.testing.race.report import EventKind
from batchstate.testing.watching.memory import Memories, Name, Place
from batchstate.testing.watching.regions import Region, of_tensor
from batchstate.testing.watching.sites import site
from batchstate.testing.watching.touches import Operation, Touch, tensors_in

Given = tuple[Sequence[Any], Mapping[str, Any]]


@final
class Operations:
    """The watcher of the race detector.

    Args:
        detector: judges.
        device: of the runtime. On a CPU, memory is known by how it came about.
        current: the lane of the current stream.
        lane_of: the lane of any stream.

    Attributes:
        memories: all memory that was seen.
        host_memory: copies between host and device.
        launched: name of the innermost launch under way, for reports.
        seen: memory touched since the innermost launch began, with whether it was written, or None outside of one.
    """

    def __init__(
        self,
        detector: Detector,
        device: torch.device,
        current: Callable[[], Lane],
        lane_of: Callable[[Any], Lane],
    ) -> None:
        self._detector = detector
        self._device = device
        self._current = current
        self._lane_of = lane_of
        self._lifetimes = Lifetimes(detector)
        self._muted = 0
        self._numbers = 0
        self.launched: str | None = None
        self.memories: Memories[Kept] = Memories(self._lifetimes.freed)
        self.host_memory = HostMemory(detector)
        self.seen: dict[Kept, bool] | None = None

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """A window in which operations are the tool's own, and nobody's access."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    # What torch tells

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `modes.Watcher`."""
        if self._muted:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.views:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and self.memories.of(result) is None:
                self._keep(result, Place.UNDECIDED if lifted else Place.HOST)
            return result
        tensors = [one for value in (*args, *kwargs.values()) for one in tensors_in(value)]
        if any(self.place(one) is Place.DEVICE for one in tensors):
            if operation.name == "copy_":
                places = self.place(args[0]), self.place(args[1])
                if Place.DEVICE in places and (Place.HOST in places or Place.PINNED in places):
                    return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
            return self._on_device(operation, func, (args, kwargs), tensors)
        return self._on_host(operation, func, (args, kwargs), tensors)

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """See `modes.Watcher`."""
        if self._muted or not args or not isinstance(args[0], torch.Tensor):
            return False, None
        tensor = args[0]
        with torch._C.DisableTorchFunction():
            place = self.place(tensor)
            if name == "record_stream":
                self.hand(tensor, self._lane_of(args[1]))
                return self._device.type == "cpu", None
            if self._device.type != "cpu":
                return False, None  # there all of these dispatch what they do
            if name == "pin_memory":
                return True, self._pinned_copy(tensor)
            if place is Place.DEVICE:
                return self._device_to_host(name, tensor, args[1:], kwargs)
            if name == "to" and place in (Place.HOST, Place.PINNED) and _target(args[1:], kwargs) == self._device:
                return True, self._host_to_device(tensor, bool(kwargs.get("non_blocking", False)))
            if name == "tolist" and place is Place.PINNED:
                self.host_access(tensor, "tolist", writes=False)
        return False, None

    # Memory

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for memory that was not seen yet."""
        if self._device.type != "cpu" and tensor.device.type != "cpu":
            return Place.DEVICE
        kept = self.memories.of(tensor)
        return None if kept is None else kept.place

    def kept(self, tensor: torch.Tensor) -> Kept:
        """What is known of device memory, which an operation of the device makes of any memory it touches."""
        kept = self.memories.of(tensor)
        if kept is None:
            kept = self.memories.add(tensor, Kept(self._name(tensor), Place.DEVICE, None, None))
        elif kept.place is Place.UNDECIDED:
            kept.place = Place.DEVICE
            if kept.made is not None:
                kept.made.hidden = False
        return kept

    def made(self, tensor: torch.Tensor, entry: Entry) -> Kept:
        """New device memory, written by an event.

        Raises:
            Race: it may be memory that another stream still uses.
        """
        kept = self._keep(tensor, Place.DEVICE)
        region = of_tensor(tensor)
        if region is not None:
            entry.writes = (*entry.writes, (kept.name, region))
            self._detector.judge(entry, [(kept, region, True)])
        self._lifetimes.allocates(entry.lane, entry)
        return kept

    def pinned(self, tensor: torch.Tensor) -> None:
        """Host memory that copies use without the host waiting."""
        self._keep(tensor, Place.PINNED)

    def hand(self, tensor: torch.Tensor, lane: Lane) -> None:
        """The memory is kept until a stream has run what it has by then."""
        self.kept(tensor).handed.add(lane.number)

    def _keep(self, tensor: torch.Tensor, place: Place) -> Kept:
        made_on = self._current() if place in (Place.DEVICE, Place.UNDECIDED) else None
        return self.memories.add(tensor, Kept(self._name(tensor), place, made_on, site(2)))

    def _name(self, tensor: torch.Tensor) -> Name:
        self._numbers += 1
        return Name(self._numbers, tensor)

    # On the device

    def declared(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Accesses that a launch declares, of what torch did not show.

        Raises:
            Race: one of them is not ordered.
        """
        found = [Touch(one, region, False) for one in reads if (region := of_tensor(one)) is not None]
        found += [Touch(one, region, True) for one in writes if (region := of_tensor(one)) is not None]
        if found:
            self._access(EventKind.OPERATION, name, found)

    def _on_device(self, operation: Operation, func: Any, given: Given, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = given
        if self._device.type == "cpu":
            self._refuse_host(operation, tensors)
        touches = operation.touches(args, kwargs, self._read_index)
        entry = self._access(EventKind.OPERATION, operation.name, touches)
        result = func(*args, **kwargs)
        for one in tensors_in(result):
            if self.memories.of(one) is None and one.device.type == self._device.type:
                self.made(one, entry)
        if operation.waits or operation.by_mask(args):
            self.host_waits(entry.lane)
        elif self._device.type != "cpu" and operation.name == "_to_copy":
            self._brought(entry, result, bool(kwargs.get("non_blocking", False)))
        return result

    def _access(self, kind: EventKind, name: str, touches: Sequence[Touch]) -> Entry:
        judged = [(self.kept(one.tensor), one.region, one.writes) for one in touches]
        if self.seen is not None:
            for kept, _, writes in judged:
                self.seen[kept] = writes or self.seen.get(kept, False)
        entry = self._detector.event(
            self._current(),
            kind,
            name if self.launched is None else f"{name} ({self.launched})",
            reads=[(kept.name, region) for kept, region, writes in judged if not writes],
            writes=[(kept.name, region) for kept, region, writes in judged if writes],
            at=site(3),
        )
        self._detector.judge(entry, judged)
        return entry

    def _refuse_host(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
        for one in tensors:
            if one.ndim and self.place(one) in (Place.HOST, Place.PINNED) and not operation.takes_host_index:
                raise DeviceError(
                    f"{operation.name} of device tensors and a host tensor {tuple(one.shape)}",
                    value=tuple(one.shape),
                    remedy="bring it to the device first, with `Runtime.upload`; on an accelerator torch refuses too",
                )

    def _read_index(self, index: torch.Tensor) -> Any:
        if index.device.type != "cpu":
            torch.get_device_module(index.device).synchronize()  # whichever stream made it
            index = index.cpu()
        return index.numpy()

    def host_waits(self, lane: Lane) -> None:
        """The host has waited for all that a stream has enqueued."""
        self._detector.clocks.host_joins(lane.seen)
        with self.muted():
            self.host_memory.settle()

    # On the host

    def _on_host(self, operation: Operation, func: Any, given: Given, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = given
        if kwargs.get("pin_memory") and self._device.type == "cpu":
            kwargs = {**kwargs, "pin_memory": False}
            result = func(*args, **kwargs)
            self.pinned(result)
            return result
        if any(self.place(one) is Place.PINNED for one in tensors):
            for touch in operation.touches(args, kwargs, self._read_index):
                if self.place(touch.tensor) is Place.PINNED:
                    self._host_touches(touch.tensor, touch.region, operation.name, writes=touch.writes)
        result = func(*args, **kwargs)
        place = Place.HOST if any(self.place(one) in (Place.HOST, Place.PINNED) for one in tensors) else None
        for one in tensors_in(result):
            self._made_by_host(operation, one, place)
        return result

    def _made_by_host(self, operation: Operation, tensor: torch.Tensor, place: Place | None) -> None:
        if self._device.type != "cpu":
            if tensor.device.type != "cpu":
                if self.memories.of(tensor) is None:
                    self.made(tensor, self._access(EventKind.OPERATION, operation.name, ()))
            elif tensor.is_pinned() and self.memories.of(tensor) is None:
                self.pinned(tensor)
            return
        kept = self.memories.of(tensor)
        if kept is None:
            kept = self._keep(tensor, place or Place.UNDECIDED)
        if kept.place is Place.UNDECIDED and (region := of_tensor(tensor)) is not None:
            entry = self._detector.event(
                self._current(),
                EventKind.OPERATION,
                operation.name,
                writes=[(kept.name, region)],
                at=site(3),
                hidden=kept.made is None,
            )
            kept.made = entry
            self._detector.judge(entry, [(kept, region, True)])

    def host_access(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """The host touches pinned memory.

        Raises:
            Race: a copy that may not have run uses it.
        """
        region = of_tensor(tensor)
        if region is not None:
            self._host_touches(tensor, region, name, writes=writes)

    def _host_touches(self, tensor: torch.Tensor, region: Region, name: str, *, writes: bool) -> None:
        kept = self.memories.of(tensor)
        if kept is None:
            return
        used = [(kept.name, region)]
        entry = self._detector.event(
            self._detector.clocks.host,
            EventKind.HOST_ACCESS,
            name,
            reads=() if writes else used,
            writes=used if writes else (),
            at=site(3),
        )
        self._detector.judge(entry, [(kept, region, writes)])

    # Between the two

    def copied_to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A copy of pinned memory to device memory was enqueued on the current stream.

        Raises:
            Race: it may come across another access.
        """
        entry = self._transfer(EventKind.COPY_TO_DEVICE, source, target)
        kept, region = self.memories.of(source), of_tensor(source)
        if kept is not None and region is not None:
            with self.muted():
                self.host_memory.reads(entry, kept, region, source)

    def copied_to_host(self, source: torch.Tensor, target: torch.Tensor, values: torch.Tensor) -> None:
        """A copy of device memory to pinned memory was enqueued on the current stream; `values` is what it brings.

        Raises:
            Race: it may come across another access.
        """
        entry = self._transfer(EventKind.COPY_TO_HOST, source, target)
        with self.muted():
            self.host_memory.lands(entry, target, values)

    def _transfer(self, kind: EventKind, source: torch.Tensor, target: torch.Tensor) -> Entry:
        places = {id(source): self.memories.of(source), id(target): self.memories.of(target)}
        judged = []
        for one, writes in ((source, False), (target, True)):
            region = of_tensor(one)
            kept = places[id(one)] or self.kept(one)
            if kept.place is Place.UNDECIDED:
                kept = self.kept(one)
            if region is not None:
                judged.append((kept, region, writes))
        entry = self._detector.event(
            self._current(),
            kind,
            str(kind),
            reads=[(kept.name, region) for kept, region, writes in judged if not writes],
            writes=[(kept.name, region) for kept, region, writes in judged if writes],
            at=site(3),
        )
        self._detector.judge(entry, judged)
        return entry

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`copy_` across. Without `non_blocking`, or with memory that is not pinned, the host waits."""
        to_device = self.place(target) is Place.DEVICE
        pinned = self.place(source if to_device else target) is Place.PINNED
        lane = self._current()
        if not (non_blocking and pinned):
            self._transfer(EventKind.COPY_TO_DEVICE if to_device else EventKind.COPY_TO_HOST, source, target)
            self.host_waits(lane)
            return target.copy_(source)
        if to_device:
            self.copied_to_device(source, target)
            return target.copy_(source)
        self.copied_to_host(source, target, source.to(target.dtype, copy=True).expand(target.shape))
        return target

    def _device_to_host(
        self, name: str, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        if name in ("numpy", "__array__"):
            raise DeviceError(
                f"{name} of a device tensor {tuple(tensor.shape)}",
                value=tuple(tensor.shape),
                remedy="use `Runtime.download` or `.cpu()`; on an accelerator torch refuses too",
            )
        target = _target(args, kwargs)
        if name == "to" and not (isinstance(target, str) and target == "cpu"):
            return False, None
        values = tensor.detach().clone()
        if name == "to" and kwargs.get("non_blocking", False):
            result = torch.empty_like(values)
            self.pinned(result)  # as torch does on an accelerator
            self.copied_to_host(tensor, result, values)
            return True, result
        result = values
        self._keep(result, Place.HOST)
        self._transfer(EventKind.COPY_TO_HOST, tensor, result)
        self.host_waits(self._current())
        return True, result.tolist() if name == "tolist" else result

    def _brought(self, entry: Entry, result: torch.Tensor, non_blocking: bool) -> None:
        """`_to_copy` of an accelerator has brought something to the host."""
        if result.device.type == "cpu":
            if not non_blocking:
                self.host_waits(entry.lane)
            else:
                self.pinned(result)
                torch.get_device_module(self._device).synchronize()
                with self.muted():
                    self.host_memory.lands(entry, result, result.clone())

    def _host_to_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        result = torch.empty_like(tensor)
        entry = self._detector.event(self._current(), EventKind.ALLOCATION, "empty", at=site(3))
        self.made(result, entry)
        return self._copy(result, tensor, non_blocking)

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.place(tensor) is Place.DEVICE:
            raise ArgumentError("pin_memory of a device tensor", value=None, remedy="only host memory can be pinned")
        result = tensor.clone()
        self.pinned(result)
        return result


def _target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The device that `.to` names, or None. A `torch.device` is the runtime's, the word "cpu" is the host."""
    named = kwargs.get("device", args[0] if args else None)
    return named if isinstance(named, str | torch.device) else None
