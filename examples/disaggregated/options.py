"""Options of a run, the same for both workers."""

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, in_

if TYPE_CHECKING:
    from examples.engine.model import Family
    from examples.engine.request import Request

AUTHKEY = "BATCHSTATE_AUTHKEY"
"""Environment variable with the secret that both workers know; any process that has it may talk to them."""

MOST_RESTARTS = 3
"""Prefill workers that are started in the place of others."""

TRANSPORTS = ("tcp", "nixl", "mooncake")
LANDINGS = ("host", "device", "mixed")


@attrs.frozen
class Options:
    """Sizes and modes of a run.

    Attributes:
        transport: name of the engine.
        requests: how many are served.
        page_size: tokens a page, of the prefill's pool and, unless `host_page_size` says another, of the host tier.
        host_page_size: tokens a page of the host tier: 0 for `page_size`, or 1 whatever that is.
        hot_tokens: most tokens of a request that the decode worker's device holds.
        speculate: tokens that a decode step guesses for each request, and verifies with the last one.
        prefill_degree: prefill processes of a pipeline stage, each with its share of the heads.
        prefill_stages: stages, each with its share of the layers; processes are numbered stage by stage.
        landing: memory of the decode worker that KV comes into. `host`: that of the host tier. `device`: pages of the
            device, where the request stays, or is staged out to the host tier. `mixed`: all three.
        staged: share of the requests that the decode worker prefills itself and stages out to the host.
        seed: of the model and the requests.
        device: torch's name.
        checks: level of the checks.
        family: of the random model; `plain` needs no transformers.
        host: address of this machine at which the other worker's engine reaches it.
        interface: network interface of NIXL; without one, shared memory of this machine.
        trusted_network: that the network lets nobody but the workers reach ports of NIXL's and Mooncake's libraries.
        max_running: requests that the decode worker has at once, those on their way included.
        kill_prefill_after: prefill 0 is killed when so many requests have been delivered, and again, a few times, until
            that has failed an attempt; None for never.
        max_prompt: tokens of the longest prompt that a prefill worker takes.
        lease_seconds: after which an attempt is given up, and made again.
        patience: seconds without any progress after which a worker gives up.
    """

    transport: str = attrs.field(default="tcp", validator=in_(TRANSPORTS))
    requests: int = attrs.field(default=200, validator=ge(1))
    page_size: int = attrs.field(default=16, validator=ge(1))
    hot_tokens: int = attrs.field(default=32, validator=ge(2))
    speculate: int = attrs.field(default=0, validator=ge(0))
    prefill_degree: int = attrs.field(default=1, validator=ge(1))
    prefill_stages: int = attrs.field(default=1, validator=ge(1))
    host_page_size: int = attrs.field(default=0, validator=in_((0, 1)))
    landing: str = attrs.field(default="host", validator=in_(LANDINGS))
    staged: float = 0.1
    seed: int = 0
    device: str = "cpu"
    checks: str = "cheap"
    family: "Family" = "llama"
    host: str = "127.0.0.1"
    interface: str | None = None
    trusted_network: bool = False
    max_running: int = attrs.field(default=32, validator=ge(2))
    kill_prefill_after: int | None = None
    max_prompt: int = attrs.field(default=512, validator=ge(1))
    lease_seconds: float = 30.0
    patience: float = 60.0

    @property
    def prefill_workers(self) -> int:
        """How many prefill processes there are."""
        return self.prefill_degree * self.prefill_stages

    def room(self, request: "Request") -> int:
        """Host locations that a request takes: two steps may map guesses behind the last token of its answer."""
        return request.kv_limit + 2 * self.speculate


def writer_name(rank: int) -> str:
    """Name of a prefill rank; the same for each process that ever takes the part."""
    return f"prefill-{rank}"
