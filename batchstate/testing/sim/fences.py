"""Fences of the simulated device."""

from typing import final

import attrs

from batchstate.runtime.counters import Counters
from batchstate.testing.sim.device import Device
from batchstate.testing.sim.queues import Marker

PATIENCE = 1_000
"""Times that a fence is asked before each further time lets something run: a host that polls gets on."""


@final
@attrs.define(eq=False)
class SimFence:
    """A point in a stream. Complete once everything before it has run.

    Attributes:
        number: in the order in which the fences of a runtime were recorded, from 1.
        marker: where it is.
        device: whose it is.
    """

    number: int
    marker: Marker = attrs.field(repr=False)
    device: Device = attrs.field(repr=False)
    _counters: Counters = attrs.field(repr=False)
    _asked: int = attrs.field(default=0, repr=False)

    def query(self) -> bool:
        """Whether everything before it has run. Never waits; the device may get on meanwhile."""
        if not self.device.has_reached(self.marker):
            self._asked += 1
            if self._asked > PATIENCE:
                self.device.step_towards(self.marker)
            self.device.asked()
        return self.device.has_reached(self.marker)

    def wait(self) -> None:
        """The host waits: the device runs until everything before it has run."""
        self._counters.fence_waits += 1
        self.device.run_until(self.marker)
