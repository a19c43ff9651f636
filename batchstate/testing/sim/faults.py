"""What an operation of the device could not do when it ran."""

from typing import final

from batchstate.errors import BatchStateError


@final
class DeviceFault(BatchStateError, RuntimeError):
    """An operation failed when it ran, long after it was enqueued: an illegal access, mostly.

    On an accelerator this is the error that surfaces anywhere, names nothing, and leaves the device useless. The usual
    reason is an index that was read before it was there, or after its memory had become somebody else's.

    Attributes:
        operation: its name.
        stream: that ran it.
        step: in which it was enqueued.
        site: the line that enqueued it.
    """

    def __init__(self, operation: str, stream: str, step: int, site: str, reason: str) -> None:
        super().__init__(
            f"{operation} failed when stream {stream!r} ran it: {reason}\n  enqueued in step {step} at {site}",
            value=reason,
            remedy="find what orders its operands before it; the race detector names the two accesses",
        )
        self.operation = operation
        self.stream = stream
        self.step = step
        self.site = site
