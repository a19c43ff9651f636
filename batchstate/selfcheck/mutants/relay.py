"""What a forward leaves for the next step is read again: mutants that remember what was there before."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from batchstate._upload import Extras
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap
from batchstate.levels import Level
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.FUTURE_CONSUMED, Code.DERIVED_STALE, machine="future_map", level=Level.CHEAP, origin="sglang #25945")
def prompt_installed_again(patch: Patch) -> None:
    """A snapshot that isolates a step puts back inputs that were used: the prompt before runs a second time."""
    before: WeakKeyDictionary[FutureMap, tuple[ForwardPlan, Extras]] = WeakKeyDictionary()

    def resolve(self: FutureMap, plan: ForwardPlan, uploaded: Extras, **named: Any) -> ForwardInputs:
        used = plan, uploaded
        if isinstance(plan, ForwardPlan):
            last, crossed = before.get(self, used)
            before[self] = used
            fits = np.array_equal(last.slots.np, plan.slots.np) and set(last.extras) <= set(plan.extras)
            here = fits and np.array_equal(last.slots.generations, plan.slots.generations)
            if here and not len(last.relay_rows):
                used = last, crossed
        inputs: ForwardInputs = original(self, *used, **named)
        return inputs

    original = patch(FutureMap, "resolve_forward_inputs", resolve)
