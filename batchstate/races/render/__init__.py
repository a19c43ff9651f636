"""The page of a race, or of a run, for a browser, drawn from reports that were kept in a file. Needs no torch."""

from batchstate.races.render.html import race_html, run_html

__all__ = ["race_html", "run_html"]
