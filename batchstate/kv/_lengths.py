"""What an operation says where token lengths are out of order: the problem and the remedy.

Each takes the two lengths that LENGTH_ORDER compares, the shorter first, and the most a request may have.
"""

from collections.abc import Callable

Explain = Callable[[int, int, int], tuple[str, str]]


def further(committed: int, asked: int, most: int) -> tuple[str, str]:
    return (
        f"{asked} tokens asked for, a request may have {most} (max_tokens_per_request)",
        "finish the request, or make the PagePool with a larger max_tokens_per_request",
    )


def totals(committed: int, asked: int, most: int) -> tuple[str, str]:
    if asked > most:
        return further(committed, asked, most)
    if asked < 0:
        return f"{asked} tokens asked for", "pass 0 or more"
    return (
        f"{asked} tokens asked for in all, and {committed} are committed",
        "lengths are totals and cannot shrink here; `truncate` takes tokens back, `advance` adds",
    )


def uncommitted(asked: int, allocated: int, most: int) -> tuple[str, str]:
    return (
        f"{asked} tokens are to be committed, {allocated} are allocated",
        "`grow` first, or `extend`, which does both",
    )


def truncated(asked: int, committed: int, most: int) -> tuple[str, str]:
    return (
        f"truncation to {asked} tokens, of {committed} that are committed",
        "pass a total from 0 to what is committed; `extend` and `advance` add tokens",
    )


def beyond(asked: int, there: int, most: int) -> tuple[str, str]:
    return (
        f"position {asked} is to be the first, of {there} tokens",
        "pass 0 to as many as stay committed; to give everything back, `release` the pages",
    )


def behind_the_front(first: int, asked: int, most: int) -> tuple[str, str]:
    return (
        f"truncation to {asked} tokens, and the pages of the first {first} were given back",
        "`release` the pages of the request, and let it begin anew",
    )


def overwritten(written: int, committed: int, most: int) -> tuple[str, str]:
    return (
        f"{written} tokens count as written, of {committed} that are committed",
        "report it: what is given back is to be written anew",
    )


def short_prefix(asked: int, there: int, most: int) -> tuple[str, str]:
    return f"a prefix of {asked} tokens asked for, {there} are committed", "commit the tokens first, or ask for fewer"
