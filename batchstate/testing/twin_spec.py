"""What an engine says of its batch class to have it fuzzed."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

import attrs
from hypothesis.strategies import SearchStrategy

from batchstate.contracts import Contract, parse_contract
from batchstate.errors import ArgumentError

B = TypeVar("B")
R = TypeVar("R")


@final
@attrs.frozen
class Twin:
    """Two attributes that hold one value.

    Attributes:
        host: name of the attribute on the host; dots reach into parts (`sampling.temperatures`).
        device: name of the attribute on the device.
        contract: `exact`, or `upper_bound` if the host side may be larger.
    """

    host: str
    device: str
    contract: Contract = attrs.field(default=Contract.EXACT, converter=parse_contract)

    def __attrs_post_init__(self) -> None:
        if self.contract not in (Contract.EXACT, Contract.UPPER_BOUND):
            raise ArgumentError(
                f"twins {self.host!r} and {self.device!r} under {self.contract.value}",
                value=self.contract.value,
                remedy="use 'exact' or 'upper_bound'; name an attribute that has no twin in `rows`",
            )


@final
@attrs.frozen(eq=False)
class TwinSpec(Generic[B, R]):
    """What the fuzzer has to know of a batch class.

    `filter`, `merge` and `advance` return the batch that comes out, or None if they change the (first) batch in place.
    Batches that went in are not used afterwards.

    Attributes:
        name: of the class, for reports.
        row: what describes one request; `build` gets a list of them.
        build: makes a batch.
        filter: keeps the rows at the given indices, in their order.
        merge: puts the rows of the second batch behind those of the first.
        advance: a decode step, or whatever else changes the batch and keeps its rows; None if there is nothing such.
        twins: attributes that hold one value on two sides.
        rows: further attributes with one entry a request, on either side.
        num_rows: how many requests the batch has.
        least_rows: 0, or 1 for a class that is never empty.
        most_rows: of a batch that is built.
    """

    name: str
    row: SearchStrategy[R]
    build: Callable[[list[R]], B]
    filter: Callable[[B, list[int]], B | None]
    merge: Callable[[B, B], B | None]
    twins: Sequence[Twin]
    num_rows: Callable[[B], int]
    advance: Callable[[B], B | None] | None = None
    rows: Sequence[str] = ()
    least_rows: int = 0
    most_rows: int = 4

    def __attrs_post_init__(self) -> None:
        names = [name for twin in self.twins for name in (twin.host, twin.device)] + list(self.rows)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArgumentError(
                f"{self.name}: {', '.join(twice)} twice", value=twice, remedy="name each attribute once"
            )
        if not names:
            raise ArgumentError(f"{self.name}: no attributes", value=names, remedy="name the twins of the class")
        if not 0 <= self.least_rows <= self.most_rows or not self.most_rows:
            raise ArgumentError(
                f"{self.name}: {self.least_rows} to {self.most_rows} rows",
                value=(self.least_rows, self.most_rows),
                remedy="use 0 <= least_rows <= most_rows, most_rows at least 1",
            )
