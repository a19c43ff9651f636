"""What was asked for where token lengths are out of order: the problem and the remedy, in the caller's words.

Each takes the two lengths that the law of LENGTH_ORDER compares, the shorter first, and the most a request may have.
"""


def total(committed: int, asked: int, most: int) -> tuple[str, str]:
    """Of operations that take total lengths."""
    if asked > most:
        return _too_many(asked, most)
    if asked < 0:
        return f"{asked} tokens asked for", "pass 0 or more"
    return (
        f"{asked} tokens asked for in all, and {committed} are committed",
        "lengths are totals and cannot shrink here; `truncate` takes tokens back, `advance` adds",
    )


def further(committed: int, asked: int, most: int) -> tuple[str, str]:
    """Of operations that add tokens."""
    return _too_many(asked, most)


def written(asked: int, allocated: int, most: int) -> tuple[str, str]:
    """Of commits."""
    return (
        f"{asked} tokens are to be committed, {allocated} are allocated",
        "`grow` first, or `extend`, which does both",
    )


def back(asked: int, committed: int, most: int) -> tuple[str, str]:
    """Of truncation."""
    return (
        f"truncation to {asked} tokens, of {committed} that are committed",
        "pass a total from 0 to what is committed; `extend` and `advance` add tokens",
    )


def prefix(asked: int, there: int, most: int) -> tuple[str, str]:
    """Of sharing and holding."""
    return f"a prefix of {asked} tokens asked for, {there} are committed", "commit the tokens first, or ask for fewer"


def reserved(asked: int, room: int, most: int) -> tuple[str, str]:
    """Of a place in the host tier for `asked` tokens, growing to `room`."""
    if room > most:
        return f"room for {room} tokens asked for, the host tier has {most}", "ask for less, or make the pool larger"
    return f"{asked} tokens, and room for {room}", "reserve room for the tokens that come and all that follow"


def outgrown(asked: int, room: int, most: int) -> tuple[str, str]:
    """Of a decode step in the host tier."""
    return f"{asked} tokens with the new one, {room} were reserved", "finish the request, or reserve more at admission"


def _too_many(asked: int, most: int) -> tuple[str, str]:
    return (
        f"{asked} tokens asked for, a request may have {most} (max_tokens_per_request)",
        "finish the request, or make the PagePool with a larger max_tokens_per_request",
    )
