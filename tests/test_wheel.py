"""The wheel: what is in it, and that it runs the ten-minutes page with nothing but what it requires."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchstate
from tests.test_typed_at_the_prompt import ROOT, typed

UNMET = re.compile(r";.*\bextra\b|platform_system|sys_platform|python_version <")
"""Requirements of an extra, or of other platforms."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, built as `make wheel` builds them: with a compiled core where this one is."""
    for needed in ("build", "Cython", "setuptools"):
        pytest.importorskip(needed, reason=f"{needed} is not installed, with which the wheel is built")
    folder = tmp_path_factory.mktemp("dist")
    build(folder, ROOT, BATCHSTATE_COMPILED=str(int(batchstate.compiled)))
    return folder


def build(folder: Path, source: Path, *options: str, **environment: str) -> None:
    """Builds `source` into the folder, without a setting of this process's environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(source)]
    others = {name: value for name, value in os.environ.items() if name != "BATCHSTATE_COMPILED"}
    done = subprocess.run(command, env=others | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def wheel(dist: Path) -> Path:
    """The wheel."""
    (built,) = dist.glob("*.whl")
    return built


def required(requirements: list[str]) -> Iterator[str]:
    """The installed distributions that these requirements bring, with all that they require."""
    names: set[str] = set()
    while requirements:
        line = requirements.pop()
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if UNMET.search(line) or name in names:
            continue
        names.add(name)
        requirements += importlib.metadata.requires(name) or []
        yield name


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    """The wheel has every file of the package, its types marker and licence, the compiled core, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(file.relative_to(ROOT)) for file in (ROOT / "batchstate").rglob("*") if file.is_file()}
    package = {name for name in package if "__pycache__" not in name and not name.endswith(".so")}
    binary = {"batchstate/_core.abi3.so"} if batchstate.compiled else set()
    assert {name for name in names if ".dist-info/" not in name} == package | binary
    assert "batchstate/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert ("-cp311-abi3-" if binary else "-py3-none-any") in wheel.name  # a tag, and every later Python takes it


def test_a_wheel_whose_core_does_not_compile_is_for_every_platform(dist: Path, tmp_path: Path) -> None:
    """Built from the sdist, without a compiler."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path, next(tmp_path.glob("batchstate-*")), "--wheel", CC="false")
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith((".so", ".c")) or ".data/" in name for name in zipfile.ZipFile(built).namelist())


def test_the_sdist_holds_sources_alone(dist: Path) -> None:
    """The sdist has what builds and tests the package, and nothing that was made of it."""
    (built,) = dist.glob("*.tar.gz")
    with tarfile.open(built) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = ("batchstate/_core.py", "tests/test_wheel.py", "docs/index.md", "setup.py", "Makefile", "constraints.txt")
    assert names.issuperset(wanted)
    assert [name for name in names if name.endswith((".so", ".c", ".pyc")) or "_build" in name] == []


def test_ten_minutes_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """The ten-minutes page runs at a prompt that finds the wheel and what it requires, and no other package."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (metadata,) = site.glob("*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    for name in required(needed):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if top != ".." and not top.endswith((".pth", "__pycache__")) and not (site / top).exists():
                (site / top).symlink_to(source)
    begin = f"import sys; sys.path.insert(0, {str(site)!r})"
    page = (ROOT / "docs/tutorial/ten-minutes.md").read_text()
    code = typed(page) + "import batchstate\nprint(batchstate.__file__)\n"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-q", "-i", "-c", begin],
        input=code, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert re.findall(r"^\S*(?:Error|Violation|Race)\b.*", run.stderr, re.MULTILINE) == []
    assert "stream 'default' never waits for sub on stream 'forward'" in run.stdout
    assert run.stdout.splitlines()[-1] == str(site / "batchstate/__init__.py")
    missing = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{begin}; import hypothesis"], capture_output=True, check=False
    )
    assert b"No module named 'hypothesis'" in missing.stderr
