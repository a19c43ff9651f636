"""The names of the package itself."""

import importlib
import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest

import batchstate
import batchstate.testing

WITHOUT_HYPOTHESIS = "import sys; sys.modules['hypothesis'] = None\n"
"""What a process does that begins so is what it would do where hypothesis is not installed."""


@pytest.mark.parametrize("name", batchstate.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Each public name can be imported from the package, and `dir` lists it."""
    assert getattr(batchstate, name) is not None
    assert name in dir(batchstate)


def test_public_names_are_the_listed_ones() -> None:
    """What is imported at first use is exactly what is listed."""
    assert sorted(batchstate._HOMES) == sorted(batchstate.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that the package lacks raises what Python raises."""
    with pytest.raises(AttributeError, match="no attribute 'Bacth'"):
        batchstate.Bacth  # noqa: B018


def test_version_is_that_of_the_package() -> None:
    """`__version__` is what is installed; a checkout that is not installed says so."""
    try:
        installed = metadata.version("batchstate")
    except metadata.PackageNotFoundError:
        installed = "unknown (a checkout that is not installed)"
    assert batchstate.__version__ == installed


@pytest.mark.parametrize("name", batchstate.testing.__all__)
def test_every_name_for_tests_is_there(name: str) -> None:
    """Each name of `batchstate.testing` can be imported, `dir` lists it, and no module of that name hides it."""
    for module in pkgutil.iter_modules(batchstate.testing.__path__):
        importlib.import_module(f"batchstate.testing.{module.name}")
        assert module.name not in batchstate.testing.__all__
    assert getattr(batchstate.testing, name) is not None
    assert name in dir(batchstate.testing)
    assert sorted(batchstate.testing._HOMES) == sorted(batchstate.testing.__all__)


def test_fences_and_guard_need_no_hypothesis() -> None:
    """Where only the runtime dependencies are, the tools that need nothing else work."""
    code = WITHOUT_HYPOTHESIS + "from batchstate.testing import ManualFence, ManualStream, no_hidden_sync"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_needs_hypothesis_says_so() -> None:
    """Where hypothesis is missing, the error names the extra to install."""
    code = WITHOUT_HYPOTHESIS + "from batchstate.testing import TwinSpec"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("batchstate.testing.TwinSpec needs hypothesis: pip install 'batchstate[testing]'\n")


def test_import_alone_is_light() -> None:
    """Importing the package imports no torch."""
    code = "import sys, batchstate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
