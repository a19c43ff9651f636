"""The page of a race in a real browser: measured on a phone and on a desk, in both colour schemes.

Needs chromium or chrome. Without one these tests are skipped, unless `BATCHSTATE_BROWSER=required` is set.
"""

import html
import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchstate.races.render import race_html
from batchstate.races.render.style import DARK, LIGHT
from batchstate.races.report import EventKind, RaceReport
from tests.race_reports import EVERY, many_steps, overlapped_engine

PHONE, DESK = (390, 844), (1280, 900)
BETWEEN = [(800, 900), (1000, 900), (1200, 900)]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
SCHEMES = ["light", "dark"]
IN_THE_DARK = ["overlapped engine", "freed in use", "eight streams", "hostile"]
"""Reports that are also opened in the dark scheme, which changes colours alone."""

OPENED = [(name, "light") for name in EVERY] + [(name, "dark") for name in IN_THE_DARK]
WITH_LINES = (EventKind.OPERATION, EventKind.COPY_TO_DEVICE)
"""Kinds of events in `many_steps` whose bars have a source line."""

BARS = ["overlapped engine", "launched", "six streams"]
"""Reports that are also opened at widths in between, where names on bars have to be shortened."""

TOUCHES = 1.5
"""Pixels between an arrow and its bar, borders and rounding included."""

# Runs in copies of the pages whose policy lets it. They are frames of one page, because a window has a least width, and
# what each measured is left in that page for `--dump-dom`.
MEASURE = r"""
addEventListener('load', () => {
const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const all = (query) => [...document.querySelectorAll(query)];
const shown = (e) => e.checkVisibility() && !e.closest('.vh, .skip, .sheet:not(:popover-open)');
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
  return 'none';
};
const second = all('.bar.race')[1];
const measured = {
  width: innerWidth, scroll: document.documentElement.scrollWidth,
  page: getComputedStyle(document.body).backgroundColor,
  bars: all('.bar').map((e) => ({id: e.id, race: e.matches('.race'), box: box(e)})),
  pieces: all('.bar, .ghost, .number, .step span, .gap span, .lane').filter(shown)
    .map((e) => ({what: e.className || e.innerText, box: box(e)})),
  edges: all('.arrow').map((e) => ({
    ends: e.dataset.edge.split(' '), way: e.classList[1], missing: e.matches('.missing'), box: box(e),
    stub: box(e.firstElementChild), line: getComputedStyle(e).borderTopStyle,
    colour: getComputedStyle(e).borderTopColor,
  })),
  texts: all('body *').filter((e) => shown(e) && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => ({text: e.innerText.slice(0, 40), ink: getComputedStyle(e).color, behind: behind(e),
      size: parseFloat(getComputedStyle(e).fontSize)})),
  lines: all('.bar .at').filter(shown).map((e) => ({text: e.innerText, box: box(e), around: box(e.parentElement),
    line: box(e.closest('.line')), bar: box(e.closest('.bar'))})),
  marks: all('.bar.mark .name').map((e) => ({text: e.innerText, cut: e.scrollWidth > e.clientWidth})),
  names: all('.bar .name').map((e) => box(e)),
  boxes: all('.scroll').map((e) => ({box: box(e), overflow: getComputedStyle(e).overflowX,
    fits: e.scrollWidth <= e.clientWidth})),
  fetched: performance.getEntriesByType('resource').length,
  scripts: document.scripts.length,
};
second.focus(); second.click();
const sheet = document.getElementById(second.getAttribute('popovertarget'));
measured.sheet = {open: sheet.matches(':popover-open'), box: box(sheet), text: sheet.innerText};
measured.texts.push(...[...sheet.querySelectorAll('dt, dd, a, button, code')].map((e) => ({text: e.innerText,
  ink: getComputedStyle(e).color, behind: behind(e), size: parseFloat(getComputedStyle(e).fontSize)})));
const out = parent.document.createElement('pre');
out.id = frameElement.name;
out.textContent = JSON.stringify(measured);
parent.document.body.append(out);
});
"""

Measured = dict[tuple[str, tuple[int, int], str], dict[str, Any]]
"""Name of a report, size and colour scheme -> what its page measured."""


