"""Windows in which one side of a value is knowingly old."""

from typing import final

import attrs

from batchstate.errors import ArgumentError


@final
@attrs.define(eq=False)
class StaleWindow:
    """One window; values derived inside it share it, so closing it frees them all.

    Attributes:
        side: `host` or `device`.
        reason: shown in the report of a read.
        open: whether reading is refused.
    """

    side: str
    reason: str
    open: bool = True

    def __attrs_post_init__(self) -> None:
        if self.side not in ("host", "device"):
            raise ArgumentError(f"unknown side {self.side!r}", value=self.side, remedy="use 'host' or 'device'")
        if not self.reason:
            raise ArgumentError("a stale window without a reason", value=self.reason, remedy="say what makes it stale")


def reasons(windows: tuple[StaleWindow, ...], side: str) -> tuple[str, ...]:
    """Why `side` may not be read now; empty when it may."""
    return tuple(window.reason for window in windows if window.open and window.side == side)
