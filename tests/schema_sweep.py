"""Every operator of ATen that small inputs can call on a CPU: what it changes although its schema does not say so.

`python -m tests.schema_sweep` prints a line of JSON for each operator: the process may end in an operator of C++, and
the caller goes on behind it. Inputs are guessed from the schema: a few shapes and dtypes, by the names of arguments.
"""

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchstate.races.tracing.operations import Operation, tensors_in

SHAPES = ((3, 3), (4,), (), (2, 3, 4), (1, 2, 4, 4), (1, 2, 4, 4, 4))
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
LEFT_OUT = (
    "_cuda",
    "_cudnn",
    "_mps",
    "_nnpack",
    "_sparse",
    "_nested",
    "cudnn",
    "miopen",
    "mkldnn",
    "_mkldnn",
    "quantize",
)
"""Prefixes of operators for other devices and layouts."""

INDICES = ("index", "indices", "offsets", "target", "repeats", "inverse", "lengths", "batch_sizes", "segment")
ONE_DIMENSIONAL = (
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "mean",
    "invstd",
    "var",
    "vec",
    "offsets",
    "lengths",
)


def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, narrow: bool) -> torch.Tensor:
    """An operand; with `narrow`, one that goes by channels or is a vector has one dimension."""
    if name.startswith("mask"):
        dtype = torch.bool
    elif any(part in name for part in INDICES):
        dtype = torch.int64
    if narrow and any(part in name for part in ONE_DIMENSIONAL):
        shape = (shape[1],) if len(shape) > 1 else shape
    if dtype is torch.int64:
        return torch.zeros(shape, dtype=dtype)
    return (torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32) / 7).reshape(shape).to(dtype)


def values(kind: str, name: str, shape: tuple[int, ...], flag: bool) -> Any:
    """An argument that is no tensor."""
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if kind in ("int", "SymInt"):
        return 0 if "dim" in name else 1
    if kind.startswith(("List[int", "List[SymInt")):
        return [0] if "dim" in name else list(shape) if name in ("size", "shape") else [1] * max(len(shape) - 2, 1)
    if kind == "float" or kind in ("number", "Scalar"):
        return 0.5 if kind == "float" else 1
    if kind == "bool":
        return flag
    if kind.startswith("List[bool"):
        return [True, True, True]
    if kind.startswith("List[float"):
        return [0.5]
    return "sum" if kind == "str" else None


def calls(func: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments that may suit an operator, the likeliest first."""
    by_channel = any(argument.name == "running_mean" for argument in func._schema.arguments)  # it checks no shape
    shapes, dtypes = ((SHAPES[4], SHAPES[0]), DTYPES[:1]) if by_channel else (SHAPES, DTYPES)
    either = (True,) if by_channel else (True, False)
    for shape, dtype, narrow, full, flag in itertools.product(shapes, dtypes, either, either, (True, False)):
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in func._schema.arguments:
            kind = str(argument.type)
            if "Tensor" in kind:
                made: Any = tensor(argument.name, shape, dtype, narrow)
                if kind.startswith(("List", "Optional[List")):
                    made = [made, made.clone()]
                elif kind.startswith("Optional") and not full:
                    made = None
            elif (
                (argument.has_default_value() and not (argument.name == "training" or full))
                or "Generator" in kind
                or "Device" in kind
                or "Layout" in kind
                or "MemoryFormat" in kind
            ):
                continue
            else:
                made = values(kind, argument.name, shape, flag)
            if argument.kwarg_only:
                kwargs[argument.name] = made
            else:
                args.append(made)
        yield args, kwargs


def changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The arguments whose bytes or version an operator has changed, and which it is not known to write."""
    names = [argument.name for argument in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    before = {
        name: [(part, part.clone(), part._version) for part in tensors_in(value)] for name, value in named.items()
    }
    func(*args, **kwargs)
    written = [part for value in Operation.of(func).writes(args, kwargs) for part in tensors_in(value)]
    return [
        name
        for name, parts in before.items()
        for part, was, version in parts
        if not any(part is other for other in written)
        and (part._version != version or not torch.equal(part.nan_to_num(), was.nan_to_num()))
    ]


def operators() -> list[str]:
    """The names of all overloads of ATen that a mode is told of, in their order: composites arrive as their parts."""
    names = []
    for packet in sorted(set(torch._C._dispatch_get_all_op_names())):
        namespace, _, name = packet.partition("::")
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(packet, "CompositeImplicitAutograd")
        if (
            namespace == "aten"
            and not composite
            and not name.startswith(LEFT_OUT)
            and not name.partition(".")[2].endswith("out")
        ):
            names.append(name)
    return names


def overload(name: str) -> Any:
    """The overload, or None for one that Python cannot reach."""
    base, _, variant = name.partition(".")
    with contextlib.suppress(AttributeError, RuntimeError):
        return getattr(getattr(torch.ops.aten, base), variant or "default")
    return None


def sweep(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each operator: the calls that it took, and the arguments that it has changed unseen."""
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        func, took, unseen = overload(name), 0, set[str]()
        if func is None or Operation.of(func).is_metadata:
            yield {"operator": name, "calls": -1, "unseen": []}
            continue
        for args, kwargs in calls(func):
            try:
                unseen |= set(changed(func, args, kwargs))
                took += 1
            except Exception:  # inputs that do not suit it
                continue
            if took >= 6:
                break
        yield {"operator": name, "calls": took, "unseen": sorted(unseen)}


def main() -> int:
    """Sweeps the operators of stdin."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sweep(json.load(sys.stdin)):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
