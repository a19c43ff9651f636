"""The worlds that tests share are in the states that they say."""

import torch

from batchstate.future_map import relay_field
from batchstate.kv._tier import TierState
from batchstate.runtime import Runtime
from tests.worlds import Mixed, Pools, Relayed, Shared, Tiered


def test_mixed(rt: Runtime, full: None) -> None:
    """Two requests are live, one slot is pending until its gate opens, and the others are free."""
    world = Mixed.of(Pools.of(rt, 5))
    slots, pages = world.pools.slots, world.pools.pages
    assert (slots.stats.live, slots.stats.pending, slots.stats.free) == (2, 1, 2)
    assert (pages.stats.live, pages.stats.pending) == (3, 1)
    assert pages.committed(world.live).tolist() == [5, 3]
    positions = world.pools.locations(int(world.live.np[0]), range(5))
    assert world.pools.table.host_for(world.live)[0, :5].tolist() == positions
    world.gate.done = True
    slots.reap()
    assert slots.stats.pending == 0


def test_shared(rt: Runtime) -> None:
    """Two requests and a lease hold one page; each gives it back."""
    world = Shared.of(Pools.of(rt))
    assert world.pools.pages.stats.live == 2
    world.lease.release(after=None)
    world.pools.pages.release_requests(world.first.merge(world.second), after=None)
    world.pools.pages.expect_idle()


def test_relayed(rt: Runtime) -> None:
    """Each request has a token that nobody has read."""
    world = Relayed.of(Pools.of(rt), {"token": relay_field(torch.int64)})
    slots = world.pools.joined([1, 2])
    world.tokens(slots)
    assert [str(state) for state in world.relay.states(slots, "token")] == ["published"] * 2


def test_tiered(rt: Runtime) -> None:
    """One request waits for its KV, one decodes, one is outside."""
    world = Tiered.of(Pools.of(rt)).join()
    for slots, state in ((world.reserved, TierState.DIRECT), (world.ready, TierState.READY)):
        assert world.tier.states(slots) == [state]
    assert world.pools.pages.committed(world.outside).tolist() == [3]
    world.tier.verify()
