"""The names of the package itself."""

import subprocess
import sys

import pytest

import batchstate


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


def test_import_alone_is_light() -> None:
    """Importing the package imports no torch."""
    code = "import sys, batchstate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
