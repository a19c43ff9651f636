"""Sphinx configuration."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

project = "batchstate"
author = "The batchstate authors"
copyright = author
release = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["version"]

sys.path += [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]  # directives, and `tests`
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_code", "layout"]
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
# except private names, one-letter type variables, and those in folders that users do not import from.
INSIDE = r"runtime|testing|transport|races\.\w+"
default_role = "code"  # single backticks in docstrings
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", rf"(?!batchstate\.).*|batchstate\.(.*\.)?(_.*|[A-Z])|batchstate\.({INSIDE})\.\w+\..*")
]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"batchstate {release}"

NOT_API = {"__main__", "cli"}  # documented as commands
EXPORTING = {"runtime", "testing", "transport"}  # folders that are documented with what they export


def _api_modules() -> list[str]:
    """The modules that users import from: all without an underscore, and of some folders the folder itself."""
    spec = importlib.util.find_spec("batchstate")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("batchstate is not installed: run `make setup`")
    modules: list[str] = ["batchstate"]
    for module in pkgutil.iter_modules(spec.submodule_search_locations):
        if module.name in NOT_API or module.name.startswith("_"):
            continue
        if not module.ispkg or module.name in EXPORTING:
            modules.append(f"batchstate.{module.name}")
            continue
        folders = [f"{folder}/{module.name}" for folder in spec.submodule_search_locations]
        modules += [
            f"batchstate.{module.name}.{inner.name}"
            for inner in pkgutil.iter_modules(folders)
            if not inner.name.startswith("_")
        ]
    return modules


def _write_api_pages() -> list[str]:
    """Write one page per public module, so that nobody has to list a new module."""
    folder = Path(__file__).parent / "reference" / "api"
    folder.mkdir(exist_ok=True)
    modules = _api_modules()
    for module in modules:
        content = f"```{{eval-rst}}\n.. automodule:: {module}\n```\n"
        text = f"# {module}\n\n" + (content if module != "batchstate" else "```{public-names}\n```\n")
        page = folder / f"{module}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in folder.glob("*.md"):
        if page.stem not in modules:
            page.unlink()
    return modules


def _is_of_another_page(
    app: Sphinx, what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Skip what a module re-exports from another public module, and what a class has from another project.

    So every name has one page, and a class also shows what it has from bases that have none.
    """
    page = app.env.docname.rpartition("/")[2]
    home = getattr(member, "__module__", None) or getattr(getattr(member, "__objclass__", None), "__module__", None)
    if what == "module":
        return True if home != page and home in app.config.api_modules else None
    return True if home is not None and not home.startswith("batchstate") else None


def _resolve_where_exported(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Any) -> Any:
    """Link a type, which knows the inner module it stands in, to the public module that exports it."""
    if node.get("refdomain") != "py":
        return None
    home, _, name = node["reftarget"].rpartition(".")
    domain: Any = env.get_domain("py")
    for module in app.config.api_modules:
        found = domain.objects.get(f"{module}.{name}")
        if found is not None and getattr(getattr(importlib.import_module(module), name), "__module__", None) == home:
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode, name)
    if home in app.config.api_modules and name not in getattr(importlib.import_module(home), "__all__", [name]):
        return contnode  # a class that users meet in signatures only
    return None


def _hide_inner_bases(_app: Sphinx, _name: str, _obj: object, _options: object, bases: list[type]) -> None:
    """A base that has no page says nothing to a reader."""
    bases[:] = [base for base in bases if not re.match(rf"batchstate\.({INSIDE})\.", base.__module__)] or [object]


def _keep_colons(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before the first colon of a property's docstring for its type; ours mean no type."""
    if what in {"attribute", "data", "property"} and lines:
        lines[:0] = ["..", ""]  # an empty comment takes the place of the first line


def _hide_constructor(
    _app: Sphinx, what: str, _name: str, obj: Any, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """A class that users do not call shows no arguments."""
    if what != "class":
        return None
    said = f"{getattr(getattr(obj, '__init__', None), '__doc__', None) or ''} {obj.__doc__ or ''}"
    return ("", returns) if signature and re.search(r"For the library|\bMade by\b", said) else None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_config_value("api_modules", _write_api_pages(), "env")
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", _hide_constructor)
    app.connect("autodoc-process-bases", _hide_inner_bases)
    app.connect("autodoc-skip-member", _is_of_another_page)
    app.connect("missing-reference", _resolve_where_exported)
