"""Draws cost against size. The same figures give the same SVG, byte for byte; matplotlib is imported only then."""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.curves import Measured, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ("#0072B2", "#003A5C")
OTHERS = ("#D55E00", "#007A5A", "#A8508B", "#8A6500", "#555555", "#B03060")
"""Told apart with each kind of colour blindness, by their markers too, and dark enough to be read as text on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SHOWN_LEVEL = "checks cheap"
"""Our ways are drawn at this level, the default; the figures have the others as well."""

WIDTH, HEIGHT = 9.0, 4.6
ROOM_FOR_LABELS = 0.63
"""Share of the width that the axes have; names of ways stand to the right of them."""
LINE_HEIGHT = 11.0
"""Points between two names."""

STYLE: Any = {  # matplotlib names a hundred keys in a type that it does not export
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "batchstate",  # otherwise the names of things in an SVG are random
    "svg.fonttype": "path",
}


class PlotsError(Exception):
    """Nothing can be drawn here."""


def require_matplotlib() -> None:
    """Asks early, since what is drawn takes minutes to measure.

    Raises:
        PlotsError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotsError("--plots needs matplotlib, which is not installed: pip install matplotlib") from None


def draw(measured: Sequence[Measured], folder: Path, machine: Mapping[str, Any]) -> list[Path]:
    """Writes a PNG and an SVG of each curve, under the curve's name, and returns the files.

    Raises:
        PlotsError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for curve in measured:
        with rc_context(STYLE):
            figure = _figure(curve, f"{machine['cpu']}, torch {machine['torch']}, {machine['date']}")
            for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                file = folder / f"{_slug(curve)}.{suffix}"
                figure.savefig(file, dpi=160, metadata=metadata)
                files.append(file)
    return files


def _slug(curve: Measured) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{curve.name} by {curve.size}".lower())


def _figure(curve: Measured, remark: str) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes((0.08, 0.13, ROOM_FOR_LABELS, 0.72))
    shown = [series for series in curve.series if not series.ours or SHOWN_LEVEL in series.way]
    colours = {True: cycle(OURS), False: cycle(OTHERS)}
    drawn = []
    for line, marker in zip(shown, cycle(MARKERS), strict=False):
        colour = next(colours[line.ours])
        x, y = [point.x for point in line.points], [point.us for point in line.points]
        axes.fill_between(
            x, [p.low for p in line.points], [p.high for p in line.points], color=colour, alpha=0.15, lw=0
        )
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=2.2 if line.ours else 1.1)
        drawn.append((line, colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({point.x for series in shown for point in series.points})
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(curve.size)
    axes.set_title(f"{curve.name[0].upper()}{curve.name[1:]}: microseconds", loc="left", fontsize=11, pad=20)
    note = f"median and quartiles, both scales logarithmic; bold: batchstate, {SHOWN_LEVEL}; {remark}"
    axes.text(0, 1.03, note, transform=axes.transAxes, color="#555555", fontsize=7.5)
    _label(figure, axes, drawn)
    return figure


def _label(figure: "Figure", axes: "Axes", drawn: Sequence[tuple[Series, str]]) -> None:
    """Names each line at its end; names that would touch move apart, in the order of the lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]  # limits are final now
    points_a_pixel = 72 / figure.dpi
    ends = sorted(drawn, key=lambda series: series[0].points[-1].us)
    wanted = [float(axes.transData.transform((1, series.points[-1].us))[1]) * points_a_pixel for series, _ in ends]
    for (series, colour), at, height in zip(ends, wanted, apart(wanted, LINE_HEIGHT), strict=True):
        last = series.points[-1]
        axes.annotate(
            series.way.removesuffix(f", {SHOWN_LEVEL}"),
            (last.x, last.us),
            (14, height - at),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8,
            fontweight="bold" if series.ours else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
            annotation_clip=False,
        )


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """Places near the wanted ones, which ascend, with at least so much between neighbours.

    Places that touch become a group around the mean of what its members want.
    """
    groups: list[list[float]] = []  # of each: the members' wanted places, as if each stood where the first does
    for i, height in enumerate(wanted):
        groups.append([height - i * least])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    firsts = [_mean(group) for group in groups for _ in group]
    return [first + i * least for i, first in enumerate(firsts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(size: int) -> str:
    for unit, name in ((1_000_000, " M"), (1_000, " k")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size:,}"
