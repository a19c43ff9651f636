"""Calls that run later, with stand-ins for the tensors among their arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import attrs
import torch

from batchstate.races.sim.device import Block, Memory

Pack = Callable[[torch.Tensor], Any]
"""Returns the stand-in of a tensor until the operation runs: a `View`, or a tensor of host memory."""


class View(NamedTuple):
    """A tensor of device memory, by where it lies."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, block: Block) -> "View":
        """The view that stands for a tensor of a block."""
        where = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(block, tensor.dtype, *where, tensor.is_conj(), tensor.is_neg())

    def tensor(self) -> torch.Tensor:
        """The tensor, for an operation that runs."""
        view = self.block.view(self.dtype, self.shape, self.stride, self.offset)
        if self.conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negative else view


@final
@attrs.frozen(eq=False)
class Call:
    """The work of an operation.

    Attributes:
        func: is called.
        args, kwargs: packed.
        targets: memory of its results, in their order; nested like them, None for results that are not kept.
        seed: of the numbers that it draws, or None.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    targets: Sequence[Any] = ()
    seed: int | None = None

    def __call__(self) -> None:
        """Does it."""
        args = [unpacked(value) for value in self.args]
        kwargs = {name: unpacked(value) for name, value in self.kwargs.items()}
        result = self.func(*args, **kwargs) if self.seed is None else self._drawn(args, kwargs)
        if self.targets:
            _store(self.targets, (result,) if len(self.targets) == 1 else result)

    def _drawn(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = torch.Generator().manual_seed(self.seed or 0)
            return self.func(*args, **kwargs)
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(self.seed or 0)
            return self.func(*args, **kwargs)
        finally:
            generator.set_state(state)


def packed(value: Any, pack: Pack) -> Any:
    """An argument with every tensor in it packed."""
    if isinstance(value, torch.Tensor):
        return pack(value)
    if isinstance(value, list | tuple) and not isinstance(value, View):
        return [packed(part, pack) for part in value]
    return value


def unpacked(value: Any) -> Any:
    """The argument again."""
    if isinstance(value, View):
        return value.tensor()
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    return value


def written(values: Sequence[Any]) -> list[Memory]:
    """All memory that an operation may change through some packed arguments."""
    memory: list[Memory] = []
    for value in values:
        if isinstance(value, View):
            memory.append(value.block.memory)
        elif isinstance(value, torch.Tensor):
            memory.append(value)
        elif isinstance(value, list):
            memory += written(value)
    return memory


def _store(targets: Sequence[Any], results: Sequence[Any]) -> None:
    for target, result in zip(targets, results, strict=True):
        if isinstance(target, list):
            _store(target, result)
        elif target is not None:
            memory = unpacked(target)
            if result.shape != memory.shape or result.dtype is not memory.dtype:
                expected = f"{memory.dtype}{list(memory.shape)}"
                raise RuntimeError(f"a result {result.dtype}{list(result.shape)}, where {expected} was expected")
            memory.copy_(result)
