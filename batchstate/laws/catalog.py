"""The list of laws, and what every law needs to judge and to report."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.violations import Code, Violation, Where

Ints = npt.NDArray[np.integer[Any]]
Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., None])

made: dict[Code, int] = dict.fromkeys(Code, 0)
"""How often each law was asked in this process. A plain dict: a `Counter` takes three times as long to count."""


@attrs.frozen
class Law:
    """One invariant: the function that judges it, and what a person should know of it.

    Attributes:
        code: its name.
        check: the function.
        asked: when the library asks: `always` (arguments at the door), `cheap`, `full`, or `test` (test tools only).
        remedy: what to do when it is broken.
        origins: public threads of real bugs that it would have caught.
    """

    code: Code
    check: Callable[..., None]
    asked: str
    remedy: str
    origins: tuple[str, ...]

    @property
    def statement(self) -> str:
        """The law in words: the docstring of its function."""
        return (self.check.__doc__ or "").strip()


LAWS: dict[Code, Law] = {}


def law(code: Code, *, asked: str, remedy: str, origins: tuple[str, ...]) -> Callable[[F], F]:
    """Lists a function as the law of `code`; see `Law` for the arguments."""

    def register(check: F) -> F:
        LAWS[code] = Law(code, check, asked, remedy, origins)
        return check

    return register


def broken(
    code: Code,
    problem: str,
    where: Where,
    *,
    expected: object,
    actual: object,
    row: int | None = None,
    slot: int | None = None,
    generation: int | None = None,
    writer: str | None = None,
    reader: str | None = None,
    remedy: str | None = None,
) -> NoReturn:
    """Raises the violation of `code`, with the remedy of its law unless the place knows a better one.

    Raises:
        Violation: always.
    """
    raise Violation(
        code,
        problem,
        expected=expected,
        actual=actual,
        remedy=LAWS[code].remedy if remedy is None else remedy,
        where=where,
        row=row,
        slot=slot,
        generation=generation,
        writer=writer,
        reader=reader,
    )


def bits(values: Array) -> Array:
    """The same memory as unsigned integers, so that NaN equals itself and -0.0 differs from 0.0."""
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(f"u{contiguous.dtype.itemsize}") if contiguous.dtype.kind == "f" else contiguous


def first_duplicate(values: Ints, *, ignore_zero: bool = False) -> int | None:
    """Row of the first value that stands in an earlier row too, or None."""
    if values.size < 2:
        return None
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    copies = in_order[1:] == in_order[:-1]
    if ignore_zero:
        copies &= in_order[1:] != 0
    return int(order[1:][copies].min()) if copies.any() else None


def first_row(hits: npt.NDArray[np.bool_]) -> int:
    """The first row of bool[n, ...] with a hit; there is one."""
    rows = hits if hits.ndim == 1 else hits.reshape(len(hits), -1).any(axis=1)
    return int(rows.argmax())


def rows_hit(hits: npt.NDArray[np.bool_]) -> int:
    """How many rows of bool[n, ...] have a hit."""
    rows = hits if hits.ndim == 1 else hits.reshape(len(hits), -1).any(axis=1)
    return int(rows.sum())
