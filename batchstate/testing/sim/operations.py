"""Every operation of torch: enqueued where it touches device memory, made at once where it does not."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.testing.sim.calls import Call, packed, written
from batchstate.testing.sim.device import Device
from batchstate.testing.sim.places import Places, new_tensors
from batchstate.testing.sim.queues import Lane, Task
from batchstate.testing.sim.shapes import Made, Signature, UnknownError, results_of
from batchstate.testing.sim.transfers import Transfers
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.refusals import mixed_operands
from batchstate.testing.watching.sites import site
from batchstate.testing.watching.touches import Operation, tensors_in


@final
class Operations:
    """The watcher of the simulated device.

    Args:
        device: runs what is enqueued.
        places: whose memory is whose.
        transfers: between host and device.
        current: the stream that operations go to.
        step: the present step.
        record_stream: told of a tensor and of the stream that uses its memory.

    Attributes:
        seen: operations on device memory so far.
        unmodelled: operations that the host had to wait for only because torch cannot say what they return, by name.
    """

    def __init__(
        self,
        device: Device,
        places: Places,
        transfers: Transfers,
        current: Callable[[], Lane],
        step: Callable[[], int],
        record_stream: Callable[[torch.Tensor, Any], None],
    ) -> None:
        self._device = device
        self._places = places
        self._transfers = transfers
        self._current = current
        self._step = step
        self._record_stream = record_stream
        self.seen = 0
        self.unmodelled: Counter[str] = Counter()

    # What torch tells

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `modes.Watcher`."""
        operation, of = Operation.of(func), self._places.of
        if operation.touches_nothing or Signature.of(func).metadata:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and of(result) is None:
                return self._lifted(result, lifted)
            return result
        tensors = [one for value in (*args, *kwargs.values()) for one in tensors_in(value)]
        non_blocking = operation.name == "copy_" and bool(kwargs.get("non_blocking", (*args, False)[2]))
        if non_blocking:
            self._transfers.decide(args[0], args[1])
        if kwargs.get("pin_memory") or not any(of(one) is Place.DEVICE for one in tensors):
            return self._on_host(operation, func, args, kwargs, tensors)
        self.seen += 1
        if operation.name == "copy_" and (of(args[0]) in _HOST or of(args[1]) in _HOST):
            return self._transfers.copy(args[0], args[1], non_blocking)
        return self._on_device(operation, func, args, kwargs, tensors)

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """See `modes.Watcher`."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False, None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if name == "record_stream":
                self._record_stream(args[0], args[1])
                return True, None
            return self._transfers.host_call(name, args[0], args[1:], kwargs)

    # On the device

    def _on_device(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        name, signature = operation.name, Signature.of(func)
        self._refuse_host(operation, args, tensors)
        if self._waits(operation, args, kwargs):
            self._transfers.synchronise(name)
            return self._now(name, func, args, kwargs, tensors)
        try:
            made = results_of(func, args, kwargs)
        except UnknownError:
            self._device.drain(self._current())
            result = self._now(name, func, args, kwargs, tensors)
            self.unmodelled[name] += 1  # only now: what torch refuses is no gap of this model
            return result
        pack = self._places.pack
        changed = [packed(one, self._places.pack_written) for one in signature.writes(args, kwargs)]
        call_args = [packed(one, pack) for one in args]
        call_kwargs = {key: packed(one, pack) for key, one in kwargs.items()}
        fresh = [self._allocated(one) for one in made]
        if name not in _LEAVE_EMPTY:
            targets = [packed(one, pack) for one in fresh] if any(made) else []
            task = Task(
                name,
                self._step(),
                site(2),
                Call(func, call_args, call_kwargs, targets, _seed(kwargs) if signature.draws(args, kwargs) else None),
                lambda: written([*changed, *targets]),
            )
            self._device.enqueue(self._current(), task)
        results = [
            one if key is None else kwargs[key] if isinstance(key, str) else args[key]
            for one, key in zip(fresh, signature.returned, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _allocated(self, made: Any) -> Any:
        if isinstance(made, Made):
            return self._places.new(made)
        return [self._allocated(one) for one in made] if isinstance(made, list) else made

    def _now(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Runs an operation at once: its stream has nothing before it."""
        for one in tensors:
            if self._places.of(one) not in _HOST:
                self._places.on_device(one)
        result = func(*args, **kwargs)
        self._device.note(self._current(), name, self._step())

        def keep(one: torch.Tensor) -> torch.Tensor:
            known = self._places.of(one) is not None or not _is_plain(one)
            return one if known else self._places.copied_to_device(one)

        return new_tensors(result, keep)

    def _waits(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the host needs the result, its shape, or has to bring an operand across."""
        if operation.waits:
            return True
        if operation.name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if not operation.takes_host_index:
            return False
        if any(one is not None and one.ndim and self._places.of(one) in _HOST for one in args[1]):
            return True
        # One number put where a mask says is a plain fill.
        fills = len(args) > 2 and args[2].ndim == 0 and self._places.of(args[2]) is not Place.DEVICE
        return operation.by_mask(args) and not fills

    def _refuse_host(self, operation: Operation, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        if not any(one.ndim and self._places.of(one) in _HOST for one in tensors):
            return
        indices = list(tensors_in(args[1])) if operation.takes_host_index else []
        for one in tensors:
            if one.ndim and self._places.of(one) in _HOST and not any(one is index for index in indices):
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
        places = self._places
        if kwargs.get("pin_memory"):
            return places.keep(func(*args, **{**kwargs, "pin_memory": False}), Place.PINNED)
        result = func(*args, **kwargs)
        host = any(places.of(one) in _HOST for one in tensors)
        given = [one.untyped_storage()._cdata for one in tensors if _is_plain(one)]

        def keep(one: torch.Tensor) -> torch.Tensor:
            if not _is_plain(one) or places.of(one) is not None or one.untyped_storage()._cdata in given:
                return one
            if host:
                return places.keep(one, Place.HOST)
            if operation.name in _LEAVE_EMPTY:
                return places.undecided(one)
            return places.filled(one, operation.name, self._step(), late=True)

        return new_tensors(result, keep)

    def _lifted(self, tensor: torch.Tensor, by_factory: bool) -> torch.Tensor:
        if not by_factory:
            return self._places.keep(tensor, Place.HOST)
        if tensor.untyped_storage().resizable():
            return self._places.filled(tensor, "lift", self._step(), late=False)  # the host waits for such a copy
        return self._places.keep(tensor, Place.UNDECIDED)  # numpy has it too, and goes on writing it


_HOST = (Place.HOST, Place.PINNED)

_LEAVE_EMPTY = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that allocate, and do nothing on the device."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in one piece of CPU memory: neither sparse nor of another device."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _seed(kwargs: Mapping[str, Any]) -> int:
    """Drawn when an operation is enqueued: what it draws must not depend on when it runs."""
    return int(torch.randint(1 << 62, (), generator=kwargs.get("generator")))
