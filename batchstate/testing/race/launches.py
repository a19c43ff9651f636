"""What a launch declares, against what torch shows of it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.race.accesses import Accesses
from batchstate.testing.race.detector import Kept

_REMEDY = "say `reads=` and `writes=`: what a kernel or the replay of a graph touches, nothing else can know"


@final
class Launches:
    """Judges launches.

    Args:
        accesses: of the runtime.
    """

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses

    @contextlib.contextmanager
    def under_way(self, name: str) -> Iterator[dict[Kept, bool]]:
        """A window in which operations belong to a launch. Yields the memory that torch shows, and whether written."""
        accesses = self._accesses
        outer = accesses.seen, accesses.launched
        accesses.seen, accesses.launched = {}, name or None
        try:
            yield accesses.seen
        finally:
            accesses.seen, accesses.launched = outer

    def check(
        self,
        name: str,
        seen: Mapping[Kept, bool],
        given: Sequence[Any],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Holds what a launch declares against what torch has shown of older memory.

        Raises:
            ArgumentError: it declares nothing, and touches memory that is watched or was given some; or it writes what
                it does not declare.
        """
        if not reads and not writes and (seen or any(self._watched(one) for one in given)):
            raise ArgumentError(
                f"the launch of {name!r} declares nothing, and touches or was given memory that is watched",
                value=name,
                remedy=_REMEDY,
            )
        written = {self._accesses.kept(one) for one in writes}
        for kept, writes_it in seen.items():
            if writes_it and kept not in written:
                raise ArgumentError(
                    f"the launch of {name!r} writes {kept}, which it does not declare", value=name, remedy=_REMEDY
                )

    def add_declared(
        self, name: str, seen: Mapping[Kept, bool], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Adds the accesses that a launch declares and torch did not show.

        Raises:
            Race: one of them is not ordered.
        """
        accesses = self._accesses
        accesses.pinned_touched(reads, writes)
        accesses.declared(
            name,
            [one for one in reads if accesses.kept(one) not in seen],
            [one for one in writes if not seen.get(accesses.kept(one), False)],
        )

    def _watched(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return bool(value.numel()) and self._accesses.memories.of(value) is not None
        if isinstance(value, Mapping):
            value = list(value.values())
        return isinstance(value, list | tuple) and any(self._watched(one) for one in value)
