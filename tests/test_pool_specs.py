"""Fuzzing a pool of the engine's own: a correct one is left in peace, and what a broken one does is found."""

from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, settings

from batchstate.errors import ArgumentError
from batchstate.testing import InjectedError, PoolSpec, fuzz_pool, pool_machine


class FullError(Exception):
    """Too few are free."""


class Blocks:
    """A free list."""

    def __init__(self, size: int) -> None:
        self.free_list = list(range(1, size + 1))

    def alloc(self, n: int) -> list[int]:
        if n > len(self.free_list):
            raise FullError(n)
        taken, self.free_list = self.free_list[:n], self.free_list[n:]
        return taken

    def free(self, blocks: list[int]) -> None:
        if not set(blocks).isdisjoint(self.free_list) or len(set(blocks)) < len(blocks):
            raise ValueError(f"{blocks}: freed twice")
        self.free_list += blocks


class Rows:
    """Rows of requests, each with a state of a second pool, as one transaction."""

    def __init__(self, size: int) -> None:
        self.rows, self.states = Blocks(size), Blocks(size)
        self.state_of: dict[int, int] = {}

    def take(self, n: int) -> list[int]:
        states = self.states.alloc(n)
        try:
            rows = self.rows.alloc(n)
        except Exception:
            self.states.free(states)
            raise
        self.state_of.update(zip(rows, states, strict=True))
        return rows

    def extend(self, rows: list[int], n: int) -> list[int]:
        return self.take(n)

    def free(self, rows: list[int]) -> None:
        if missing := [row for row in rows if row not in self.state_of]:
            raise ValueError(f"{missing}: freed twice")
        states = [self.state_of[row] for row in rows]
        self.rows.free(rows)
        try:
            self.states.free(states)
        except Exception:
            self.rows.free_list = [row for row in self.rows.free_list if row not in rows]
            raise
        for row in rows:
            del self.state_of[row]

    def available(self) -> int:
        return len(self.rows.free_list)


INNER = ("rows.alloc", "states.alloc", "states.free")


def spec_of(pool: type[Rows], **changes: Any) -> PoolSpec[Rows]:
    """What there is to know of a pool of rows."""
    spec = PoolSpec(
        name=pool.__name__,
        make=pool,
        take=lambda pool, n: pool.take(n),
        free=lambda pool, rows: pool.free(rows),
        extend=lambda pool, rows, n: pool.extend(rows, n),
        exhausted=(FullError,),
        inner=INNER,
    )
    return attrs.evolve(spec, **changes)


TestRows = pool_machine(spec_of(Rows)).TestCase
TestRows.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


class CountsFromZero(Rows):
    """Row 0, which padded rows read, belongs to a request."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rows.free_list = list(range(size))


class OneTooMany(Rows):
    """As many rows as the tables have, padding included."""

    def __init__(self, size: int) -> None:
        super().__init__(size + 1)


class GivesTwice(Rows):
    """Extending gives an owner what it has already."""

    def extend(self, rows: list[int], n: int) -> list[int]:
        return (rows * n)[:n] or super().extend(rows, n)


class LosesRows(Rows):
    """Rows first, then states: where these run out, or fail, the rows are gone."""

    def take(self, n: int) -> list[int]:
        rows = self.rows.alloc(n)
        self.state_of.update(zip(rows, self.states.alloc(n), strict=True))
        return rows


class LosesRest(Rows):
    """Extending takes one by one, and keeps what it has when there are too few."""

    def extend(self, rows: list[int], n: int) -> list[int]:
        return [row for _ in range(n) for row in self.take(1)]


class FreesTwice(Rows):
    """What is free already is put onto the free list once more."""

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self.rows.free_list.append(row)
            if row in self.state_of:
                self.states.free_list.append(self.state_of.pop(row))


class GivesFewer(Rows):
    """Where there are too few it gives what there is."""

    def take(self, n: int) -> list[int]:
        return super().take(min(n, len(self.rows.free_list)))


class FreesHalf(Rows):
    """The rows are free when freeing their states fails, and are the owner's still."""

    def free(self, rows: list[int]) -> None:
        states = [self.state_of[row] for row in rows]
        self.rows.free(rows)
        self.states.free(states)
        for row in rows:
            del self.state_of[row]


def test_a_correct_pool_is_left_in_peace() -> None:
    """A pool that keeps its promises is never accused, and every interesting state is reached."""
    result = fuzz_pool(spec_of(Rows), examples=40)
    assert result.failure is None, result.failure
    assert all(result.reached.values()), result.reached
    counted = fuzz_pool(spec_of(Rows, num_free=Rows.available, extend=None), examples=20)
    assert counted.failure is None, counted.failure
    zero_based = spec_of(CountsFromZero, least=0)
    assert fuzz_pool(zero_based, examples=20).failure is None


@pytest.mark.parametrize(
    ("pool", "code"),
    [
        (CountsFromZero, "SLOT_ZERO_ALLOCATED"),
        (OneTooMany, "SLOT_OUT_OF_RANGE"),
        (GivesTwice, "SLOT_SHARED"),
        (LosesRows, "SLOT_CONSERVATION"),
        (LosesRest, "SLOT_CONSERVATION"),
        (FreesTwice, "SLOT_DOUBLE_FREE"),
        (GivesFewer, "ROW_COUNT"),
        (FreesHalf, "ValueError"),
    ],
)
def test_a_broken_pool_is_found(pool: type[Rows], code: str) -> None:
    """Each bug is reported under its invariant, with the call that replays it."""
    result = fuzz_pool(spec_of(pool, inner=INNER[1:]), examples=30, shrink=False)
    assert result.code == code, result.failure or "nothing was found"
    assert "fuzz_pool(spec, examples=30, seed=0, steps=50)" in str(result.failure)
    if code.startswith("SLOT"):
        assert f"object     {pool.__name__} of" in str(result.failure)


def test_a_pool_that_refuses_what_it_has_is_found() -> None:
    """A take that is refused although there are enough is reported, where nothing is lost too."""

    class Hesitant(Rows):
        def take(self, n: int) -> list[int]:
            if n > 2:
                raise FullError(n)
            return super().take(n)

    result = fuzz_pool(spec_of(Hesitant), examples=30)
    assert result.code == "MODEL"
    assert "can be taken one by one" in str(result.failure)


def test_a_call_that_is_not_there_is_no_bug_of_the_pool() -> None:
    """A name that the pool lacks is refused before the fuzzing; an injected error is not one of the library's."""
    with pytest.raises(ArgumentError, match=r"has no call 'states\.take'"):
        fuzz_pool(spec_of(Rows, inner=["states.take"]))
    assert issubclass(InjectedError, RuntimeError)
