"""Every public name in a line, for `docs/reference/api.md`: `python -m tests.api_page` writes its table anew."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/reference/api.md"
BEGIN, END = "<!-- names -->\n", "<!-- end of names -->\n"
CONSTANTS = {
    "compiled": "Whether the core is compiled; False where it runs interpreted.",
    "ENGINES": "Names of the engines that `open_engine` takes.",
    "LeaseState": "States of a lease, from granted to delivered, failed or released.",
    "TransferState": "States of a transfer, from open to done or failed.",
}
EXPORTING = ("batchstate.step", "batchstate.future_map")
"""Public modules that export names of private ones."""

PACKAGES = ("batchstate", "batchstate.watch", "batchstate.races", "batchstate.testing", "batchstate.transport")


def names_of(package: str) -> Iterator[tuple[str, str, str]]:
    """Name, page that describes it, and first sentence of its docstring, for each public name of a package."""
    imported = importlib.import_module(package)
    for name in sorted(vars(imported)["__all__"], key=str.lower):
        value = getattr(imported, name)
        page = getattr(value, "__module__", package) if package == "batchstate" else package
        if page.startswith("batchstate.runtime."):
            page = "batchstate.runtime"
        if "._" in page:
            page = next(module for module in EXPORTING if name in vars(importlib.import_module(module))["__all__"])
        text = CONSTANTS.get(name) or inspect.getdoc(value) or ""
        yield name, page, re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def table() -> str:
    """The tables of all packages, in Markdown."""
    lines: list[str] = []
    for package in PACKAGES:
        lines += [f"## `{package}`", "", "| name | meaning | page |", "| --- | --- | --- |"]
        for name, page, sentence in names_of(package):
            lines.append(f"| `{name}` | {sentence} | `{page}` |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Writes the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
