"""Text of user code on its way into a page."""

import re
from html import escape

from batchstate.testing.pictures.words import plain

_WORD = re.compile(r"\A[a-z]+(?= )")
"""A word at the start of a sentence; names of code have other characters or stand between backticks."""


def text(value: str) -> str:
    """A text, as content or in a quoted attribute."""
    return escape(plain(value), quote=True)


def sentence(value: str, *names: str) -> str:
    """A sentence, with a capital; what stands between backticks becomes code, and so do the names.

    Args:
        value: the sentence.
        names: of operations, which may be of several words, so that their ends could not be seen.
    """
    line = plain(value)
    known = sorted(filter(None, map(plain, names)), key=len, reverse=True)
    code = "|".join(rf"(?<!\w){re.escape(one)}(?!\w)" for one in known)
    if not (code and re.match(code, line)):
        line = _WORD.sub(lambda found: found[0].capitalize(), line, count=1)
    pieces = re.split(rf"(`[^`]+`{'|' + code if code else ''})", line)
    return "".join(
        f"<code>{escape(piece.strip('`'))}</code>" if place % 2 else escape(piece) for place, piece in enumerate(pieces)
    )


def name(value: str) -> str:
    """A name on a bar, which may be broken after an underscore or a dot."""
    return re.sub(r"(?<=[_.])(?=\w)", "<wbr>", text(value))


def site(value: str) -> str:
    """A source line as code, which may be broken after a slash."""
    return f"<code>{re.sub(r'(?<=/)(?=[^/])', '<wbr>', text(value))}</code>"


def terms(pairs: list[tuple[str, str]]) -> str:
    """A list of terms, each with its value as HTML; those without a value are left out."""
    return "".join(f"<dt>{text(term)}</dt><dd>{value}</dd>" for term, value in pairs if value)
