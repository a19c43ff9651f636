"""Sphinx configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "batchstate"
author = "The batchstate authors"
copyright = author
release = importlib.metadata.version("batchstate")

sys.path.append(str(Path(__file__).parent / "_ext"))
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_code"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # it writes `object_` as text, and docutils takes that for a reference

# The docs build without a network, so names of other projects are not looked up. Our own have to resolve,
# except private names and one-letter type variables.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!batchstate\.).*|batchstate\.(.*\.)?(_.*|[A-Z])")]

html_theme = "furo"
html_title = f"batchstate {release}"

NOT_API = {"__main__", "cli"}  # documented as commands


def _api_modules() -> list[str]:
    """Every public module of the package, at any depth."""
    spec = importlib.util.find_spec("batchstate")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("batchstate is not installed: run `make setup`")

    def walk(folder: Path, prefix: str) -> list[str]:
        found = []
        for module in pkgutil.iter_modules([str(folder)]):
            if module.name.startswith("_") or module.name in NOT_API:
                continue
            found.append(f"{prefix}.{module.name}")
            if module.ispkg:
                found += walk(folder / module.name, f"{prefix}.{module.name}")
        return found

    return walk(Path(spec.submodule_search_locations[0]), "batchstate")


def _write_api_pages() -> list[str]:
    """Write one page per public module, so that nobody has to list a new module."""
    folder = Path(__file__).parent / "reference" / "api"
    folder.mkdir(exist_ok=True)
    modules = _api_modules()
    for module in modules:
        text = f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"
        page = folder / f"{module}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in folder.glob("*.md"):
        if page.stem not in modules:
            page.unlink()
    return modules


def _is_documented_elsewhere(
    app: Sphinx, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Skip what a module re-exports from another public module, so that every name has one page."""
    page = app.env.docname.rpartition("/")[2]
    home = getattr(member, "__module__", None)
    return True if home != page and home in app.config.api_modules else None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_config_value("api_modules", _write_api_pages(), "env")
    app.connect("autodoc-skip-member", _is_documented_elsewhere)