def found_browser() -> str:
    """The browser's program; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    if os.environ.get("BATCHSTATE_BROWSER") == "required":
        pytest.fail("no chromium, chromium-browser or google-chrome is on the path, and BATCHSTATE_BROWSER=required")
    pytest.skip("no chromium, chromium-browser or google-chrome is on the path")


def browse(folder: Path, page: str, size: tuple[int, int], scheme: str, *more: str) -> str:
    """Opens a page, and returns what the browser says."""
    file = folder / "race.html"
    file.write_text(page, encoding="utf-8")
    profile = folder / "profile"
    done = subprocess.run(
        [
            found_browser(),
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            *more,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Every report on a phone and on a desk, opened once in each colour scheme."""
    values: Measured = {}
    for scheme in SCHEMES:
        keys = [(name, size, scheme) for name, in_scheme in OPENED if in_scheme == scheme for size in (PHONE, DESK)]
        keys += [(name, size, scheme) for name in BARS for size in BETWEEN if scheme == "light"]
        frames = "".join(
            f'<iframe name="f{index}" width="{size[0]}" height="{size[1]}" style="border:0" '
            f'srcdoc="{html.escape(measuring(EVERY[name]))}"></iframe>\n'
            for index, (name, size, _) in enumerate(keys)
        )
        page = f'<!DOCTYPE html><html style="color-scheme:light dark"><body>{frames}</body></html>'
        dom = browse(tmp_path_factory.mktemp(scheme), page, DESK, scheme, "--dump-dom")
        found = dict(re.findall(r'<pre id="f(\d+)">(.*?)</pre>', dom, re.DOTALL))
        for index, key in enumerate(keys):
            values[key] = json.loads(html.unescape(found[str(index)]))
    return values


