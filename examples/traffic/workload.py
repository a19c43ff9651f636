"""Traffic like a real hour's, from a seed: nothing to download, and as many requests as you ask for."""

import csv
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.errors import ArgumentError

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of a trace file; others are ignored."""


@final
@attrs.frozen(eq=False)
class Workload:
    """Requests by arrival; row i of every array is request i.

    Attributes:
        arrival: float64[n], seconds since the first request, ascending.
        context_tokens: int64[n], tokens of the prompt, at least 1.
        generated_tokens: int64[n], tokens of the answer, at least 1.
        source: where it comes from, for reports.

    Raises:
        ArgumentError: no request, arrays of different lengths, arrivals out of order, or a count below 1.
    """

    arrival: npt.NDArray[np.float64]
    context_tokens: npt.NDArray[np.int64]
    generated_tokens: npt.NDArray[np.int64]
    source: str = attrs.field(default="given", kw_only=True)

    def __attrs_post_init__(self) -> None:
        lengths = (len(self.arrival), len(self.context_tokens), len(self.generated_tokens))
        if min(lengths) == 0 or min(lengths) != max(lengths):
            raise ArgumentError(f"a workload has arrays of {lengths} rows", lengths, "give each one row a request")
        if not (np.diff(self.arrival) >= 0).all():
            raise ArgumentError("arrivals are out of order", remedy="sort the requests by arrival")
        for name in ("context_tokens", "generated_tokens"):
            fewest = int(getattr(self, name).min())
            if fewest < 1:
                raise ArgumentError(f"{name} has a {fewest}", fewest, "leave out empty requests")

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def total_generated(self) -> int:
        """Tokens of all answers together."""
        return int(self.generated_tokens.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return int((self.context_tokens + self.generated_tokens).max())

    def first(self, num_requests: int) -> "Workload":
        """The requests that arrive first; all of them when there are fewer."""
        if num_requests < 1:
            raise ArgumentError(f"{num_requests} requests", num_requests, "ask for at least 1")
        n = num_requests
        return Workload(self.arrival[:n], self.context_tokens[:n], self.generated_tokens[:n], source=self.source)


def read_trace(path: str | Path) -> Workload:
    """Reads a production trace: CSV with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.

    Timestamps are ISO 8601 (`2023-11-16 18:15:46.6805900`), without a zone taken as UTC; rows may come in any order.

    Raises:
        ArgumentError: a column is missing, a value is malformed, or the file has no rows; names the line and the value.
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        rows = sorted(_trace_rows(path))
    except csv.Error as error:
        problem = f"{path} is not a CSV file: {error}"
        raise ArgumentError(problem, remedy="give a text file with commas between columns") from None
    if not rows:
        raise ArgumentError(f"{path} has no requests", remedy="give a trace with at least one row after the header")
    arrival = np.array([(row[0] - rows[0][0]).total_seconds() for row in rows])
    lengths = np.array([row[1:] for row in rows], np.int64)
    return Workload(arrival, lengths[:, 0].copy(), lengths[:, 1].copy(), source=path.name)


def _trace_rows(path: Path) -> Iterator[tuple[datetime.datetime, int, int]]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file)
        header = tuple(reader.fieldnames or ())
        missing = [column for column in TRACE_COLUMNS if column not in header]
        if missing:
            problem = f"{path} has no column {', '.join(missing)}"
            remedy = f"the first line names the columns: {','.join(TRACE_COLUMNS)}"
            raise ArgumentError(problem, ",".join(header), remedy)
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            time, *counts = (row[column] for column in TRACE_COLUMNS)
            context, generated = map(_count, counts, TRACE_COLUMNS[1:], (where, where))
            yield _timestamp(time, where), context, generated


