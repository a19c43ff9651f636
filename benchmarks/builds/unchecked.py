"""The package once more in the same process, under another name: with its checks deleted, or as it is.

What a check costs that is off is what separates the package at `off` from a build that never had it. That build is
made here, from the sources, by `deleted_checks`. The copy as it is shows how far two equal builds differ, which is the
error of such a measurement.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, final

import batchstate
from benchmarks.builds.deleted_checks import Sources, without_checks

PACKAGES = {"batchstate": Path(batchstate.__file__).parent, "benchmarks": Path(__file__).parents[1]}
"""Packages that a copy has: ours, and what measures it."""

_MODULE = re.compile(rf"({'|'.join(PACKAGES)})((?:\.\w+)*)")
_COPY = "_<copy>"
"""Stands in compiled modules where a copy has its suffix: a file is compiled once for all copies."""


@final
class Build:
    """A copy of `PACKAGES`; nothing in it refers to the packages themselves, and nothing of it is written to a disk.

    Args:
        suffix: of the names of its packages: `batchstate` becomes `batchstate_<suffix>`.
        checked: whether it has the checks.
    """

    def __init__(self, suffix: str, *, checked: bool) -> None:
        self.suffix = suffix
        self._checked = checked
        sys.meta_path.insert(0, _Finder(self))  # before the finder that would find the files as they are

    def module(self, name: str) -> ModuleType:
        """The copy of the module that is called so in the package itself."""
        return importlib.import_module(self.renamed(name))

    def renamed(self, name: str) -> str:
        """The name of a module in this copy, if it is one of `PACKAGES`; otherwise the name as it is."""
        return _renamed(name).replace(_COPY, f"_{self.suffix}")

    def original(self, name: str) -> str | None:
        """The name of a module of this copy in the package itself, or None for modules of others."""
        root, dot, rest = name.partition(".")
        package = root.removesuffix(f"_{self.suffix}")
        return package + dot + rest if package != root and package in PACKAGES else None

    def code(self, file: Path) -> CodeType:
        """What the file says in this copy."""
        code = None if self._checked else _deleted().get(file)
        copied: CodeType = self._named(code or _as_it_is(file))
        return copied

    def _named(self, constant: Any) -> Any:
        """A constant of compiled code, with the suffix of this copy."""
        match constant:
            case str():
                return constant.replace(_COPY, f"_{self.suffix}")
            case tuple() | frozenset():
                return type(constant)(map(self._named, constant))
            case CodeType():
                names, constants = self._named(constant.co_names), self._named(constant.co_consts)
                return constant.replace(co_names=names, co_consts=constants)
        return constant


def _renamed(name: str) -> str:
    """The name of a module in any copy."""
    return _MODULE.sub(rf"\1{_COPY}\2", name) if _MODULE.fullmatch(name) else name


def _compiled(file: Path, tree: ast.Module) -> CodeType:
    renamed = _Renamer().visit(tree)
    return compile(ast.fix_missing_locations(renamed), str(file), "exec", dont_inherit=True)


@functools.cache
def _as_it_is(file: Path) -> CodeType:
    return _compiled(file, ast.parse(file.read_bytes(), str(file)))


@functools.cache
def stripped() -> Sources:
    """The modules of the package without their checks."""
    return without_checks(PACKAGES["batchstate"])


@functools.cache
def _deleted() -> dict[Path, CodeType]:
    return {file: _compiled(file, tree) for file, tree in stripped().items()}


@functools.cache
def unchecked_build(number: int = 0) -> Build:
    """The package with its checks deleted. Its level of checks changes nothing but what `current_checks` says.

    Args:
        number: another import for each. Where in memory its code and its dicts lie moves a step by some per cent.
    """
    return Build(f"unchecked{number or ''}", checked=False)


@functools.cache
def second_build(number: int = 0) -> Build:
    """The package as it is, imported once more; see `unchecked_build`."""
    return Build(f"second{number or ''}", checked=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, build: Build) -> None:
        self._build = build

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = self._build.original(fullname)
        if name is None:
            return None
        package, *inner = name.split(".")
        place = PACKAGES[package].joinpath(*inner)
        file, folder = (place / "__init__.py", [str(place)]) if place.is_dir() else (place.with_suffix(".py"), None)
        if not file.is_file():
            return None
        loader = _Loader(fullname, file, self._build)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, file: Path, build: Build) -> None:
        super().__init__(fullname, str(file))
        self._file, self._build = file, build

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: the cache of byte code belongs to the sources as they are."""
        return self._build.code(self._file)


class _Renamer(ast.NodeTransformer):
    """Lets each import of the packages, and each name of a module in a string, mean the copy."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            renamed = _renamed(alias.name)
            if renamed != alias.name and alias.asname is None:
                if "." in alias.name:
                    raise ImportError(f"line {node.lineno}: write 'from ... import', or 'import {alias.name} as ...'")
                alias.asname = alias.name
            alias.name = renamed
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module is not None and not node.level:
            node.module = _renamed(node.module)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and "." in node.value:
            node.value = _renamed(node.value)
        return node