def measuring(report: RaceReport) -> str:
    """The page of a report, with a script that measures it, which its policy would not let in."""
    page = race_html(report)
    policy = page[page.index("<meta http-equiv") : page.index("<meta name=")]
    return page.replace(policy, "").replace("</body>", f"<script>{MEASURE}</script></body>")


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(...)`, by WCAG 2."""
    parts = [int(part) / 255 for part in colour[4:-1].split(", ")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> str:
    """A colour as the browser says it."""
    return f"rgb({', '.join(str(int(colour[index : index + 2], 16)) for index in (1, 3, 5))})"


def overlap(one: list[float], other: list[float], by: float = 0.5) -> bool:
    """Whether two boxes (left, top, right, bottom) share more than their borders."""
    return min(one[2], other[2]) - max(one[0], other[0]) > by and min(one[3], other[3]) - max(one[1], other[1]) > by


def arrows_touch(page: dict[str, Any]) -> None:
    """Every arrow begins at the side of one bar and ends at that of another, and crosses none on its way."""
    bars = {bar["id"]: bar["box"] for bar in page["bars"]}
    for edge in page["edges"]:
        begin, end = (bars[f"b{number}"] for number in edge["ends"])
        left, top, right, bottom = edge["box"]
        starts, near, tip = {
            "right": (left - begin[2], right, end[0] - edge["stub"][2]),
            "left": (begin[0] - right, left, edge["stub"][0] - end[2]),
            "back": (left - begin[2], right, edge["stub"][0] - end[2]),
        }[edge["way"]]
        assert abs(starts) <= TOUCHES, edge
        assert abs(tip) <= TOUCHES, edge
        assert begin[1] <= top <= begin[3], edge
        assert end[1] <= bottom <= end[3], edge
        assert right - left > 5
        assert bottom - top > 10
        legs = [left, top, right, top + 3], [near - 1.5, top, near + 1.5, bottom]
        for name, bar in bars.items():
            if name[1:] not in edge["ends"]:
                assert not any(overlap(leg, bar) for leg in legs), (edge, name)


def legible(page: dict[str, Any]) -> None:
    """The page does not scroll sideways, no two things cover each other, and every text has size and contrast."""
    assert page["scroll"] <= page["width"]
    pieces = page["pieces"]
    for index, one in enumerate(pieces):
        assert all(not overlap(one["box"], other["box"]) for other in pieces[:index]), one
    for text in page["texts"]:
        darker, lighter = sorted((luminance(text["ink"]), luminance(text["behind"])))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, text
        assert text["size"] >= 11, text
    assert all(right - left >= 20 and bottom - top >= 9 for left, top, right, bottom in page["names"])
    for box in page["boxes"]:
        assert 0 <= box["box"][0] < box["box"][2] <= page["width"]
        assert box["fits"] or box["overflow"] == "auto"


on_each = pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])


@pytest.mark.parametrize("scheme", SCHEMES)
@on_each
def test_race_is_seen_at_once(measured: Measured, size: tuple[int, int], scheme: str) -> None:
    """The two accesses are red bars, and a dashed red arrow leads from the first to the second."""
    drawn = EVERY["overlapped engine"]
    page = measured["overlapped engine", size, scheme]
    colours = LIGHT if scheme == "light" else DARK
    assert page["page"] == rgb(colours["page"])
    red = [bar for bar in page["bars"] if bar["race"]]
    assert [bar["id"] for bar in red] == [f"b{drawn.first.event}", f"b{drawn.second.event}"]
    assert all(bar["box"][2] - bar["box"][0] > 60 and bar["box"][3] - bar["box"][1] > 40 for bar in red)
    (missing,) = [edge for edge in page["edges"] if edge["missing"]]
    assert missing["ends"] == [str(drawn.first.event), str(drawn.second.event)]
    assert missing["line"] == "dashed"
    assert missing["colour"] == rgb(colours["race"])
    assert len(page["edges"]) == 4
    assert page["boxes"][0]["fits"]


@on_each
@pytest.mark.parametrize(("name", "scheme"), OPENED)
def test_any_race_is_legible(measured: Measured, name: str, size: tuple[int, int], scheme: str) -> None:
    """Arrows end at their bars and cross no other; no text is covered, pale or small; the page fits the screen.

    A chosen bar opens a sheet with its details within the screen; the only script is the one that measures.
    """
    page = measured[name, size, scheme]
    assert page["width"] == size[0]
    arrows_touch(page)
    legible(page)
    assert (page["scripts"], page["fetched"]) == (1, 0)
    sheet = page["sheet"]
    assert sheet["open"]
    left, top, right, bottom = sheet["box"]
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]
    assert "the second access of the race" in sheet["text"]
    if name == "overlapped engine":
        for wanted in ("index_put_", "/opt/batchstate/tables.py:141", "rows 3, 5"):
            assert wanted in sheet["text"]


@pytest.mark.parametrize("size", [PHONE, *BETWEEN, DESK], ids=lambda size: str(size[0]))
@pytest.mark.parametrize("name", BARS)
def test_numbers_on_bars_are_never_cut(measured: Measured, name: str, size: tuple[int, int]) -> None:
    """The numbers of fences and source lines on bars are seen whole; lanes too narrow for a source line have none."""
    page = measured[name, size, "light"]
    arrows_touch(page)
    legible(page)
    # Where a narrow lane has no room for both, the line is not there at all.
    lines = [line for line in page["lines"] if line["box"][1] < line["line"][3] - 0.5]
    assert page["lines"]
    assert lines == page["lines"] or size[0] < 1200
    for line in lines:
        assert re.fullmatch(r":\d+", line["text"])
        left, top, right, bottom = line["box"]
        for around in (line["around"], line["line"], line["bar"]):
            assert around[0] - 0.5 <= left < right <= around[2] + 0.5, line
            assert around[1] - 1.5 <= top < bottom <= around[3] + 1.5, line
    for mark in page["marks"]:
        assert re.fullmatch(r"(fence|wait( for fence)?) \d+", " ".join(mark["text"].split()))
        assert not mark["cut"], mark


def test_six_lanes_fit_on_a_page_of_1200_pixels(measured: Measured) -> None:
    """There they need no scrolling, and bars have their source lines."""
    page = measured["six streams", (1200, 900), "light"]
    assert page["boxes"][0]["fits"]
    assert len(page["lines"]) == len([event for event in many_steps(6).events if event.kind in WITH_LINES])
    assert all(right - left > 8.5 * 16 for left, _, right, _ in (bar["box"] for bar in page["bars"]))


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (DESK, "dark")], ids=["phone", "desk"])
def test_page_is_painted(tmp_path: Path, size: tuple[int, int], scheme: str) -> None:
    """The page as it is, with its policy, is painted: a screenshot has the size of the window, and is not empty."""
    shot = tmp_path / "race.png"
    browse(tmp_path, race_html(overlapped_engine()), size, scheme, f"--screenshot={shot}")
    content = shot.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == size
    assert len(content) > 30_000
