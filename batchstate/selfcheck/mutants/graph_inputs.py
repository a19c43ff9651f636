"""A captured graph reads fixed addresses: what is not written there is of an earlier step."""

from collections.abc import Mapping, Sequence

import torch

import batchstate.static
from batchstate._upload import Extras
from batchstate.batch import Batch
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.static import StaticBuffers
from batchstate.tables import TableWrite
from batchstate.violations import Code


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="lmdeploy#4569, sglang #18647")
def graph_rows_beyond_the_batch_are_kept(patch: Patch) -> None:
    """A step is copied over the first rows of a graph's inputs, and those behind it keep an earlier request."""

    def receive(
        self: StaticBuffers, batch: Batch, writes: Sequence[TableWrite], extras: Mapping[str, object]
    ) -> Extras:
        before = {name: tensor.clone() for name, tensor in self.items()}
        sent: Extras = original(self, batch, writes, extras)
        for name in batch.columns():
            if name in before:
                self[name].data[self.num_reqs :] = before[name][self.num_reqs :]
        return sent

    original = patch(StaticBuffers, "receive", receive)


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="vllm #50432, sglang #15132")
def graph_inputs_move(patch: Patch) -> None:
    """The inputs of a graph are allocated anew for each step: what was captured reads the memory from before."""

    def receive(
        self: StaticBuffers, batch: Batch, writes: Sequence[TableWrite], extras: Mapping[str, object]
    ) -> Extras:
        if self.num_reqs:
            fresh = StaticBuffers(self.runtime, self._batch, rows=self.rows, extras=self._extras)
            self._fixed, self._views = fresh._fixed, fresh._views
        sent: Extras = original(self, batch, writes, extras)
        return sent

    original = patch(StaticBuffers, "receive", receive)


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="sglang #27049")
def graph_reads_a_bound(patch: Patch) -> None:
    """A bounded column goes to the graph as the host knows it, and its kernels read bounds for lengths."""

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        if target.dtype is not torch.int32:  # `drafts`, the host side of which is in the copy already
            target.copy_(source)

    patch(batchstate.static, "copy_into", copied)
