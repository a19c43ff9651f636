"""Parts of both workers: the model, the requests, an engine of transfers, and the checks of what has to be alike.

Either side sends all it has to say before it may refuse the other, so both can say why.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch

from batchstate import checks
from batchstate.errors import ArgumentError, HandshakeError
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from batchstate.transport.engines.base import Engine, Region
from batchstate.transport.plan import KVLayout, held_by
from batchstate.transport.workers import Description
from examples.disaggregated.channel import Channel, ChannelClosedError, Kind
from examples.disaggregated.kv import layer_names
from examples.disaggregated.options import Options
from examples.engine.model import Model
from examples.engine.request import Request


def open_engine(options: Options) -> Engine:
    """The engine of transfers that was asked for. Each is imported only then: NIXL and Mooncake are extras.

    Raises:
        TransferError: it is not installed, or cannot be opened.
        ArgumentError: its library lets in whoever calls, and nothing says that the network keeps strangers out.
    """
    if options.transport == "nixl":
        from batchstate.transport.engines.nixl import NixlEngine

        return NixlEngine(options.interface, trusted_network=options.trusted_network)
    if options.transport == "mooncake":
        from batchstate.transport.engines.mooncake import MooncakeEngine

        return MooncakeEngine(options.host, trusted_network=options.trusted_network)
    from batchstate.transport.engines.tcp import TcpEngine

    return TcpEngine(host=options.host)


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
    return Model.random(options.family, device=device, seed=options.seed)


def layout_of(model: Model, page_size: int, number: int = 0, degree: int = 1, stages: int = 1) -> KVLayout:
    """How one worker of `degree` ranks and `stages` stages keeps the KV of a token.

    Raises:
        ArgumentError: heads or layers cannot be shared by so many.
    """
    config = model.lm.config
    layers, heads = int(config.num_hidden_layers), int(config.num_key_value_heads)
    if stages > layers:
        raise ArgumentError(
            f"{stages} stages of {layers} layers", value=stages, remedy="use as many as there are layers"
        )
    stage, rank = divmod(number, degree)
    names = layer_names(layers)
    first, stop = (2 * (layers * edge // stages) for edge in (stage, stage + 1))
    item_bytes = held_by(rank, degree, heads).heads * int(config.head_dim) * model.dtype.itemsize
    return KVLayout(page_size, str(model.dtype), names, item_bytes, rank, degree, heads, stage=names[first:stop])


def check_degree(options: Options, model: Model) -> None:
    """Refuses a number of prefill ranks that cannot share the model's heads.

    Raises:
        ArgumentError: so it is.
    """
    layout_of(model, options.page_size, 0, options.prefill_degree, options.prefill_stages)


def registered(engine: Engine, layout: KVLayout, buffers: list[torch.Tensor], suffix: str = "") -> list[Region]:
    """One region for each layer of the worker's stage, under the layer's name; `buffers` are those of all layers."""
    return [
        engine.register(buffer, name + suffix)
        for buffer, name in zip(buffers, layout.layers, strict=True)
        if name in layout.stage
    ]


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


MOST_NEW_TOKENS = 24


def mixed_requests(
    total: int, *, page_size: int, hot_tokens: int, max_prompt: int, vocab_size: int, seed: int
) -> list[Request]:
    """Requests whose prompts are shorter and longer than hot buffer and page, the edges among them.

    Args:
        total: how many.
        page_size: of the host tier.
        hot_tokens: of the hot buffers.
        max_prompt: longest prompt.
        vocab_size: of the model.
        seed: of lengths and ids.

    Returns:
        requests numbered from 0; prompts of 1 to 8 times `hot_tokens` ids, and answers of 1 to 24 tokens.
    """
    rng = np.random.default_rng(seed)
    longest = min(8 * hot_tokens, max_prompt)
    edges = [2 * hot_tokens + 1, hot_tokens - 1, hot_tokens, hot_tokens + 1, page_size, page_size + 1, 3 * page_size, 1]
    lengths = np.exp(rng.uniform(0, np.log(longest), total)).astype(np.int64)
    lengths[: len(edges)] = edges[:total]
    answers = rng.integers(1, MOST_NEW_TOKENS + 1, total)
    answers[: len(edges)] = MOST_NEW_TOKENS
    return [
        Request(number, rng.integers(0, vocab_size, int(length)).tolist(), int(answer))
        for number, (length, answer) in enumerate(zip(np.clip(lengths, 1, longest), answers, strict=True))
    ]


STARTS_IN = 60.0
"""Seconds that a worker may take to be there."""


def shared_of(options: Options, model: Model, rank: int) -> dict[str, Any]:
    """Values that a prefill worker of this rank and its decode worker share, by the name of the option.

    Workers that differ here would serve without an error, and wrong tokens. The page size is not among them: layouts
    are compared by the library.
    """
    config = model.lm.config
    return {
        "--transport": options.transport,
        "--prefill-degree": options.prefill_degree,
        "--prefill-stages": options.prefill_stages,
        "--rank": rank,
        "--seed": options.seed,
        "--family": options.family,
        "--max-prompt": options.max_prompt,
        "the model's dtype": str(model.dtype),
        "the model's layers": int(config.num_hidden_layers),
        "the model's heads": int(config.num_attention_heads),
        "the model's KV heads": int(config.num_key_value_heads),
        "the model's head size": int(config.head_dim),
        "the model's vocabulary": model.vocab_size,
    }


def agreed(channel: Channel, mine: dict[str, Any], seconds: float = STARTS_IN) -> None:
    """Exchanges what has to be alike.

    Raises:
        HandshakeError: it is not; the message names each option and both values.
        ChannelClosedError: the other side is gone.
    """
    channel.say(shared=mine)
    kind, payload = channel.await_one(seconds)
    theirs = channel.words(payload).get("shared") if kind is Kind.WORDS else None
    if not isinstance(theirs, dict):
        raise ChannelClosedError(f"{channel.name} did not say how it was started")
    differ = [name for name in mine if theirs.get(name) != mine[name]]
    if differ:
        raise HandshakeError(
            "; ".join(f"{name} is {mine[name]} here, {str(theirs.get(name))[:60]} there" for name in differ),
            value=differ,
            remedy="start both workers with the same options, and --connect to the ranks in their order",
        )


def introduced(channel: Channel, mine: bytes, seconds: float = STARTS_IN) -> bytes:
    """Exchanges introductions: both sides have the other's before either may refuse it.

    Raises:
        ChannelClosedError: the other side is gone, or says something else.
    """
    channel.send(Kind.INTRODUCTION, mine)
    kind, theirs = channel.await_one(seconds)
    if kind is not Kind.INTRODUCTION:
        raise ChannelClosedError(f"{channel.name} did not introduce itself")
    return theirs
