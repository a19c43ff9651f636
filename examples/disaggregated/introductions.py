"""How two workers meet: what has to be alike in both is compared first, then they introduce their memory.

Either side sends all it has to say before it may refuse the other, so both can say why.
"""

from typing import Any

from batchstate.errors import HandshakeError
from examples.disaggregated.channel import Channel, ChannelClosedError, Kind
from examples.disaggregated.options import Options
from examples.engine.model import Model

STARTS_IN = 60.0
"""Seconds that a worker may take to be there."""


def shared_of(options: Options, model: Model, rank: int) -> dict[str, Any]:
    """What a prefill worker of this rank and its decode worker have alike, by the name of the option.

    Workers that differ here would serve without an error, and wrong tokens. The page size is not among them: layouts
    are compared by the library.
    """
    config = model.lm.config
    return {
        "--transport": options.transport,
        "--prefill-degree": options.prefill_degree,
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
