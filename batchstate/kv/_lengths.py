"""Problem and remedy in reports of token lengths that are out of order."""

from collections.abc import Callable

Explain = Callable[[int, int, int], tuple[str, str]]
"""Problem and remedy of the two lengths that LENGTH_ORDER compares, the shorter first, and the most there may be."""


def explained(problem: str, remedy: str) -> Explain:
    """Both, with the three numbers put into the problem as {0}, {1} and {2}."""
    return lambda shorter, longer, most: (problem.format(shorter, longer, most), remedy)


UNCOMMITTED = explained("{0} tokens are to be committed, {1} are allocated", "`grow` first, or use `extend`")
SHORT_PREFIX = explained("a prefix of {0} tokens asked for, {1} are committed", "commit them first, or ask for fewer")
GUESSED = explained(
    "a prefix of {0} tokens asked for, {1} are accepted",
    "`accept` those that verification has accepted; what lies behind may be a rejected guess",
)
ACCEPTED = explained(
    "a write from token {1} on, of {0} that are accepted: others may read them",
    "write behind them, or `truncate` to what stays",
)
TRUNCATED = explained("truncation to {0} tokens, of {1} that are committed", "pass 0 to what is committed")
BEYOND = explained(
    "position {0} is to be the first, of {1} tokens", "pass 0 to as many as stay committed, or `release`"
)
BEHIND_THE_FRONT = explained(
    "truncation to {1} tokens, and the pages of the first {0} were given back", "`release` the pages, and begin anew"
)
AHEAD = explained("{0} tokens count as written or accepted, of {1} that are committed", "report it")
_TOO_LONG = explained(
    "{1} tokens asked for, a request may have {2} (max_tokens_per_request)",
    "finish the request, or make the PagePool with a larger max_tokens_per_request",
)
_NEGATIVE = explained("{1} tokens asked for", "pass 0 or more")
_SHRUNK = explained(
    "{1} tokens asked for in all, and {0} are committed",
    "lengths are totals and cannot shrink here; `truncate` takes tokens back, `advance` adds",
)


def explain_total(committed: int, asked: int, most: int) -> tuple[str, str]:
    """For a length that is a total."""
    explain = _TOO_LONG if asked > most else _NEGATIVE if asked < 0 else _SHRUNK
    return explain(committed, asked, most)
