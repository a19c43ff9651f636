"""The names of the package itself."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from importlib import metadata
from types import ModuleType

import pytest

import batchstate
import batchstate.races
import batchstate.testing
from batchstate import errors


def declared(package: ModuleType) -> list[str]:
    """The public names that a type checker sees: those that the package imports for it alone."""
    tree = ast.parse(inspect.getsource(package))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [alias.asname for node in imports for alias in node.names if alias.asname]


@pytest.mark.parametrize("package", [batchstate, batchstate.testing, batchstate.races])
def test_every_public_name_is_there(package: ModuleType) -> None:
    """Each can be imported, `dir` lists it, no module of that name hides it, and type checkers see the same names."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & {*vars(package)["__all__"]}
    assert {*vars(package)["__all__"]} == {*declared(package)} - {"__version__"} - modules
    for name in declared(package):
        assert getattr(package, name) is not None
        assert name in dir(package)


@pytest.mark.parametrize("package", [batchstate, batchstate.testing])
def test_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    """A name that the package lacks raises what Python raises."""
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'Bacth'"):
        package.Bacth  # noqa: B018


def test_version_is_that_of_the_package() -> None:
    """`__version__` is what is installed; a checkout that is not installed says so."""
    try:
        installed = metadata.version("batchstate")
    except metadata.PackageNotFoundError:
        installed = "unknown (a checkout that is not installed)"
    assert batchstate.__version__ == installed


def test_public_modules_need_no_import() -> None:
    """`batchstate.watch` and the like are there after `import batchstate`."""
    code = "import batchstate; print(batchstate.watch.watch.__name__, batchstate.races.cuda_on_cpu.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "watch cuda_on_cpu\n"


def test_every_error_is_exported() -> None:
    """Each error class can be imported from the package."""
    classes = inspect.getmembers(errors, inspect.isclass)
    assert {name for name, value in classes if value.__module__ == errors.__name__} <= {*dir(batchstate)}


def test_import_alone_is_light() -> None:
    """Importing the package imports no torch."""
    code = "import sys, batchstate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
