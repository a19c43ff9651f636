"""`cuda_on_cpu`: a window in which plain torch code that says `cuda` runs on a CPU, and races in it are found."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, final, overload

from batchstate._guidance import shows_signature
from batchstate.errors import ArgumentError
from batchstate.runtime import Stream
from batchstate.testing.cuda._hints import torch_hint_for
from batchstate.testing.cuda._plain import PlainRaceRuntime
from batchstate.testing.cuda._race import CudaRaceTracer
from batchstate.testing.cuda._sim import CudaSimTracer
from batchstate.testing.cuda._window import CudaWindow
from batchstate.testing.devices import PROMPT, RACE, SIM
from batchstate.testing.race.detector import OnRace
from batchstate.testing.race.report import EventKind
from batchstate.testing.sim.device import DeviceStream
from batchstate.testing.sim.runtime import SimRuntime
from batchstate.testing.tracing.clocks import StreamClock


@final
class CudaRuntime(CudaWindow[StreamClock], PlainRaceRuntime):
    """The race detector behind `torch.cuda`. Made by `cuda_on_cpu`."""

    _tracer: CudaRaceTracer

    def _new_tracer(self) -> CudaRaceTracer:
        return CudaRaceTracer(self._detector, self._inner, self._known_stream, self._note_sync)

    def _wait_for_device(self) -> None:
        self._detector.event(self._detector.clocks.host, EventKind.WAIT, "wait for the device")
        super()._wait_for_device()

    def _is_idle(self, stream: Stream) -> bool:
        clock = self._known_stream(stream)
        return self._detector.clocks.host.knows(clock.number, clock.work)


@final
class CudaSimRuntime(CudaWindow[DeviceStream], SimRuntime):
    """The simulated device behind `torch.cuda`. Made by `cuda_on_cpu`."""

    _tracer: CudaSimTracer

    def _new_tracer(self) -> CudaSimTracer:
        return CudaSimTracer(*self._of_tracer())

    def _is_idle(self, stream: Stream) -> bool:
        return not self.pending(stream)


@overload
def cuda_on_cpu(
    device: Literal["race", "race:prompt"] = "race",
    *,
    on_race: OnRace = "raise",
    name: str = ...,
    memory: int = ...,
    capability: tuple[int, int] = ...,
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
) -> CudaRuntime: ...
@overload
def cuda_on_cpu(
    device: str,
    *,
    on_race: OnRace = "raise",
    seed: int = 0,
    name: str = ...,
    memory: int = ...,
    capability: tuple[int, int] = ...,
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
) -> CudaRuntime | CudaSimRuntime: ...
@shows_signature
def cuda_on_cpu(
    device: str = RACE,
    *,
    on_race: OnRace = "raise",
    seed: int = 0,
    name: str = "cuda_on_cpu",
    memory: int = 80 << 30,
    capability: tuple[int, int] = (9, 0),
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
) -> CudaRuntime | CudaSimRuntime:
    """A window in which torch has a device `cuda:0` that is the CPU, and every access to its memory is checked.

    Or, on the simulated device, one in which streams run late, in an order that a scheduler picks, so that a race makes
    wrong values.

    Code that says `device="cuda"`, `.cuda()`, `pin_memory()`, `torch.cuda.Stream` and so on runs as it is, in this
    thread and in threads that start inside of the window. A GPU is not used. After the window torch is as it was.

    Example:
        with cuda_on_cpu(on_race="collect") as rt:
            engine.run()
        for race in rt.races:
            print(race)

    Args:
        device: as `open_device` has it: `"race"`, the race detector; `"race:prompt"`, where an event is complete as
            soon as the host asks; or `"sim"`, the simulated device, where `"sim:lazy"` names the scheduler.
        on_race: `"raise"` the first race as `Race` where it happens, and once more at the end of the window if the
            code has caught it; or `"collect"` them in `races`.
        seed: of the scheduler of the simulated device.
        name: of the device, as `torch.cuda` answers.
        memory: of the device, in bytes.
        capability: of the device, major and minor.
        stands_for: what runs in the place of code that needs a GPU: `package.module.attribute` (the launcher of a
            Triton kernel) or `namespace::operator` (an operator without a CPU kernel) -> a function of torch
            operations, whose accesses are seen, or a `declared_kernel`.
        note_waits: see `RaceRuntime`.

    Returns:
        the runtime, for `with`.

    Raises:
        ArgumentError: on entry: a window is open, or `stands_for` names what does not exist.
    """
    described: dict[str, Any] = {
        "name": name,
        "memory": memory,
        "capability": capability,
        "stands_for": stands_for or {},
    }
    tool, _, rest = device.partition(":")
    if tool == SIM:
        return CudaSimRuntime(**described, seed=seed, scheduler=rest or "random")
    if device not in (RACE, f"{RACE}:{PROMPT}"):
        raise ArgumentError(
            f"cuda_on_cpu of device {device!r}", value=device, remedy="use 'race', 'race:prompt', 'sim' or 'sim:NAME'"
        )
    fences: Literal["eager", "lazy"] = "eager" if rest else "lazy"
    return CudaRuntime(**described, on_race=on_race, fences=fences, note_waits=note_waits, hint_for=torch_hint_for)
