"""A packed forward: requests one behind the other, each with queries of its own, and KV memory read by rows."""

from collections.abc import Sequence
from itertools import compress
from typing import final

import attrs
import torch
from torch.nn.functional import pad

from batchstate.testing.exact.hashing import decode, from_octets, octets
from batchstate.testing.exact.model import Read, advanced
from batchstate.testing.exact.verify import Verifier

__all__ = ["PackedCache", "PagedMemory"]


@final
@attrs.define(eq=False)
class PagedMemory:
    """Keys and values of all layers by row, or the states of a layer of state.

    Attributes:
        keys, values: for each layer dtype[rows, heads, head_dim]; for a layer of state keys dtype[rows, 8].
        page_size: rows of a page, for reports.
    """

    keys: Sequence[torch.Tensor] = attrs.field(repr=False)
    values: Sequence[torch.Tensor] = attrs.field(repr=False)
    page_size: int = 1


@final
class PackedCache:
    """The `Cache` of one packed forward, as the kernels of an engine would see it.

    Args:
        memory: where entries lie.
        positions: int64[t], as given to the model.
        query_lens: queries of each request; what lies behind the last is padding, and attends to nothing.
        kv_lens: entries of each request, new ones included.
        read_rows: int64[sum(kv_lens)] -> row of the memory, request by request; None for a kernel that attends to the
            new entries themselves, as of prompts without a cached prefix.
        write_rows: int64[t] -> row that takes the entry of a token.
        windows: for each layer the newest entries that a query sees; None for all.
        requests: whose they are, for `verifier`; -1 for padding.
        state_rows: int64[n] -> row of a layer of state, for each request; None where no layer is one.
        verifier: told of all that is read.
        guesses: whether all queries of a request but its first may be drafts; what they keep is then not verified.
    """

    def __init__(
        self,
        memory: PagedMemory,
        positions: torch.Tensor,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        read_rows: torch.Tensor | None,
        write_rows: torch.Tensor,
        *,
        windows: Sequence[object] = (),
        requests: Sequence[int] = (),
        state_rows: torch.Tensor | None = None,
        verifier: Verifier | None = None,
        guesses: bool = False,
    ) -> None:
        self._memory, self._write_rows, self._reads_new = memory, write_rows.long(), read_rows is None
        self._read_rows = self._write_rows if read_rows is None else read_rows.long()
        self._windows, self._guesses = windows, guesses
        self._state_rows = torch.zeros(len(query_lens), dtype=torch.int64) if state_rows is None else state_rows
        self._requests, self._verifier = requests, verifier
        queries, entries = torch.tensor(query_lens), torch.tensor(kv_lens)
        self._query_lens, self._kv_lens = queries.tolist(), entries.tolist()
        ends, behind, device = entries.cumsum(0), queries.cumsum(0), positions.device
        owners = torch.arange(len(queries)).repeat_interleave(queries)
        padding = len(positions) - len(owners)
        stops = ends[owners] - (behind[owners] - 1 - torch.arange(len(owners)))
        self._starts = pad((ends - entries)[owners], (0, padding)).to(device)
        self._stops = pad(stops, (0, padding)).to(device)
        last = positions.long()[(behind - 1).clamp(min=0).to(device)].repeat_interleave(entries.to(device))
        self._columns = last - (ends.repeat_interleave(entries) - 1 - torch.arange(int(entries.sum()))).to(device)

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """See `Cache.attend`."""
        kept = (self._memory.keys[layer], self._memory.values[layer])
        for memory, new in zip(kept, (keys, values), strict=True):
            memory.index_copy_(0, self._write_rows, new[0])
        numbers = torch.arange(len(self._read_rows), device=self._columns.device)
        starts = self._starts
        window = self._windows[layer] if self._windows else None
        if isinstance(window, int):
            starts = torch.maximum(starts, self._stops - window)
        visible = (numbers >= starts[:, None]) & (numbers < self._stops[:, None])
        read_keys, read_values = (keys, values) if self._reads_new else (all_[self._read_rows][None] for all_ in kept)
        read = Read(read_keys, read_values, visible[None], self._columns[None])
        if self._verifier is not None:
            drafts = [max(queries - 1, 0) if self._guesses else 0 for queries in self._query_lens]
            self._verifier.look(
                layer, decode(read_keys[0]), self._columns, self._read_rows, self._requests, self._kv_lens,
                drafts=drafts, page_size=self._memory.page_size,
            )  # fmt: skip
        return read

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """See `Cache.advance`. A request whose queries are all its entries begins anew, whatever its row holds."""
        rows, memory = self._state_rows.long(), self._memory.keys[layer]
        past = torch.tensor(self._kv_lens, device=rows.device) - torch.tensor(self._query_lens, device=rows.device)
        before = torch.where(past == 0, 0, from_octets(memory[rows]))
        if self._verifier is not None:
            goes_on = (past > 0).tolist()
            self._verifier.look(layer, before[past > 0], past[past > 0] - 1, rows[past > 0],
                                [*compress(self._requests, goes_on)], [1] * sum(goes_on))  # fmt: skip
        parts = torch.split(inputs[0, : sum(self._query_lens)], self._query_lens)
        states = [advanced(before[row : row + 1], part[None])[0] for row, part in enumerate(parts)]
        memory[rows] = octets(torch.stack([state[-1] for state in states]), memory.dtype)
        return pad(torch.cat(states), (0, inputs.shape[1] - sum(self._query_lens)))[None]
