"""What the code under test calls a stream or an event: the attribute or variable that its call is assigned to."""

import dis
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from batchstate._source_lines import users_frame

_PASSED = ("CACHE", "COPY", "EXTENDED_ARG", "LOAD_ATTR", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that may stand between a call and what stores its result."""

_MOST_PASSED, _MOST_FRAMES = 6, 4


def assigned_name() -> str | None:
    """The name that the call under way is assigned to, where a line of the user's code says so; else None."""
    frame = users_frame(3)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        found, returned = _stored_behind(frame.f_code, frame.f_lasti)
        if not returned:
            return found
        frame = frame.f_back  # a helper makes it and returns it
    return None


def label_of(event: str | None) -> str:
    """What reports call an event of a name: a new string for each event, which tells it from others of its name."""
    return "an event" if event is None else f"event {event}"


def expression_of(name: str, is_it: Callable[[Any], bool]) -> str | None:
    """How the user's code that runs now says an object of a name: `name`, `self.name`, `other.name`; None: it cannot.

    Args:
        name: of the variable or attribute that holds it, elsewhere perhaps.
        is_it: whether a value is the object.
    """
    frame = users_frame(3)
    if frame is None or not name.isidentifier():
        return None
    found = frame.f_locals
    scope = {**frame.f_globals, **found}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13) and sys.getrefcount(found) <= 3:
        found.clear()  # a copy, which the frame would keep: tensors in it would outlive their last use
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
    left = _MOST_PASSED
    for one in dis.get_instructions(code):
        if one.offset <= at:
            continue
        if one.opname.startswith("STORE_") and one.argval is not None:
            name = one.argval[0] if isinstance(one.argval, tuple) else one.argval
            return (name if isinstance(name, str) else None), False
        if one.opname.startswith("RETURN"):
            return None, True
        left -= one.opname != "CACHE"
        if one.opname not in _PASSED or not left:
            return None, False
    return None, False
