"""Where in the source an operation was called: the line in the library, and the line outside that led there."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import NamedTuple, final

import numpy
import torch

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep
_TRITON = importlib.util.find_spec("triton")
_OTHERS = (*torch.__path__, *numpy.__path__, *((_TRITON and _TRITON.submodule_search_locations) or ()))
_FOLDERS = (*_OTHERS, *(os.path.join(_PACKAGE, part) for part in ("races", "runtime")))
_BETWEEN = (*(os.path.join(os.path.abspath(folder), "") for folder in _FOLDERS), "<frozen")
_MACHINERY, _LIBRARY, _USER = range(3)
_kinds: dict[str, int] = {}


class Line(NamedTuple):
    """A line of a function, cheap to keep."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{_shortened(self.code.co_filename)}:{self.number} in {self.code.co_name}"


@final
class SourceLine(NamedTuple):
    """The innermost line that is not machinery, and the first line outside the library where that is another."""

    line: Line | None
    caller: Line | None

    def words(self) -> tuple[str, str | None]:
        """Both for people."""
        return "an unknown line" if self.line is None else str(self.line), self.caller and str(self.caller)


def source_line(depth: int = 2) -> SourceLine:
    """The source line of the frame `depth` above."""
    frame: FrameType | None = sys._getframe(depth)
    line: Line | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)
        if kind is None:
            kind = _kinds[code.co_filename] = _kind(code.co_filename)
        if kind == _USER:
            caller = Line(code, frame.f_lineno)
            return SourceLine(caller, None) if line is None else SourceLine(line, caller)
        if kind == _LIBRARY and line is None:
            line = Line(code, frame.f_lineno)
        frame = frame.f_back
    return SourceLine(line, None)


def users_frame(depth: int = 2) -> FrameType | None:
    """The innermost frame from the one `depth` above on that is neither machinery nor the library's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _kind(frame.f_code.co_filename) != _USER:
        frame = frame.f_back
    return frame


def users_line(lines: Iterable[Line]) -> Line | None:
    """The first of some lines, innermost first, that is not the library's."""
    return next((line for line in lines if _kind(line.code.co_filename) == _USER), None)


def _kind(path: str) -> int:
    if path.startswith(_BETWEEN) or path.endswith(("contextlib.py", "mock.py")):
        return _MACHINERY
    return _LIBRARY if path.startswith(_PACKAGE) and not path.startswith(_TESTING) else _USER


def _shortened(path: str) -> str:
    """Relative to where the process runs, or from the package's own folder on."""
    if path.startswith(_PACKAGE):
        return "batchstate/" + path[len(_PACKAGE) :].replace(os.sep, "/")
    try:
        near = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    if not near.startswith(".."):
        return near.replace(os.sep, "/")
    _, folder, inside = path.rpartition("site-packages" + os.sep)
    return (inside if folder else path).replace(os.sep, "/")
