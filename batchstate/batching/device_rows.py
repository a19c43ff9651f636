"""Rows that only the device knows, moved without touching the device.

A column without an exact host side cannot ride in the packed copy. It is kept as the tensors it came from and an
index into their rows: filtering and merging change the index on the host, which costs no launch, and the rows are
gathered when somebody reads them. The index, padded rows and what was added since ride in the batch's packed copy.
"""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate.runtime import Runtime, numpy_dtype
from batchstate.values.device_ops import add, concatenate, select_rows, signed_twin
from batchstate.values.device_side import DeviceSide, Made, version_mark
from batchstate.values.host_arrays import Array, Rows
from batchstate.values.integers import across
from batchstate.violations import Where

MOST_SOURCES = 8
"""Beyond this many tensors a column is gathered at the next upload: each source is memory kept alive."""


@final
@attrs.frozen(eq=False, repr=False)
class DeviceRows:
    """Row i is row `rows[i]` of all sources laid end to end, plus `added[i]`.

    Attributes:
        sources: device sides, or host arrays that are uploaded with the index; each with its number of rows.
        rows: int64[n].
        added: int64[n], or None for nothing.
    """

    sources: tuple[tuple[DeviceSide | Array, int], ...]
    rows: Rows
    added: Rows | None = None

    @classmethod
    def of(cls, source: DeviceSide | Array, num_rows: int) -> "DeviceRows":
        """All rows of one source."""
        return cls(((source, num_rows),), np.arange(num_rows, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"DeviceRows({len(self)} rows of {len(self.sources)} sources)"

    def taken(self, rows: Rows) -> "DeviceRows":
        """The rows at checked indices int64[k]."""
        return DeviceRows(self.sources, self.rows[rows], None if self.added is None else self.added[rows])

    def merged(self, other: "DeviceRows") -> "DeviceRows":
        """These rows, then those of `other`."""
        offset = sum(length for _, length in self.sources)
        added = None
        if self.added is not None or other.added is not None:
            added = np.concatenate([part._amounts() for part in (self, other)])
        return DeviceRows(self.sources + other.sources, np.concatenate([self.rows, other.rows + offset]), added)

    def shifted(self, amount: Rows) -> "DeviceRows":
        """With int64 `amount` (one, or one a row) added."""
        return DeviceRows(self.sources, self.rows, self._amounts() + amount)

    def _amounts(self) -> Rows:
        return np.zeros(len(self), dtype=np.int64) if self.added is None else self.added

    def arrays(self, dtype: torch.dtype, ndim: int) -> list[Array]:
        """What must cross to the device before `gathered`, in the order in which it takes them."""
        if self.as_it_is() is not None:
            return []
        wanted: list[Array] = [self.rows]
        if self.added is not None:
            wanted.append(across(self.added, ndim).astype(numpy_dtype(signed_twin(dtype))))
        return wanted + [source for source, _ in self.sources if not isinstance(source, DeviceSide)]

    def gathered(self, runtime: Runtime, uploaded: Sequence[torch.Tensor]) -> Made:
        """The rows as one device tensor: at most one concatenation, one selection and one addition.

        A source that is wanted as it is stays what it is, made where it was made.

        Args:
            runtime: the device.
            uploaded: the device sides of `arrays`.
        """
        self.check_sources(runtime)
        source = self.as_it_is()
        if source is not None:
            return source.make(runtime)
        crossed = list(uploaded)
        index = crossed.pop(0)
        amount = None if self.added is None else crossed.pop(0)
        parts = [one.tensor(runtime) if isinstance(one, DeviceSide) else crossed.pop(0) for one, _ in self.sources]
        base = parts[0]
        if len(parts) > 1:
            base = runtime.launch(concatenate, parts, reads=parts, name="gather: concatenate")
        rows = runtime.launch(select_rows, base, index, reads=(base, index), name="gather")
        if amount is not None:
            rows = runtime.launch(add, rows, amount, reads=(rows, amount), name="gather: add")
        return Made(rows, runtime.current_stream, None, set())

    def check_sources(self, runtime: Runtime, column: str = "") -> None:
        """Nobody wrote into the tensors between their becoming part of a batch and now.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE.
        """
        if levels.cheap:
            for source, _ in self.sources:
                if isinstance(source, DeviceSide) and source.made is not None and source.mark is not None:
                    where: Where = {"object": self, "operation": "gather", "step": runtime.step}
                    if column:
                        where["column"] = column
                    invariants.mirror_foreign_write("device", source.mark, version_mark(source.made) or 0, **where)

    def as_it_is(self) -> DeviceSide | None:
        """The only source, where its rows are wanted unmoved and unchanged."""
        source, length = self.sources[0]
        unmoved = (
            len(self.sources) == 1
            and self.added is None
            and len(self.rows) == length
            and bool((self.rows == np.arange(length)).all())
        )
        return source if unmoved and isinstance(source, DeviceSide) else None
