"""`GraphPublish`: a publish that is part of a captured graph, and is noted each time that the graph is replayed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import put_rows
from batchstate.mirror import Slots

if TYPE_CHECKING:
    from batchstate.future_map import FutureMap

T = TypeVar("T")


@final
class GraphPublish:
    """Fields that a graph publishes. Returned by `FutureMap.publish_in_graph`, which is called where it is captured."""

    def __init__(self, relay: "FutureMap", fields: Sequence[str], index: torch.Tensor) -> None:
        self._relay, self._fields, self._index = relay, tuple(fields), index

    def __repr__(self) -> str:
        return f"GraphPublish({self._relay!r}: {', '.join(self._fields)})"

    def replay(self, slots: Slots, replay: Callable[[], T]) -> T:
        """Replays the graph for some requests on the current stream, as their publish; returns what `replay` does.

        Args:
            slots: the live handles that the graph's slots are of, each once. Padded rows at the end are left out.
            replay: launches the graph, such as `torch.cuda.CUDAGraph.replay`.

        Raises:
            CaptureError: the stream is being captured.
            Violation: as `FutureMap.publish`, before anything is launched. MIRROR_EQUAL, at `full`: the graph's slots
                are of other requests.

        If `replay` raises, the entries are unwritten: nobody knows what the graph has written.
        """
        relay, fields = self._relay, self._fields
        relay._check_call(fields, "replay")
        requests, stream, entries = relay._live(slots, "replay")[1], relay.runtime.current_stream, relay._entries
        written = relay.together(fields).entries
        entries.come_behind(entries.check_overwrite(requests, written, stream), stream, "publish", to_write=True)
        for name in fields:
            relay._memory_of(name, stream)
        rows = requests.handles()[0]
        if levels.full:
            wanted = np.zeros(self._index.shape[0], dtype=np.int64)
            wanted[: rows.size] = rows
            held = relay.runtime.inspect(self._index).astype(np.int64)
            invariants.mirror_equal(wanted, held, **entries.where("replay", "slots of the graph"))
        try:
            relay.replaying = True
            returned = replay()
        except Exception:
            entries.mark_failed(requests, fields, relay.runtime.record(stream), stream)
            raise
        finally:
            relay.replaying = False
        fence = relay.runtime.record(stream)
        entries.publish(requests, written, fence, stream)
        relay.slots.transaction.launches.ended(stream, fence)
        if levels.full:
            relay.check("replay")
        return returned


def put_unpadded(memory: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """`values` into `memory` at `index` int64[rows], and into its last row where that is 0. Three kernels.

    Row 0 stays zero, and is not written while another stream reads it for rows that are padding.
    """
    put_rows(memory, index.masked_fill(index == 0, memory.shape[0] - 1), values)
