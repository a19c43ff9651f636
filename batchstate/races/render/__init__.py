"""The page of a race for a browser, drawn from a `RaceReport` that was kept in a file. Needs no torch."""

from batchstate.races.render.html import race_html

__all__ = ["race_html"]
