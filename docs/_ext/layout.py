"""Directives for the layout page, made from the package itself: what is drawn and listed is what is there.

{layout-picture}   the layers, their modules, and which layer imports which, as a picture
{layout-files}     every module with the first line of its docstring, by layer
{journeys}         the files that six values cross, found by running them
"""

import ast
import html
from collections.abc import Iterable, Iterator

import attrs
from docutils import nodes
from from_code import FromCode, one_line
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tests.journeys import JOURNEYS, files_of
from tests.test_layout import LAYERS, imports, layer_of, modules, part_of

WIDTH, TITLE, GUTTER = 760, 132, 120
"""Of the picture, of the names of layers at its left, and of the arrows at its right, in pixels."""
CHIP, LINE, SPACE = 22, 7.1, 6
"""Height of a module, width of a letter in it, and the space between two."""

STYLE = """
.layers { max-width: 100%; height: auto; font-size: 12px; }
.layers text { fill: currentColor; }
.layers .module { fill: none; stroke: currentColor; stroke-opacity: .55; }
.layers .private { stroke-dasharray: 3 2; stroke-opacity: .35; }
.layers .layer { fill: currentColor; fill-opacity: .05; }
.layers .import { fill: none; stroke: currentColor; stroke-opacity: .5; }
.layers .head { fill: currentColor; fill-opacity: .6; }
"""


def uses() -> dict[int, set[int]]:
    """Layer -> the layers that its modules import, without those that one of these imports anyway."""
    direct: dict[int, set[int]] = {number: set() for number in range(len(LAYERS))}
    for module in modules():
        for name in imports(module):
            if name != "batchstate":
                direct[layer_of(module)].add(layer_of(name))
    reached: dict[int, set[int]] = {}
    for number in direct:  # lower layers come first
        below = direct[number] - {number}
        reached[number] = below.union(*(reached[one] for one in below))
    return {
        number: {one for one in below - {number} if not any(one in reached[other] for other in below - {number, one})}
        for number, below in direct.items()
    }


def members(parts: Iterable[str]) -> list[str]:
    """The modules of a layer, without `batchstate.`; folders themselves are left out."""
    found = [name.removeprefix("batchstate.") for name in modules() if part_of(name) in set(parts)]
    return [name for name in found if modules_of_folder(name) == 0 and name != "batchstate"]


def modules_of_folder(name: str) -> int:
    """How many modules stand below this name."""
    return sum(other.startswith(f"batchstate.{name}.") for other in modules())


@attrs.frozen
class Band:
    """A layer in the picture: its number, top, height, and its modules with their places."""

    number: int
    top: float
    height: float
    chips: list[tuple[str, float, float, float]]


def bands() -> Iterator[Band]:
    """The layers, the highest first."""
    top = 4.0
    for number, parts in reversed(list(enumerate(LAYERS.values()))):
        chips, left, line = [], float(TITLE), top + SPACE
        for name in dict.fromkeys(".".join(name.split(".")[:2]) for name in members(parts)):
            width = len(name) * LINE + 12
            if left + width > WIDTH - GUTTER:
                left, line = float(TITLE), line + CHIP + SPACE
            chips.append((name, left, line, width))
            left += width + SPACE
        height = line + CHIP + SPACE - top
        yield Band(number, top, height, chips)
        top += height + 8


def drawn() -> str:
    """The picture as SVG."""
    rows = list(bands())
    middle = {band.number: band.top + band.height / 2 for band in rows}
    names = list(LAYERS)
    lines = []
    for band in rows:
        lines.append(
            f'<rect class="layer" x="0" y="{band.top}" width="{WIDTH - GUTTER}" height="{band.height}" rx="4"/>'
        )
        lines.append(f'<text x="8" y="{middle[band.number] + 4}" font-weight="600">{names[band.number]}</text>')
        for name, left, line, width in band.chips:
            kind = "module private" if any(part.startswith("_") for part in name.split(".")) else "module"
            lines.append(f'<rect class="{kind}" x="{left}" y="{line}" width="{width}" height="{CHIP}" rx="3"/>')
            lines.append(f'<text x="{left + 6}" y="{line + 15}">{html.escape(name)}</text>')
    right = WIDTH - GUTTER
    starts = dict.fromkeys(middle, 0)
    for upper, below in sorted(uses().items(), reverse=True):
        for lower in sorted(below, reverse=True):
            begin, end = middle[upper] + 3 * starts[upper], middle[lower]
            starts[upper] += 1
            bend = right + 10 + 8.5 * (upper - lower)
            lines.append(
                f'<path class="import" d="M{right} {begin} C{bend} {begin} {bend} {end} {right + 6} {end}">'
                f"<title>{names[upper]} imports {names[lower]}</title></path>"
            )
            lines.append(f'<path class="head" d="M{right} {end} l8 -4 v8 z"/>')
    height = rows[-1].top + rows[-1].height + 4
    return (
        f'<svg class="layers" role="img" aria-label="The layers of the package" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>'
        + "".join(lines)
        + "</svg>"
    )


class LayoutPicture(SphinxDirective):
    """`{layout-picture}`."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """The picture."""
        return [nodes.raw("", drawn(), format="html")]


class LayoutFiles(FromCode):
    """`{layout-files}`."""

    def markdown(self) -> list[str]:
        """A table for each layer, the lowest first."""
        lines = []
        for name, parts in LAYERS.items():
            lines += [f"**{name[0].upper()}{name[1:]}**", "", "| module | what it has |", "| --- | --- |"]
            for member in members(parts):
                tree = ast.parse(modules()[f"batchstate.{member}"].read_text())
                summary = one_line((ast.get_docstring(tree) or "").partition("\n\n")[0]).replace("|", r"\|")
                lines.append(f"| `{member}` | {summary} |")
            lines.append("")
        return lines


class Journeys(FromCode):
    """`{journeys}`."""

    def markdown(self) -> list[str]:
        """A line for each journey."""
        return [
            f"- {one_line(journey.__doc__)} {' → '.join(f'`{file}`' for file in files_of(journey))}"
            for journey in JOURNEYS
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("layout-picture", LayoutPicture)
    app.add_directive("layout-files", LayoutFiles)
    app.add_directive("journeys", Journeys)
    return {"parallel_read_safe": True}
