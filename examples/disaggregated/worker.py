"""What both workers are made of: the model, an engine of transfers, and how they introduce themselves."""

import contextlib
import os
from collections.abc import Iterator

import attrs
import torch

from batchstate import checks
from batchstate.runtime import Runtime
from batchstate.testing.devices import open_device
from batchstate.transport.engines.base import Engine
from batchstate.transport.handshake import Description
from batchstate.transport.layout import KVLayout, held_by
from batchstate.transport.regions import Region
from examples.disaggregated.kv import layer_names
from examples.disaggregated.options import Options
from examples.disaggregated.workload import mixed_requests
from examples.engine.model import Model
from examples.engine.request import Request


def open_engine(options: Options) -> Engine:
    """The engine of transfers that was asked for. Each is imported only then: NIXL and Mooncake are extras.

    Raises:
        TransferError: it is not installed, or cannot be opened.
    """
    if options.transport == "nixl":
        from batchstate.transport.engines.nixl import NixlEngine

        return NixlEngine(options.interface)
    if options.transport == "mooncake":
        from batchstate.transport.engines.mooncake import MooncakeEngine

        return MooncakeEngine(options.host)
    from batchstate.transport.engines.distributed import DistributedEngine

    return DistributedEngine(host=options.host)


@attrs.frozen
class Parts:
    """One worker's device, model and engine."""

    runtime: Runtime
    model: Model
    engine: Engine


@contextlib.contextmanager
def opened(options: Options) -> Iterator[Parts]:
    """A window in which a worker has all it is made of, checks on; the engine is closed behind it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    runtime = open_device(options.device, seed=options.seed)
    model = random_model(options, runtime.device)
    check_degree(options, model)
    engine = open_engine(options)
    try:
        with checks(options.checks):
            yield Parts(runtime, model, engine)
    finally:
        engine.close()


def random_model(options: Options, device: torch.device) -> Model:
    """The model of a run, the same in each process: its weights depend on the seed alone."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # small matrices, and two workers on one machine: more threads wait for each other
    return Model.random("qwen3" if options.family == "qwen3" else "llama", device=device, seed=options.seed)


def layout_of(model: Model, page_size: int, rank: int = 0, degree: int = 1) -> KVLayout:
    """How one rank keeps the KV of a token.

    Raises:
        ArgumentError: the heads cannot be shared by so many ranks.
    """
    config = model.lm.config
    heads, names = int(config.num_key_value_heads), layer_names(int(config.num_hidden_layers))
    item_bytes = held_by(rank, degree, heads).heads * int(config.head_dim) * model.dtype.itemsize
    return KVLayout(page_size, str(model.dtype), names, item_bytes, rank, degree, heads)


def check_degree(options: Options, model: Model) -> None:
    """Refuses a number of prefill ranks that cannot share the model's heads.

    Raises:
        ArgumentError: so it is.
    """
    layout_of(model, options.page_size, 0, options.prefill_degree)


def registered(engine: Engine, layout: KVLayout, buffers: list[torch.Tensor]) -> list[Region]:
    """One region a layer, under the layer's name."""
    return [engine.register(one, name) for one, name in zip(buffers, layout.layers, strict=True)]


def described(engine: Engine, layout: KVLayout, worker: str) -> Description:
    """How a worker introduces itself; its memory is registered."""
    return Description(worker, engine.instance, layout, engine.endpoint())


def requests_of(options: Options, model: Model) -> list[Request]:
    """The requests of a run, fresh ones and the same each time."""
    return mixed_requests(
        options.requests,
        page_size=options.page_size,
        hot_tokens=options.hot_tokens,
        max_prompt=options.max_prompt,
        vocab_size=model.vocab_size,
        seed=options.seed,
    )
