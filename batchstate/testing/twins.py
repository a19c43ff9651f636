"""Fuzzing of an engine's own batch class, whose twins are kept by hand.

The engine says in a `TwinSpec` how to build, filter, merge and advance its batch, and which attributes are twins. It
gets a state machine that judges with the laws of `batchstate.invariants`, and shrinks what it finds::

    spec = TwinSpec(
        name="MyBatch",
        row=st.integers(1, 9),
        build=MyBatch.from_lengths,
        filter=MyBatch.filter_batch,
        merge=MyBatch.merge_batch,
        advance=MyBatch.prepare_for_decode,
        twins=[Twin("seq_lens_cpu", "seq_lens")],
        rows=["reqs", "temperatures"],
        num_rows=lambda batch: len(batch.reqs),
    )
    TestMyBatch = twin_machine(spec).TestCase

How rows must move is taken from the batch itself, as it was before an operation: nothing has to be described twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError
from batchstate.testing.machine import Machine
from batchstate.testing.machines.twins import TwinMachine
from batchstate.testing.runner import STEPS, MachineResult, error_of, run_machine
from batchstate.testing.twin_reading import attribute, seen
from batchstate.testing.twin_spec import Twin, TwinSpec

__all__ = ["Twin", "TwinSpec", "fuzz_twins", "twin_machine"]


def twin_machine(spec: TwinSpec[Any, Any]) -> type[Machine]:
    """A state machine for the class; collect its `TestCase`, or run it with `fuzz_twins`.

    Args:
        spec: what the class is.
    """
    return type(f"{spec.name}Machine", (TwinMachine,), {"spec": spec, "__doc__": f"Fuzzes {spec.name}."})


def fuzz_twins(
    spec: TwinSpec[Any, Any], *, examples: int = 100, seed: int = 0, steps: int = STEPS, shrink: bool = True
) -> MachineResult:
    """Fuzzes the class; arguments and errors as for `run_machine`.

    Raises:
        ArgumentError: an attribute that the spec names is not there on a batch just built, or is no vector. Asked
            before the fuzzing begins, so that a typo is not taken for a bug of the class.
    """
    check_spec(spec)
    result = run_machine(twin_machine(spec), examples=examples, seed=seed, steps=steps, shrink=shrink)
    replay = f"    fuzz_twins(spec, examples={examples}, seed={seed}, steps={steps})  # the TwinSpec of {spec.name}"
    failure = None if result.failure is None else f"{result.failure}\n\nTo replay it:\n{replay}"
    return attrs.evolve(result, name=spec.name, failure=failure)


def check_spec(spec: TwinSpec[Any, Any]) -> None:
    """Builds one batch and looks for everything that the spec names. A `build` that fails is left to the fuzzer.

    Raises:
        ArgumentError: something is not there.
    """
    batches: list[Any] = []

    @settings(
        max_examples=1,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(spec.row, min_size=max(1, spec.least_rows), max_size=spec.most_rows))
    def build(rows: list[Any]) -> None:
        batches.append(spec.build(rows))

    if error_of(build) is not None or not batches:
        return
    batch = batches[0]
    _found(spec, "num_rows", lambda: spec.num_rows(batch))
    for name in [name for twin in spec.twins for name in (twin.host, twin.device)] + list(spec.rows):
        _found(spec, f"attribute {name!r}", partial(_length, batch, name))


def _length(batch: object, name: str) -> int:
    return len(seen(attribute(batch, name)).values)


def _found(spec: TwinSpec[Any, Any], what: str, look: Callable[[], object]) -> None:
    error = error_of(look)
    if error is not None:
        raise ArgumentError(
            f"{spec.name}: {what} of a batch just built: {type(error).__name__}: {error}",
            value=what,
            remedy="correct the spec: each attribute named has one entry a request (a list, an array or a tensor)",
        ) from error
