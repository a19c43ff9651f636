"""Interrupts between any two instructions of the package, for tests."""

import contextlib
import gc
import opcode
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, final

import batchstate

PACKAGE = batchstate.__path__[0]
NOP = opcode.opmap["NOP"]
"""The line of a `try`: Python handles no signal there, and in a nested one no handler covers it."""


@final
class Interrupt:
    """Interrupts the package at its n-th call, line or return; with 0 it counts them.

    Attributes:
        events: calls, lines and returns so far.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.events = 0

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "call" and not (frame.f_code.co_filename.startswith(PACKAGE) and _raises(frame)):
            return None
        if event != "exception" and frame.f_code.co_code[max(frame.f_lasti, 0)] != NOP:
            self.events += 1
            if self.events == self.at:
                raise KeyboardInterrupt
        return self._trace

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """A window in which the interrupt comes."""
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # Python drops what is raised in a finalizer
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()


def _raises(frame: FrameType) -> bool:
    """Whether an error there comes through. Python drops it in a finalizer, and where it closes a generator."""
    if frame.f_code.co_name == "<genexpr>":
        return False
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        if frame.f_code.co_name == "__del__":
            return False
        frame = frame.f_back
    return not frame.f_code.co_filename.endswith("weakref.py")
