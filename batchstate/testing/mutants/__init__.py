"""Named mutants: real bugs of inference engines, each switched on in our own code, each found by a named invariant.

They show how strong the checks are. `run` hunts them and also shows that the library as it is gets no report.
The modules of this package are kinds of bugs; a mutant is one function that replaces a piece of the library.
"""

from batchstate.testing.mutants import (
    drift,
    graph_inputs,
    host_memory,
    host_tier,
    leaks,
    lifetimes,
    ownership,
    pages,
    races,
    relay,
    requests,
    reuse,
    sides,
    slot_zero,
    states,
    steps,
    transfers,
    units,
)
from batchstate.testing.mutants.hunt import (
    MutantReport,
    MutantResult,
    hunt,
    mutants_table,
    run,
)
from batchstate.testing.mutants.registry import MUTANTS, Mutant

GROUPS = {
    module.__name__.rpartition(".")[2]: (module.__doc__ or "").partition("\n")[0]
    for module in (
        drift,
        graph_inputs,
        sides,
        reuse,
        ownership,
        leaks,
        slot_zero,
        pages,
        states,
        units,
        requests,
        steps,
        relay,
        races,
        host_memory,
        lifetimes,
        host_tier,
        transfers,
    )
}
"""The kinds of bugs: name of the module -> what they have in common."""

__all__ = ["GROUPS", "MUTANTS", "Mutant", "MutantReport", "MutantResult", "hunt", "mutants_table", "run"]
