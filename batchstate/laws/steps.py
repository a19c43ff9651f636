"""Laws of a step: what may wait, how deep steps may overlap, whose the memory of a transfer is, what comes first."""

from typing import Unpack

from batchstate.laws.catalog import broken, law, made
from batchstate.violations import Code, Where


@law(
    Code.HIDDEN_SYNC,
    asked="test",
    remedy="read the host side of the mirrored value, or call `resolve`/`synchronize`, whose names say that they wait",
    origins=("sglang #26425", "sglang #29420", "sglang #34782", "sglang #27689", "sglang #28491"),
)
def hidden_sync(call: str, allowed: bool, **where: Unpack[Where]) -> None:
    """Nothing waits for the device but calls named for it. `call` is what was about to wait.

    Cost: none at run time; test tools intercept. Broken by `.item()`, `.tolist()`, `.cpu()` or a boolean index.
    """
    made[Code.HIDDEN_SYNC] += 1
    if not allowed:
        broken(
            Code.HIDDEN_SYNC,
            f"`{call}` on a device tensor waits for the device",
            where,
            expected="no synchronisation",
            actual=call,
        )


@law(
    Code.STAGING_OVERRUN,
    asked="cheap",
    remedy="declare the true depth: open the runtime with a larger `steps_in_flight`, or wait for older steps first",
    origins=("TRT-LLM#18485", "sglang #13713", "sglang-jax#1487", "vllm #24527"),
)
def staging_overrun(oldest_step: int, next_step: int, steps_in_flight: int, **where: Unpack[Where]) -> None:
    """When step s begins, the uploads of step s - steps_in_flight and older have run.

    `oldest_step` is the oldest step with an upload that has not. Cost: one query of a fence. Broken by an engine that
    runs deeper than it declared: buffers planned for the declared depth are then in use at once.
    """
    made[Code.STAGING_OVERRUN] += 1
    if oldest_step <= next_step - steps_in_flight:
        broken(
            Code.STAGING_OVERRUN,
            f"an upload of step {oldest_step} has not run when step {next_step} begins",
            where,
            expected=f"at most {steps_in_flight} steps in flight",
            actual=next_step - oldest_step + 1,
        )


@law(
    Code.STAGING_REUSED,
    asked="cheap",
    remedy="give a block of host memory back when its values have been taken out, and never before its copy has run",
    origins=("vllm #51571", "vllm #36013", "pytorch #68749"),
)
def staging_reused(held: int, current: int, **where: Unpack[Where]) -> None:
    """Host memory that a copy from the device landed in is still lent to that copy when its values are taken out.

    `held` is the number under which it was lent, `current` that of its last lending; 0 when it is lent to nobody.
    Cost: one comparison. Broken by a ring of landing buffers that turns once a call, or that is read a step too late.
    """
    made[Code.STAGING_REUSED] += 1
    if held != current:
        broken(
            Code.STAGING_REUSED,
            "the host memory of a copy from the device was given to another before its values were taken out",
            where,
            expected=f"lending {held}",
            actual=f"lending {current}" if current else "lent to nobody",
        )


@law(
    Code.RACE,
    asked="test",
    remedy="let the stream of the second access wait for a fence recorded behind the first",
    origins=(
        "sglang #18744",
        "sglang #26376",
        "sglang #30471",
        "sglang #34076",
        "vllm #24527",
        "vllm #36013",
        "vllm #29623",
    ),
)
def race(ordered: bool, problem: str, missing: str, remedy: str | None = None, **where: Unpack[Where]) -> None:
    """Two accesses to the same memory, one of them a write, are ordered by streams, fences and waits of the host.

    `problem` names both, `missing` the order that is not there. Freeing memory counts as a write of the stream that it
    was allocated on. Cost: none at run time; the race detector asks. Broken by a missing wait, by a host that refills
    or reads memory before its copy has run, by slots that change hands too early, by memory handed over unprotected.
    """
    made[Code.RACE] += 1
    if not ordered:
        broken(Code.RACE, problem, where, expected="an order", actual=missing, remedy=remedy)
