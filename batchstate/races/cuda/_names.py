"""Names of streams and events in the code under test: the attribute or variable that their call is assigned to."""

import dis
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any

from batchstate._source_lines import users_frame

_PUSHES, _TAKES = ("LOAD_", "PUSH_NULL"), ("LOAD_ATTR", "LOAD_METHOD", "PRECALL", "CALL", "CALL_KW")
_IDLE = ("CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP")
"""Instructions that may stand between a call and the one that stores its result: `a, b = Stream(), Stream()`."""

_MOST_PASSED, _MOST_FRAMES = 40, 4


def assigned_name() -> str | None:
    """The name that a line of the user's code assigns the present call to; else None."""
    frame = users_frame(3)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        name, returned = _stored_behind(frame.f_code, frame.f_lasti)
        if not returned:
            return name
        frame = frame.f_back  # a helper makes it and returns it
    return None


def label_of(event: str | None) -> str:
    """The name of an event in reports: a new string for each event, which tells it from others of its name."""
    return "an event" if event is None else f"event {event}"


def expression_of(name: str, is_it: Callable[[Any], bool]) -> str | None:
    """The expression for an object in the user's code that runs now: `name`, `self.name`, `other.name`, or None.

    Args:
        name: of the variable or attribute that holds it, perhaps elsewhere.
        is_it: whether a value is the object.
    """
    frame = users_frame(3)
    if frame is None or not name.isidentifier():
        return None
    variables = frame.f_locals
    scope = {**frame.f_globals, **variables}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13) and sys.getrefcount(variables) <= 3:
        variables.clear()  # a copy, which the frame would keep: tensors in it would outlive their last use
    if name in scope and is_it(scope[name]):
        return name
    for holder in ("self", *scope):
        try:
            held = object.__getattribute__(scope[holder], "__dict__")[name]
        except (AttributeError, KeyError, TypeError):
            continue
        if holder.isidentifier() and is_it(held):
            return f"{holder}.{name}"
    return None


@lru_cache(maxsize=1024)
def _stored_behind(code: CodeType, at: int) -> tuple[str | None, bool]:
    """The name that takes the result of the instruction at an offset, and whether it is returned instead."""
    behind = (instruction for instruction in dis.get_instructions(code) if instruction.offset > at)
    above = 0  # values that lie on the stack over the result
    for name, opcode, argument, value in (
        (i.opname, i.opcode, i.arg or 0, i.argval) for i in islice(behind, _MOST_PASSED)
    ):
        if name.startswith("RETURN"):
            return None, not above
        effect = 0 if name in _IDLE else dis.stack_effect(opcode, argument if opcode >= dis.HAVE_ARGUMENT else None)
        if name.startswith("STORE_"):
            names = value[: 1 + name.endswith("_STORE_FAST")] if isinstance(value, tuple) else (value,)
            place = above - (name == "STORE_ATTR")
            if place < len(names):
                return (names[place] if isinstance(names[place], str) else None), False
            above += effect
            if above < 0:
                return None, False
        elif name in ("COPY", "SWAP"):
            above = 0 if above == argument - 1 else argument - 1 if name == "SWAP" and not above else above + effect
        elif (above + effect < 1) if name in _TAKES else not name.startswith((*_PUSHES, *_IDLE)):
            return None, False
        else:
            above += effect
    return None, False
