"""Kernels that torch does not see, said by what they read and write."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.cuda._window import open_window
from batchstate.testing.tracing.dispatch import raw_kernel

P = ParamSpec("P")
T = TypeVar("T")


def declared_kernel(
    *, reads: Sequence[str] = (), writes: Sequence[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declares what a kernel of its own accesses, by the names of its arguments; lists and tuples of tensors too.

    Inside of a window of `cuda_on_cpu` a call is one operation of the current stream with these accesses. The function
    runs at once, unseen; on the simulated device it runs late, and what it returns is dropped. Elsewhere it is the
    function. Pass it as `stands_for`, or decorate the launcher.

    Args:
        reads: names of arguments that it reads.
        writes: names of arguments that it writes; one that is read and written stands in both.

    Raises:
        ArgumentError: the function has no such argument.
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        for name in (*reads, *writes):
            if name not in signature.parameters:
                raise ArgumentError(
                    f"{function.__name__} has no argument {name!r}", value=name, remedy="name arguments of the function"
                )

        @functools.wraps(function)
        def launch(*args: P.args, **kwargs: P.kwargs) -> T:
            rt = open_window()
            if rt is None:
                return function(*args, **kwargs)
            given, names = signature.bind(*args, **kwargs).arguments, tuple(kwargs)

            def kernel(*values: Any) -> T:
                return function(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

            with rt.lock:
                launched: T = rt.launch(
                    raw_kernel(kernel),
                    *args,
                    *kwargs.values(),
                    reads=_tensors(given, reads),
                    writes=_tensors(given, writes),
                    name=function.__name__,
                )
                return launched

        return launch

    return declare


def _tensors(given: dict[str, Any], names: Sequence[str]) -> list[torch.Tensor]:
    values = [given.get(name) for name in names]
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, torch.Tensor)]
