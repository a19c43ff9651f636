"""Kernels of Triton under `cuda_on_cpu`, run by its interpreter."""

# mypy: disable-error-code="no-untyped-call"

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from batchstate.cli import main
from batchstate.errors import DeviceError
from batchstate.races import Race, cuda_on_cpu
from batchstate.races.cuda._tracer import NotModelledError
from tests.selfcheck.mutants.diffs import changed

triton = pytest.importorskip("triton")
if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("these kernels are interpreted, which is for a CPU", allow_module_level=True)
kernels = pytest.importorskip("tests.triton_kernels")
PROGRAMS = kernels.PROGRAMS


def races_of(name: str, racy: bool) -> tuple[Any, Any]:
    """What is found in a program, and what it returns."""
    with cuda_on_cpu(on_race="collect") as rt:
        result = PROGRAMS[name].run(rt, racy)
        result = result.tolist() if isinstance(result, torch.Tensor) else result
    return rt.races, result


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    """The racy one is found, with the elements and both lines of this project; the repaired one is silent."""
    wanted = PROGRAMS[name]
    races, _ = races_of(name, True)
    assert {(race.kind, race.rows) for race in races} == {(wanted.kind, wanted.rows)}, "\n".join(map(str, races))
    for race in races:
        for side in (race.first, race.second):
            assert "triton_kernels.py:" in side.site, race
    assert not races_of(name, False)[0]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "a_row_of_another_request"])
def test_in_every_order_of_the_streams(name: str) -> None:
    """The repaired programs come to the values of the race detector on the simulated device too."""
    _, expected = races_of(name, False)
    for scheduler in ("lazy", "newest", "random"):
        with cuda_on_cpu(f"sim:{scheduler}") as rt:
            result = PROGRAMS[name].run(rt, False)
            result = result.tolist() if isinstance(result, torch.Tensor) else result
        assert result == expected


def test_a_race_makes_wrong_values() -> None:
    """A kernel that does not wait for a copy finds other numbers, in some order of the simulated device."""
    results = set()
    for scheduler in ("lazy", "oldest", "late=stream 1"):
        with cuda_on_cpu(f"sim:{scheduler}") as rt:
            results.add(tuple(PROGRAMS["a_kernel_behind_a_copy"].run(rt, True).tolist()))
    assert (0, 2, 4, 6) in results
    assert len(results) > 1


def test_words_of_a_clash(tmp_path: Path) -> None:
    """Kernel, tensor, row and column, both programs, the lines of store and launch; drawn, and raised."""
    (race,), _ = races_of("programs_of_two_axes", True)
    assert race.problem == (
        "two programs of one launch access one element, and one of them writes it: "
        "nothing orders the programs of cells on 'default'"
    )
    assert race.memory.startswith("tensor 1 int32[2, 4], allocated on 'default' at tests/triton_kernels.py:")
    assert race.first.operation == race.second.operation == "cells"
    assert race.first.rows == "row 0, column 1 of tensor 1 int32[2, 4] in program (0, 0)"
    assert race.second.rows == "row 0, column 1 of tensor 1 int32[2, 4] in program (0, 1)"
    assert race.first.site.endswith("in cells")
    assert race.second.site != race.first.site
    assert str(race.first.caller).endswith("in programs_of_two_axes")
    assert "launches" in race.suggestion
    page = tmp_path / "race.html"
    race.save(tmp_path / "race.json")
    assert main(["race", str(tmp_path / "race.json"), "--out", str(page)]) == 0
    assert "cells (program (0, 1))" in page.read_text()
    with pytest.raises(Race, match="nothing orders the programs of cells"), cuda_on_cpu() as rt:
        PROGRAMS["programs_of_two_axes"].run(rt, True)


def test_memory_that_it_was_not_given() -> None:
    """Lanes behind the end, a freed tensor in a table of addresses, and host memory: an error before the access."""
    with cuda_on_cpu() as rt:
        out = kernels.zeros(4)
        with pytest.raises(
            DeviceError, match=r"double in program 0 writes address .*, byte 16 from the start of tensor 1"
        ):
            kernels.double[(1,)](kernels.zeros(8), out, 6, BLOCK=8)
        assert out.tolist() == [0, 0, 0, 0]
        with pytest.raises(DeviceError, match=r"program 1 writes address 0x.*no memory of cuda:0"):
            kernels.fill_table[(2,)](kernels.on_device(out.data_ptr(), 4096, dtype=torch.int64), out + 1, 3, BLOCK=4)
        with pytest.raises(DeviceError, match="double in program 0 reads"):
            kernels.double[(1,)](torch.zeros(4, dtype=torch.int32), out, 4, BLOCK=4)
        with pytest.raises(triton.runtime.errors.InterpreterError):
            kernels.double[(1,)](out, out, 4, BLOCK=3)
        assert not rt.races


def test_an_autotuned_kernel_takes_its_first_configuration() -> None:
    """Nothing is timed, for which Triton would need a driver."""
    tuned = triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=[])(kernels.double)
    with cuda_on_cpu() as rt:
        out = kernels.zeros(8)
        tuned[lambda chosen: (triton.cdiv(8, chosen["BLOCK"]),)](kernels.on_device(*range(8)), out, 8)
        assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert not rt.races


def test_compiled_kernels_are_refused() -> None:
    """A kernel that was not decorated for the interpreter is refused by name; afterwards Triton is as it was."""
    compiled = triton.runtime.jit.JITFunction(kernels.put.fn)
    executor = triton.runtime.interpreter.GridExecutor
    before = executor.__call__, executor._init_args_hst, triton.runtime.jit.JITFunction.run
    with cuda_on_cpu(), pytest.raises(NotModelledError, match="compiled Triton kernel put"):
        compiled[(1,)](None, None, None, None, None)
    assert before == (executor.__call__, executor._init_args_hst, triton.runtime.jit.JITFunction.run)


