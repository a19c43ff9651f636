"""KV memory of the two workers: a prefill rank's share of the heads, and the decode worker's two tiers.

Guarantees: a prefill rank writes each token's heads once, into memory that a transfer engine has registered. A decode
step reads a position on the device exactly if the host said that it is there, and everywhere else in host memory.
"""

from collections.abc import Sequence
from typing import final

import attrs
import torch

from batchstate.transport.plan import KVLayout
from examples.engine.attention import PagedKV, PagedRun, PagedView


def layer_names(num_layers: int) -> tuple[str, ...]:
    """The buffers of a model: keys and values of each layer, in the order in which both workers register them."""
    return tuple(f"layer {layer} {part}" for layer in range(num_layers) for part in ("keys", "values"))


def buffers_of(kv: PagedKV) -> list[torch.Tensor]:
    """The tensors of KV memory in the order of `layer_names`."""
    return [tensor for pair in zip(kv.keys, kv.values, strict=True) for tensor in pair]


@final
@attrs.frozen(eq=False)
class ShardedKV:
    """KV memory of one rank of a tensor-parallel group, of which only its own heads are sent.

    The example runs the whole model on each rank: `whole` is what attention reads. A real engine has `share` alone.

    Attributes:
        whole: all heads.
        share: this rank's heads, dtype[location_capacity, layout.held.heads, head_dim] a layer; for transfers.
        layout: says which heads these are.
    """

    whole: PagedKV
    share: PagedKV
    layout: KVLayout

    @classmethod
    def of(cls, whole: PagedKV, layout: KVLayout) -> "ShardedKV":
        """With memory for the share; one rank alone sends what it computes with."""
        if layout.degree == 1:
            return cls(whole, whole, layout)
        heads = layout.held.heads
        keys, values = (
            tuple(memory.new_zeros((memory.shape[0], heads, memory.shape[2])) for memory in layers)
            for layers in (whole.keys, whole.values)
        )
        return cls(whole, PagedKV(keys, values), layout)

    def store(self, layer: int, view: PagedView, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps all heads for attention, and this rank's for the transfer."""
        self.whole.store(layer, view, keys, values)
        if self.share is not self.whole:
            held = self.layout.held
            mine = slice(held.first, held.first + held.heads)
            self.share.store(layer, view, keys[:, mine], values[:, mine])

    def fetch(self, layer: int, run: PagedRun) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PagedKV.fetch`, of all heads."""
        return self.whole.fetch(layer, run)


@attrs.frozen(eq=False)
class TieredRun(PagedRun):
    """A run of requests of the host tier."""

    on_device: torch.Tensor  # bool[num_reqs, max_kv_len, 1, 1]: whether a position is read from the hot buffer
    host_rows: torch.Tensor  # int64[num_reqs, max_kv_len] -> host location; 0 where it is read from the device


@attrs.frozen(eq=False)
class TieredView(PagedView):
    """The needs of a decode forward of the host tier: of each position both places, and which of them holds.

    Attributes:
        on_device: bool[num_reqs, max_kv_len].
        host_locations: int64[num_reqs, max_kv_len] -> host location of each position; any number where it is on
            the device.
    """

    on_device: torch.Tensor
    host_locations: torch.Tensor

    def runs(self) -> Sequence[TieredRun]:
        """As `PagedView.runs`, with the rows of both tiers."""
        # Neither tier is read for a position that the other has: what lies there may be another request's.
        host_rows = torch.where(self.on_device, 0, self.host_locations)
        return [
            TieredRun(
                run.requests,
                run.tokens,
                torch.where(self.on_device[run.requests], run.kv_rows, 0),
                run.visible,
                self.on_device[run.requests, :, None, None],
                host_rows[run.requests],
            )
            for run in super().runs()
        ]


@final
@attrs.frozen(eq=False)
class TieredKV:
    """KV memory of the decode worker: hot buffers on the device, everything older in pinned host memory.

    Attributes:
        hot: the device's rows.
        host: the host's, as the device addresses them: keys and values of each layer, in the order of `layer_names`.
    """

    hot: PagedKV
    host: tuple[torch.Tensor, ...] = attrs.field(repr=False)

    def store(self, layer: int, view: PagedView, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens go to the device; the next step backs them up."""
        self.hot.store(layer, view, keys, values)

    def fetch(self, layer: int, run: PagedRun) -> tuple[torch.Tensor, torch.Tensor]:
        """Each position from the tier that has it."""
        assert isinstance(run, TieredRun)
        keys, values = self.hot.fetch(layer, run)
        return (
            torch.where(run.on_device, keys, self.host[2 * layer][run.host_rows]),
            torch.where(run.on_device, values, self.host[2 * layer + 1][run.host_rows]),
        )
