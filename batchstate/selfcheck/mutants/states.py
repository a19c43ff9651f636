"""A slot and what it owns in a second pool come apart."""

from batchstate._allocator import Ints
from batchstate.hybrid import HybridSlotPool, StateOwner
from batchstate.indices import Slots
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.SLOT_CONSERVATION, machine="hybrid", origin="sglang #23496")
def states_not_released(patch: Patch) -> None:
    """A request that ends gives its row back and not the states of the second pool."""
    patch(StateOwner, "_release", lambda self, states, after: None)


@mutant(Code.SLOT_CONSERVATION, machine="hybrid", origin="sglang #23496")
def ping_pong_states_not_released(patch: Patch) -> None:
    """A slot owns several states, and its end releases the first of them."""

    def release(self: StateOwner, states: Ints, after: Fence | None) -> None:
        original(self, states[:: self.per_slot], after)

    original = patch(StateOwner, "_release", release)


@mutant(Code.SLOT_CONSERVATION, machine="hybrid", origin="sglang #27586, sglang #26941")
def state_mapping_not_cleared(patch: Patch) -> None:
    """The mapping of a freed slot still names states, which belong to another slot when it is used again."""
    patch(StateOwner, "_clear", lambda self, rows: None)


@mutant(Code.TABLE_CAPACITY, machine="hybrid", origin="sglang #24244")
def mapping_sized_by_second_pool(patch: Patch) -> None:
    """The mapping slot -> state has as many rows as there are states, and slots beyond write past its end."""
    patch(StateOwner, "_mapping_rows", lambda self: self.ledger.capacity)


@mutant(Code.SLOT_SHARED, machine="hybrid", origin="sglang #35501")
def two_slots_map_to_one_state(patch: Patch) -> None:
    """Two slots that are taken together map to one state; the first of them to leave frees it for both."""

    def taken(self: StateOwner, rows: Ints) -> None:
        original(self, rows)
        self.mapping[rows[-1:]] = self.mapping[rows[:1]]

    original = patch(StateOwner, "taken", taken)


@mutant(Code.SENTINEL_ESCAPED, machine="hybrid", origin="sglang #36880, sglang #36885, vllm #43810")
def missing_state_is_minus_one(patch: Patch) -> None:
    """A slot whose state is not known yet is given -1, and kernels write the last state of the pool."""

    def write_states(self: HybridSlotPool, slots: Slots) -> None:
        states = self.states_of(slots)
        states[-1:] = -1
        self.state_table.write(slots, None, states)

    patch(HybridSlotPool, "_write_states", write_states)
