"""Fuzzing of an engine's own pools: slots, pages, states, blocks of the host.

The engine says in a `PoolSpec` how to make its pool, and how to take, free and extend. It gets a state machine that
takes and frees at random, runs the pool dry, makes it fail in the middle of a call, and checks each index::

    spec = PoolSpec(
        name="ReqToTokenPool",
        make=ReqToTokenPool,
        take=lambda pool, n: pool.alloc(n),
        free=lambda pool, indices: pool.free(indices),
        inner=["mamba_pool.alloc"],
    )
    TestMyPool = pool_machine(spec).TestCase

It finds index 0 handed out, an index with two owners, indices that are lost after an error, and a double free that is
accepted. Nothing but the calls of the class has to be described.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, final

import attrs
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from hypothesis.strategies import SearchStrategy

from batchstate import invariants
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.testing.machine import DisagreementError, Machine
from batchstate.testing.runner import STEPS, MachineResult, error_of, run_machine, with_replay
from batchstate.violations import Where

__tracebackhide__ = True  # so that pytest shows the engine's frames

__all__ = ["InjectedError", "PoolSpec", "fuzz_pool", "pool_machine"]

P = TypeVar("P")


class InjectedError(RuntimeError):
    """Raised by an `inner` call of a pool that is made to fail."""


@final
@attrs.frozen(eq=False)
class PoolSpec(Generic[P]):
    """A pool for the fuzzer.

    Attributes:
        name: of the class, for reports.
        make: makes a pool of that many indices.
        take: takes n indices, and returns them as a list, an array or a tensor. It returns None, or raises one of
            `exhausted`, where there are too few; the pool is then as before.
        free: gives back indices, all those of one owner, as a list.
        extend: takes n more for an owner of some indices, as `take`; None if the pool has no such call.
        num_free: how many can be taken; None if the pool does not know.
        exhausted: the errors that say that there are too few.
        inner: calls that `take`, `extend` and `free` make inside, by dotted names from the pool (`states.alloc`). They
            are made to raise `InjectedError`, once: the call that it is part of must then change nothing.
        least: the smallest index that is handed out; those below it are padding.
        refuses_double_free: whether freeing what is free raises. Else it is not tried.
        sizes: of the pools that are made.
    """

    name: str
    make: Callable[[int], P]
    take: Callable[[P, int], Any]
    free: Callable[[P, list[int]], object]
    extend: Callable[[P, list[int], int], Any] | None = None
    num_free: Callable[[P], int] | None = None
    exhausted: tuple[type[Exception], ...] = (PoolExhaustedError,)
    inner: Sequence[str] = ()
    least: int = 1
    refuses_double_free: bool = True
    sizes: SearchStrategy[int] = attrs.field(factory=lambda: st.integers(1, 8))


def pool_machine(spec: PoolSpec[Any]) -> type[Machine]:
    """A state machine for the pool; collect its `TestCase`, or run it with `fuzz_pool`.

    Args:
        spec: what the pool is.
    """
    return type(f"{spec.name}Machine", (_EnginePoolMachine,), {"spec": spec, "__doc__": f"Fuzzes {spec.name}."})


def fuzz_pool(
    spec: PoolSpec[Any], *, examples: int = 100, seed: int = 0, steps: int = STEPS, shrink: bool = True
) -> MachineResult:
    """Fuzzes the pool; arguments and errors as for `run_machine`.

    Raises:
        ArgumentError: a pool just made lacks an `inner` call that the spec names.
    """
    machine = pool_machine(spec)
    pool = spec.make(4)
    for name in spec.inner:
        if error_of(partial(_inner, pool, name)) is not None:
            problem = f"{spec.name}: a pool just made has no call {name!r}"
            raise ArgumentError(problem, name, "correct `inner` of the spec")
    result = run_machine(machine, examples=examples, seed=seed, steps=steps, shrink=shrink)
    replay = f"fuzz_pool(spec, examples={examples}, seed={seed}, steps={steps})  # the PoolSpec of {spec.name}"
    return with_replay(attrs.evolve(result, name=spec.name), replay)


def _inner(pool: object, name: str) -> tuple[Any, str, Callable[..., Any]]:
    """The object that has an inner call, its name there, and the call."""
    path, _, last = name.rpartition(".")
    owner = attrgetter(path)(pool) if path else pool
    call = getattr(owner, last)
    if not callable(call):
        raise TypeError(f"{name} is not callable")
    return owner, last, call


class _EnginePoolMachine(Machine):
    """Takes, extends, frees, runs out and fails; subclasses name the pool in `spec`."""

    NAME = "engine pools"
    TARGETS = ("too few refused", "all taken", "a call failed inside", "a double free refused", "an index taken again")

    spec: ClassVar[PoolSpec[Any]]

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A pool, all of it free."""
        self.open()
        self.size = data.draw(self.spec.sizes, label="size")
        self.pool = self.spec.make(self.size)
        self.owned: list[list[int]] = []  # by owner
        self.freed: set[int] = set()

    @property
    def left(self) -> int:
        """How many are to be had."""
        return self.size - sum(map(len, self.owned))

    def check(self) -> None:
        """The pool counts as the model does."""
        if self.spec.num_free is not None:
            self._conserved(self.spec.num_free(self.pool), "num_free")

    def _conserved(self, free: int, operation: str) -> None:
        owned = self.size - self.left
        problem = f"of {self.size} indices {owned} are owned, and {free} can be taken"
        invariants.slot_conservation(free, 0, owned, self.size, problem=problem, **self._where(operation))

    # Rules

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        """An owner comes."""
        taken = self._called("take", n, lambda: self.spec.take(self.pool, n))
        if taken is not None:
            self.owned.append(taken)

    @precondition(lambda self: self.owned and self.spec.extend is not None)
    @rule(data=st.data(), n=st.integers(0, 4))
    def extend(self, data: st.DataObject, n: int) -> None:
        """An owner needs more."""
        owner = data.draw(st.sampled_from(self.owned), label="owner")
        self._extend(owner, n)

    def _extend(self, owner: list[int], n: int) -> None:
        extend = self.spec.extend
        if extend is not None:
            owner += self._called("extend", n, lambda: extend(self.pool, list(owner), n)) or []

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """An owner leaves."""
        self._free(data.draw(st.integers(0, len(self.owned) - 1), label="owner"))

    def _free(self, at: int) -> None:
        self.spec.free(self.pool, list(self.owned[at]))
        self.freed.update(self.owned.pop(at))

    @precondition(lambda self: self.freed and self.spec.refuses_double_free)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """A free index is freed once more, and refused."""
        free = sorted(self.freed - {index for owner in self.owned for index in owner})
        if free:
            again = [data.draw(st.sampled_from(free), label="index")]
            error = error_of(lambda: self.spec.free(self.pool, again))
            if error is None:
                live = np.zeros(1, dtype=np.bool_)
                invariants.slot_double_free(np.array(again), live, **self._where("free"))
            self.reached("a double free refused")

    @precondition(lambda self: self.spec.inner)
    @rule(data=st.data(), n=st.integers(1, 4), nth=st.sampled_from([1, 1, 1, 2, 3]))
    def fail_inside(self, data: st.DataObject, n: int, nth: int) -> None:
        """A call inside fails; the call that it is part of changes nothing, and succeeds the next time."""
        inner = data.draw(st.sampled_from(list(self.spec.inner)), label="inner")
        calls: list[Callable[[], object]] = [lambda: self.take(n)]
        if self.owned:
            owner = data.draw(st.integers(0, len(self.owned) - 1), label="owner")
            calls.append(lambda: self._free(owner))
            if self.spec.extend is not None:
                calls.append(lambda: self._extend(self.owned[owner], n))
        call = data.draw(st.sampled_from(calls), label="call")
        with self._failing(inner, nth) as failed:
            try:
                call()
            except InjectedError:
                failed.append(inner)
        if failed:
            self.reached("a call failed inside")
            self.drain()
            call()

    @rule()
    def drain(self) -> None:
        """All that is left can be had, at once."""
        left = self.left
        taken = self._called("take", left, lambda: self.spec.take(self.pool, left))
        if taken is not None:
            self.reached("all taken", left > 0)
            self.spec.free(self.pool, taken)
            self.freed.update(taken)

    @rule()
    def all_leave(self) -> None:
        """Everyone leaves, and all indices are there again."""
        while self.owned:
            self._free(0)
        self.drain()

    # Indices that a call hands out

    def _called(self, operation: str, n: int, call: Callable[[], Any]) -> list[int] | None:
        """The indices that a call took, checked; None if it was refused, as it has to be if there are too few."""
        left = self.left
        try:
            returned = call()
        except self.spec.exhausted:
            returned = None
        if returned is None:
            if n <= left:  # it should have gone through: count what is really there
                self._conserved(self._really_left(), f"{operation} of {n}")
                problem = f"{self.spec.name}: {operation} of {n} was refused, and {left} can be taken one by one"
                raise DisagreementError(problem)
            self.reached("too few refused", n > left)
            return None
        where = self._where(operation)
        indices = np.asarray([int(index) for index in returned], dtype=np.int64)
        invariants.row_count(n, {"indices": indices.size}, **where)
        if self.spec.least > 0:
            invariants.slot_zero_allocated(indices, **where)
        invariants.slot_out_of_range(indices, self.size + self.spec.least, **where)
        everyone = [index for owner in self.owned for index in owner]
        invariants.slot_shared(np.array([*everyone, *indices.tolist()], dtype=np.int64), **where)
        self.reached("an index taken again", not self.freed.isdisjoint(indices.tolist()))
        taken: list[int] = indices.tolist()
        return taken

    def _really_left(self) -> int:
        """How many can be taken one by one."""
        for count in range(self.size + 1):
            with contextlib.suppress(*self.spec.exhausted):
                if self.spec.take(self.pool, 1) is not None:
                    continue
            return count
        return self.size + 1

    @contextlib.contextmanager
    def _failing(self, name: str, nth: int) -> Iterator[list[str]]:
        """A window in which the `nth` use of an inner call raises, before it does anything."""
        owner, last, call = _inner(self.pool, name)
        own, uses, failed = vars(owner).get(last, self), 0, list[str]()

        def fails(*args: Any, **kwargs: Any) -> Any:
            nonlocal uses
            uses += 1
            if uses == nth:
                raise InjectedError(f"{name} is made to fail")
            return call(*args, **kwargs)

        setattr(owner, last, fails)
        try:
            yield failed
        finally:
            if own is self:  # the call was its class's
                delattr(owner, last)
            else:
                setattr(owner, last, own)

    def _where(self, operation: str) -> Where:
        return {"object": f"{self.spec.name} of {self.size}", "operation": operation}
