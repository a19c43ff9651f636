"""A stand-in for the module `cython` in a core that is not compiled: types, and decorators that change nothing.

An interpreted core takes it even where Cython is installed, so that the file runs alike on every machine. Type checkers
read the types here: a number of C is an `int`, a view of memory (`cython.longlong[::1]`) is not checked.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

T = TypeVar("T")
Integer = int

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    N = TypeVarWithDefault("N", default=Integer)
    const = Annotated[N, "C"]
    uchar = Annotated[N, "C"]
    short = Annotated[N, "C"]
    int = Annotated[N, "C"]
    uint = Annotated[N, "C"]
    longlong = Annotated[N, "C"]
    Py_ssize_t = Annotated[N, "C"]
    bint = Annotated[N, "C"]
    void = None
else:

    class _Type:
        """A type of C; with an index, a view of memory, or the same type with a qualifier."""

        def __class_getitem__(cls, item: object) -> type:
            return cls

    const = uchar = short = int = uint = longlong = Py_ssize_t = bint = void = _Type

compiled = False


def declare(kind: object = None, value: Any = 0, *, visibility: str = "private") -> Any:
    """A name with a type of C: its value."""
    return value


def cast(kind: object, value: T) -> T:
    """The value as it is. Compiled, a number that does not fit into the type loses its upper bits."""
    return value


def fused_type(*kinds: object) -> type:
    """Any of several types."""
    return object


def _unchanged(function: T) -> T:
    return function


def exceptval(value: object = None, *, check: bool = False) -> Callable[[T], T]:
    """How a function of C tells of an exception: nothing to say here."""
    return _unchanged


cclass = cfunc = ccall = inline = final = _unchanged
