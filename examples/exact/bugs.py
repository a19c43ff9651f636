"""State bugs that are planted in engines: diffs of ours, and code of our own around functions of others.

A bug notes what it disturbs where it can say so, and the words of the verifier are held against that.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module, resources
from typing import Any, final

import attrs

from batchstate.testing.exact import WrongRead
from tests.selfcheck.mutants.diffs import Diff, changes
from tests.selfcheck.mutants.registry import Patch, Switch

DISTURBED: set[tuple[int | None, int | None]] = set()
"""Pairs of a request and a page that a bug has disturbed by now; None where it cannot say."""
_OF_PEERS = ("transformers", "nano_vllm", "mini_sglang")


def disturb(requests: Iterable[int] | None = None, pages: Iterable[Any] | None = None) -> None:
    """Notes that these requests are pointed at these pages; None for any."""
    numbers = [None] if pages is None else [int(page) for page in pages]
    for request in [None] if requests is None else requests:
        DISTURBED.update((request, page) for page in numbers)


def is_true(report: WrongRead) -> bool | None:
    """Whether the request and the page that a report names are disturbed ones; None where the bug has not said any."""
    if not DISTURBED:
        return None
    return any(
        request in (None, report.request) and page in (None, report.page) for request, page in DISTURBED
    )  # fmt: skip


@final
@attrs.frozen
class Bug:
    """A bug of an engine.

    Attributes:
        name: of it.
        engine: the adapter that plays.
        kind: of state that goes wrong.
        sentence: what goes wrong.
        switch: changes the functions.
        choices: settings of the engine in which it can act, in place of all.
    """

    name: str
    engine: str
    kind: str
    sentence: str
    switch: Switch
    choices: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """A window in which the engine has it, and nothing is noted yet."""
        DISTURBED.clear()
        with contextlib.ExitStack() as undo:
            self.switch(Patch(undo))
            yield


_BUGS: list[Bug] = []


def bug(engine: str, kind: str, **choices: Sequence[Any]) -> Callable[[Switch], Switch]:
    """Lists the function below as a bug, whose name it has and whose sentence is its docstring."""

    def listed(switch: Switch) -> Switch:
        sentence = " ".join((switch.__doc__ or "").split())
        _BUGS.append(Bug(switch.__name__, engine, kind, sentence, switch, choices))
        return switch

    return listed


def around(patch: Patch, where: str) -> Callable[[Callable[..., Any]], None]:
    """Puts the function below around `module:name` or `module:class.name`; it gets the original first."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for attribute in owners:
        owner = getattr(owner, attribute)

    def put(function: Callable[..., Any]) -> None:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        original = patch(owner, name, replacement)

    return put


def bugs() -> list[Bug]:
    """All of them."""
    if not _BUGS:
        for name in _OF_PEERS:
            import_module(f"examples.exact.bugs_of_{name}")
        text = resources.files(__package__).joinpath("planted.diffs").read_text(encoding="utf-8")
        for paragraph in text.strip().split("\n\n"):
            if paragraph.startswith("["):
                head, sentence, *lines = paragraph.split("\n")
                name, _, rest = head.removeprefix("[").partition("] ")
                engine, _, kind = rest.partition(" | ")
                _BUGS.append(Bug(name, engine, kind, sentence, Diff(tuple(changes(lines, "planted.diffs")))))
    return _BUGS