SCRIPT = """
    import sys

    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def put(out, columns):
        tl.store(out + tl.load(columns + tl.program_id(0)), 1)

    out = torch.zeros(8, device="cuda")
    put[(2,)](out, torch.tensor([3, int(sys.argv[1])], device="cuda"))
    print(out.tolist())
"""


@pytest.mark.parametrize("column", ["3", "4"])
def test_the_command(column: str, tmp_path: Path) -> None:
    """It asks for the interpreter itself."""
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "batchstate", "race", "run", str(script), column]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == (column == "3"), done.stderr
    assert ("element 3" in done.stderr) is (column == "3")


def test_the_pytest_option(tmp_path: Path) -> None:
    """`--cuda-on-cpu` asks for the interpreter too."""
    kernel, _, use = textwrap.dedent(SCRIPT).replace("int(sys.argv[1])", "3").partition("out = torch")
    body = textwrap.indent(f"out = torch{use}", "    ")
    (tmp_path / "test_engine.py").write_text(f"{kernel}\n\ndef test_put():\n{body}")
    options = ["--batchstate-device", "race", "--cuda-on-cpu", "-p", "no:cacheprovider", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert "programs of one launch" in done.stdout, done.stdout
    assert "1 failed" in done.stdout


def test_the_example(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent, and with `--forget` the guide has its finding."""
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["batchstate"])
    example = "examples/plain_triton/staged_writes.py"
    err = ""
    for forgets in (False, True):
        assert main(["race", "run", example, *["--forget"] * forgets]) == forgets
        out, err = capfd.readouterr()
        assert out == "17\n"
        assert ("programs of one launch" in err) is forgets
    found, _, _ = err.partition("\n\n")
    assert f"```text\n{found}\n```" in (root / "docs/how-to/check-triton-kernels.md").read_text()


HOOKS = "races.cuda._triton:KernelLaunch"
MUTANTS = {
    "masks are ignored": (
        f"{HOOKS}._touch",
        "pointers.data[mask.data]",
        "pointers.data",
        "pinned_memory_refilled_by_torch",
    ),
    "one axis of the grid": (
        f"{HOOKS}._touch",
        "builder.grid_idx[:dimensions]",
        "builder.grid_idx[:1]",
        "programs_of_two_axes",
    ),
    "elements are bytes": (
        f"{HOOKS}._touch",
        "primitive_bitwidth // 8",
        "primitive_bitwidth // 64",
        "elements_of_two_widths",
    ),
    "locks order nothing": (f"{HOOKS}._touch", "addresses.size == 1", "addresses.size == 0", "a_sum_without_a_lock"),
    "relaxed atomics order": (
        f"{HOOKS}._touch",
        '("ACQUIRE" in semantics.name, "RELEASE" in semantics.name)',
        "(True, True)",
        "a_flag_that_releases_nothing",
    ),
    "atomics are stores": (
        f"{HOOKS}._told",
        "mask, writes=True, atomic=True, semantics=semantics",
        "mask, writes=True, atomic=False, semantics=semantics",
        "a_read_beside_an_atomic",
    ),
    "whole tensors": (f"{HOOKS}._check", "union_of(parts)", "ByteRegion(0, len(whole))", "rows_of_two_streams"),
    "kernels run ahead of copies": (
        f"{HOOKS}._touch",
        "self._tracer.host_memory.ordered(self._tracer.current(), allocation, region)",
        "pass",
        "a_landing_that_a_kernel_reads",
    ),
    "pinned reads are not watched": (
        f"{HOOKS}._check",
        "tracer.host_memory.reads(entry, allocation, part, bytes_of_it, False)",
        "pass",
        "pinned_memory_refilled_by_numpy",
    ),
    "pinned writes are not watched": (
        f"{HOOKS}._check",
        "tracer.host_memory.lands(entry, allocation, part, bytes_of_it, None)",
        "pass",
        "pinned_results_read_early",
    ),
    "a capture runs the kernel": (
        "races.cuda.runtime:CudaRuntime.launch_kernel",
        "if self.capturing:",
        "if False:",
        "a_kernel_in_a_graph",
    ),
    "copies of tensors stay": (
        "races.cuda._triton:interpreted",
        'stack.enter_context(patch.object(executor, "_restore_args_dev", lambda *arguments: None))',
        "pass",
        "a_block_freed_under_a_kernel",
    ),
    "reads behind an atomic are forgotten": (
        "races.tracing.footprint:Footprint.add",
        "self._program, self._behind = program, {}",
        "self._program = program",
        "a_program_that_does_not_wait",
    ),
    "a later write hides what is unordered": (
        "races.tracing.footprint:_clash",
        "if other.clashes(touch):",
        "if touch.clashes(other):",
        "a_sum_without_a_lock",
    ),
}
"""Bugs of this front end: function, piece of its source, the bug, and the program whose outcome changes."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant: str) -> None:
    """Each changes what is found in a program, or its values; without the bug `test_programs` has them right."""
    where, before, after, name = MUTANTS[mutant]

    def outcome() -> list[Any]:
        outcomes: list[Any] = []
        for racy in (True, False):
            try:
                races, result = races_of(name, racy)
                outcomes.append(({(race.kind, race.rows) for race in races}, not racy and result))
            except DeviceError as error:
                outcomes.append(type(error))
        return outcomes

    right = outcome()
    with changed(where, before, after):
        assert outcome() != right
    assert outcome() == right
