"""What a runtime counts: the cost of a step in copies and launches, which does not vary with the machine."""

import attrs


@attrs.define
class Counters:
    """Running totals of one runtime. Subtract two snapshots to get the cost of what lies between.

    Attributes:
        host_to_device_copies: uploads; a packed upload of many arrays is one.
        host_to_device_bytes: bytes of those copies, alignment included.
        device_to_host_copies: rows brought to the host by calls named for it.
        device_operations: kernels launched through `Runtime.launch` (a replayed graph or fused kernel is one).
        forced_syncs: times the host waited for the device (`synchronize`, `resolve`, a blocking read-back).
        fence_waits: times the host waited for a single fence.
        check_reads: read-backs made by checks at level `full`; they are in none of the other figures.
        device_allocations: device tensors allocated through the runtime.
        staging_allocations: staging blocks allocated; does not grow in the steady state.
        stream_waits: times a stream was made to wait for a fence, on the device.
        hand_overs: times memory was kept alive for another stream.
    """

    host_to_device_copies: int = 0
    host_to_device_bytes: int = 0
    device_to_host_copies: int = 0
    device_operations: int = 0
    forced_syncs: int = 0
    fence_waits: int = 0
    check_reads: int = 0
    device_allocations: int = 0
    staging_allocations: int = 0
    stream_waits: int = 0
    hand_overs: int = 0

    def snapshot(self) -> "Counters":
        """A copy that no longer counts."""
        return attrs.evolve(self)

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(
            **{field.name: getattr(self, field.name) - getattr(before, field.name) for field in attrs.fields(Counters)}
        )