def _timestamp(text: str | None, where: str) -> datetime.datetime:
    try:
        time = datetime.datetime.fromisoformat(text or "")
    except ValueError:
        remedy = "write the time as 2023-11-16 18:15:46.680590"
        raise ArgumentError(f"{where}: TIMESTAMP is {text!r}", text, remedy) from None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _count(text: str | None, column: str, where: str) -> int:
    # Not `int(text)` alone: it takes " 1_0 ", and tens of digits that no int64 holds.
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise ArgumentError(f"{where}: {column} is {text!r}", text, "expected a whole number from 1 to 999999999")
    return int(text)


HOUR_REQUESTS = 19_366
"""Requests of the hour that the generator is fitted to."""

HOUR_SECONDS = 3_501.7
"""Seconds between its first request and its last."""

_SHARES = np.array([0, 1, 5, 10, 20, 30, 40, 45, 50, 60, 70, 80, 90, 95, 99, 99.9, 100]) / 100
_CONTEXT = np.array([2, 29, 181, 207, 387, 403, 703, 984, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050])
_LONG_ANSWER = np.array([26, 45, 88, 373, 386, 394, 397, 400, 404, 412, 420, 431, 482, 550, 654, 992, 1000])
_SHORT_ANSWER = np.array([7, 14, 35, 47, 64, 79, 88, 92, 95, 105, 122, 149, 183, 217, 404, 656, 1000])
_LONG_ANSWER_CONTEXTS = (930, 1300)

_FIVE_MINUTES = np.array([1445, 1422, 1557, 1561, 1884, 2239, 2229, 1839, 1701, 1424, 1297, 768])
_FIVE_MINUTE_MARKS = np.minimum(np.arange(13) * 300.0, HOUR_SECONDS)


def fitted_workload(num_requests: int = HOUR_REQUESTS, seed: int = 0) -> Workload:
    """Draws requests that look like one hour of a conversation service.

    Fitted to `AzureLLMInferenceTrace_conv`, 2023-11-16, of the Azure public dataset (CC-BY), described in Patel et al.,
    "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024: 19,366 requests, prompts of 1,020
    tokens in the median and 14,050 at most, answers of 129 in the median, 1,000 at most and 211 on average.

    - Prompt lengths are drawn from a table of 17 quantiles of the hour, linear between them.
    - Answer lengths likewise, from one of two tables. Prompts of 930 to 1,300 tokens (35 % of the hour) get long
      answers, around 400 tokens; all others short ones, around 95. These two bounds split the logarithms of the answer
      lengths best. Two tables are needed: within a prompt's band the lengths are nearly independent, overall not.
    - Arrivals are a Poisson process whose rate changes every five minutes as the hour's did. Fewer requests than the
      hour's take proportionally less time, so the load on the engine is the same.

    Raises:
        ArgumentError: fewer than one request, or a negative seed.
    """
    if num_requests < 1 or seed < 0:
        problem, remedy = f"{num_requests} requests with seed {seed}", "ask for at least 1, with a seed of 0 or more"
        raise ArgumentError(problem, (num_requests, seed), remedy)
    rng = np.random.default_rng(seed)
    arrived = np.concatenate([[0], np.cumsum(_FIVE_MINUTES)]) / _FIVE_MINUTES.sum()
    arrival = np.interp(np.sort(rng.random(num_requests)), arrived, _FIVE_MINUTE_MARKS)
    arrival *= num_requests / HOUR_REQUESTS
    context = _draw(rng, _CONTEXT, num_requests)
    lowest, highest = _LONG_ANSWER_CONTEXTS
    long_answer = (lowest <= context) & (context <= highest)
    generated = np.where(long_answer, _draw(rng, _LONG_ANSWER, num_requests), _draw(rng, _SHORT_ANSWER, num_requests))
    return Workload(arrival - arrival[0], context, generated, source=f"a fitted hour, seed {seed}")


def _draw(rng: np.random.Generator, quantiles: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    return np.rint(np.interp(rng.random(count), _SHARES, quantiles)).astype(np.int64)
