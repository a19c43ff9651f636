"""Pictures of a race: a page for a browser, text for a terminal, and a trace for a trace viewer.

All draw a `RaceReport` that was kept in a file; none needs torch.
"""

from batchstate.races.render.chrome import race_trace
from batchstate.races.render.html import race_html
from batchstate.races.render.text import race_text

__all__ = ["race_html", "race_text", "race_trace"]
