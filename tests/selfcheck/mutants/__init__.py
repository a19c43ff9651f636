"""Named mutants: real bugs of inference engines, each switched on in our own code, each found by a named invariant.

They show how strong the checks are. `run` runs them, and the library as it is, which gets no report.
A mutant belongs to a group, which is a kind of bug, and stands in the file of the part that has the bug: one of
`FAMILIES` (see `diffs`), or `with_state` where a diff cannot say it.
"""

from tests.selfcheck.mutants import diffs
from tests.selfcheck.mutants.registry import GROUPS, MUTANTS, Mutant
from tests.selfcheck.mutants.runner import CLEAN_EXAMPLES, EXAMPLES, MutantReport, MutantResult, run, run_mutant

FAMILIES = ("values", "pools", "kv", "steps", "races", "transport", "tools")
"""The files of mutants."""

for _family in FAMILIES:
    diffs.read(_family)

from tests.selfcheck.mutants import with_state as with_state  # noqa: E402  (registers its own behind those)

__all__ = [
    "CLEAN_EXAMPLES",
    "EXAMPLES",
    "GROUPS",
    "MUTANTS",
    "Mutant",
    "MutantReport",
    "MutantResult",
    "run",
    "run_mutant",
]
