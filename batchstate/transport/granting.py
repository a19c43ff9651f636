"""What a receiver judges before it lets anybody write: the writers of a lease, and the memory of a grant."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from batchstate.errors import ArgumentError, TransferError
from batchstate.transport.layout import KVLayout
from batchstate.transport.lease import Lease
from batchstate.transport.shards import sources_of
from batchstate.transport.workers import Worker


def check_unleased(lease: Lease, memory: npt.NDArray[np.int64], leases: Iterable[Lease]) -> None:
    """Refuses host tokens int64[r, 2] that another of `leases` may still write.

    Raises:
        ArgumentError: naming the first run that is shared.
    """
    others = [one for one in leases if one.runs is not None and not one.ended.query()]
    if not others or not memory.size:
        return
    runs = np.concatenate([one.runs for one in others if one.runs is not None])
    starts, ends = runs[:, 0, None], runs.sum(axis=1)[:, None]
    shared = ((memory[:, 0] < ends) & (starts < memory.sum(axis=1))).any(axis=1)
    if shared.any():
        start, length = runs[int(np.flatnonzero(shared)[0])].tolist()
        raise ArgumentError(
            f"{lease!r} is to have host tokens that another lease may still write: {length} from {start} on",
            value=memory.tolist(),
            remedy="take other host tokens; those of a lease are free when `lease.ended` says so",
        )


def check_writers(workers: Sequence[Worker], layout: KVLayout) -> None:
    """Refuses writers that are gone, or that do not hold all of a request of this layout exactly once.

    Raises:
        TransferError: one is gone.
        ArgumentError: other ranks than `shards.sources_of` names.
    """
    for worker in workers:
        if worker.ended or worker.lost is not None:
            raise TransferError(
                f"{worker.name} is gone: {worker.lost or 'it has ended'}",
                value=worker.name,
                remedy="accept its next introduction, or use other writers",
            )
    degrees = {worker.description.layout.degree for worker in workers}
    ranks = sorted(worker.description.layout.rank for worker in workers)
    needed = [sources_of(layout, degree) for degree in degrees]
    if len(degrees) != 1 or tuple(ranks) != needed[0]:
        raise ArgumentError(
            f"writers of ranks {ranks} of {sorted(degrees)}; needed are {needed}",
            value=ranks,
            remedy="name each worker that `shards.sources_of` names, once",
        )


def names_of(writers: object) -> list[str]:
    """The names in a list of names; none in anything else."""
    names = list(writers) if isinstance(writers, Sequence) and not isinstance(writers, str) else []
    return names if all(isinstance(name, str) for name in names) else []
