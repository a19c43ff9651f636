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

from typing import Any

import attrs

from batchstate.testing.fuzz import STEPS, MachineResult, run_machine
from batchstate.testing.machine import Machine
from batchstate.testing.machines.twins import TwinMachine
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
    """Fuzzes the class; arguments and errors as for `run_machine`."""
    result = run_machine(twin_machine(spec), examples=examples, seed=seed, steps=steps, shrink=shrink)
    replay = f"    fuzz_twins({spec.name} spec, examples={examples}, seed={seed}, steps={steps})"
    failure = None if result.failure is None else f"{result.failure}\n\nTo replay it:\n{replay}"
    return attrs.evolve(result, name=spec.name, failure=failure)
