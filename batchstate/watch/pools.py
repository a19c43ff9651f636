"""Watching pools of pages and slots, and staging buffers, that others wrote."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import ArgumentError
from batchstate.watch.declaration import CallSite, report_stale
from batchstate.watch.hooks import Around, Hook, Hooked, OnViolation, hooks_of
from batchstate.watch.paths import Get, Name, getter, label_of
from batchstate.watch.snapshots import Snapshot, rows_of

__tracebackhide__ = True  # so that pytest shows the engine's frames

__all__ = ["WatchedPool", "watch_copy", "watch_pages", "watch_slots"]

Ints: TypeAlias = npt.NDArray[np.int64]
Question: TypeAlias = Callable[[Any, CallSite, Sequence[Any]], None]
"""Checks an object, with the arguments of the call."""

_LOST = "an exit of a request (finish, abort, retraction, error) did not give its {} back"


@final
class WatchedPool(Hooked):
    """A watched pool, or its manager, until `stop` or the end of a `with` block."""

    def __init__(
        self, cls: type, question: Question, watch: str, on_violation: OnViolation, every: int, idle: Question
    ) -> None:
        super().__init__(cls.__name__, on_violation, every)
        self.cls = cls
        self._question, self._idle = question, idle
        self._watch = watch

    def __repr__(self) -> str:
        return f"WatchedPool({self._watch} of {self.name}, {self.counters.calls} calls)"

    def check(self, pool: object, operation: str = "check") -> None:
        """Checks everything of one object now."""
        self.ask(operation, self._question, pool, CallSite(self.name, operation, None, self.report), ())

    def expect_idle(self, pool: object) -> None:
        """Checks that no page is held but those that are cached: for the end of a run, or of a test."""
        self.ask("expect_idle", self._idle, pool, CallSite(self.name, "expect_idle", None, self.report), ())

    def around(self, name: str) -> Around:
        """The function that runs instead of a method."""
        ended = f"after {name}"

        def run(
            step: int, due: bool, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            subject = next((value for value in (*args, *kwargs.values()) if isinstance(value, self.cls)), None)
            if subject is None or self.enter(subject) is None:
                return function(*args, **kwargs)
            try:
                result = function(*args, **kwargs)
                site = CallSite(self.name, ended, step, self.report, self.every > 1)
                self.ask(ended, self._question, subject, site, args[1:])
                return result
            finally:
                self.leave(subject)

        return run


def _ints(values: Any) -> Ints:
    if not hasattr(values, "shape"):
        values = list(() if values is None else values)
    return np.asarray(Snapshot.of(values).values).astype(np.int64).reshape(-1)


def _size_of(size: Name | int | None) -> Get | None:
    return (lambda _: size) if isinstance(size, int) else None if size is None else getter(size)


def _install(
    cls: type,
    after: Collection[Hook],
    question: Question,
    watch: str,
    on_violation: OnViolation,
    every: int,
    idle: Question | None = None,
) -> WatchedPool:
    hooks = hooks_of(cls.__name__, cls, after, "after")
    if not hooks:
        raise ArgumentError(f"{watch} of {cls.__name__}: no method is named", None, "name them in `after`")
    watched = WatchedPool(cls, question, watch, on_violation, every, idle or question)
    watched.install(cls, {hook: watched.around(hook[1]) for hook in hooks})
    return watched


def watch_pages(
    cls: type,
    *,
    after: Collection[Hook],
    holders: Callable[[Any], Iterable[Any]],
    free: Name,
    references: Callable[[Any], Mapping[int, int]] | None = None,
    cached: Name | None = None,
    num_pages: Name | int | None = None,
    lengths: Name | None = None,
    page_size: Name | int = 1,
    keys: Callable[[Any], Mapping[int, Any]] | None = None,
    index: Callable[[Any], Mapping[Any, int]] | None = None,
    counters: Mapping[Name, Get] | None = None,
    on_violation: OnViolation = "raise",
    every: int = 1,
) -> WatchedPool:
    """Checks who holds which page, against the free list and the reference counts, round methods of a class.

    Args:
        cls: the owner of the pages: a cache, an allocator, a block manager.
        after: methods after which they are counted.
        holders: the pages of each holder: of each request, and of each other part that keeps pages, as a radix tree.
        free: the pages that can be handed out.
        references: page -> how many holders are recorded. A held page that it lacks has one. Without it, a page may
            have any number of holders.
        cached: pages that nobody holds and that are kept for their content.
        num_pages: how many pages there are in all. With it, a page that is nowhere is a leak.
        lengths: the tokens of the first holders, in the order of `holders`: their pages have to cover them.
        page_size: tokens of a page.
        keys: page -> the key of its content. A page in `free` that is not in `cached` too has none.
        index: key -> page, as a prefix is looked up; the page's key has to be this, and each key has to be in it.
        counters: name -> a function that counts anew what the name, a path or a function, says.
        on_violation: as for `watch`.
        every: as for `watch`.
    """
    read_free, read_cached = getter(free), None if cached is None else getter(cached)
    size, tokens_of_page = _size_of(num_pages), _size_of(page_size)
    read_lengths = None if lengths is None else getter(lengths)
    counted_anew = [(label_of(name), getter(name), count) for name, count in (counters or {}).items()]

    def content(pool: Any, site: CallSite, free_pages: Ints) -> None:
        keyed = {} if keys is None else dict(keys(pool))
        for page in free_pages.tolist():
            if page in keyed:
                remedy = f"take the key of a page away in {site.method} when it is freed"
                report_stale(site, "keys", f"page {page} is free and has a key", "no key", keyed[page], remedy)
                break
        if index is None:
            return
        listed = dict(index(pool))
        remedy = f"the index and the pages change together: look in {site.suspects}"
        for key, page in listed.items():
            if keyed.get(page, key) != key or (keys is not None and page not in keyed):
                problem = f"the index finds page {page} by a key that it has not"
                report_stale(site, "index", problem, key, keyed.get(page), remedy)
                return
        for page, key in keyed.items():
            if listed.get(key, page) != page or key not in listed:
                problem = f"the key of page {page} is not in the index, or finds another page"
                report_stale(site, "index", problem, page, listed.get(key), remedy)
                return

    def question(pool: Any, site: CallSite, _: Sequence[Any]) -> None:
        lists = [_ints(pages) for pages in holders(pool)]
        used = np.concatenate(lists) if lists else np.empty(0, np.int64)
        freed = _ints(read_free(pool))
        kept = _ints(read_cached(pool)) if read_cached is not None else np.empty(0, np.int64)
        pages, where = np.unique(np.concatenate([used, freed, kept]), return_inverse=True)
        at_used, at_free, at_kept = np.split(where.reshape(-1), [len(used), len(used) + len(freed)])
        holding = np.bincount(at_used, minlength=len(pages))
        listed = np.bincount(at_free, minlength=len(pages))
        recorded = holding.copy()
        if references is not None:
            counts = references(pool)
            expected = np.array([counts.get(page, 1) for page in pages.tolist()], dtype=np.int64)
            recorded = np.where(holding > 0, expected, 0)
        recorded[listed > 0] = -1
        recorded[at_kept] = 0
        remedy = f"look at what {site.suspects} frees, shares or takes: a page goes to the free list when its "
        remedy += "last holder has let go, once"
        site.ask(invariants.page_owner, holding - listed, recorded, pages=pages, column="pages", remedy=remedy)
        if read_lengths is not None and tokens_of_page is not None:
            held, per_page = [len(pages) for pages in lists], int(tokens_of_page(pool))
            for row, (tokens, number) in enumerate(zip(read_lengths(pool), held, strict=False)):
                if number * per_page < tokens:
                    short = f"holder {row} has {number} pages for {tokens} tokens"
                    remedy = f"let {site.suspects} take pages before tokens are written"
                    report_stale(site, "lengths", short, -(-int(tokens) // per_page), number, remedy)
                    break
        content(pool, site, np.setdiff1d(freed, kept))
        for name, get, count in counted_anew:
            if (actual := get(pool)) != (expected := count(pool)):
                remedy = f"{name!r} is kept beside what it counts: look in {site.suspects}"
                report_stale(site, name, f"{name!r} is not what is counted", expected, actual, remedy)
        if size is not None:
            total = int(size(pool))
            lost, problem = total - len(pages), None
            if lost < 0:
                problem = f"there are {-lost} more pages than `num_pages`, {total}"
            if lost > 0:
                gone = np.setdiff1d(np.arange(total), pages)
                named = f": {gone[:8].tolist()}" if len(gone) == lost else ""  # unless they begin at 1
                problem = f"{lost} of {total} pages are neither free nor cached nor held{named}"
            counted = int((listed > 0).sum()), len(np.unique(kept)), int(((holding > 0) & (listed == 0)).sum()), total
            remedy = _LOST.format("pages") + "; or `holders` leaves one out, as in the middle of a step"
            site.ask(invariants.slot_conservation, *counted, problem=problem, column="pages", remedy=remedy)

    def idle(pool: Any, site: CallSite, _: Sequence[Any]) -> None:
        kept = _ints(read_cached(pool)) if read_cached is not None else np.empty(0, np.int64)
        held = [np.setdiff1d(_ints(pages), kept) for pages in holders(pool)]
        still = np.unique(np.concatenate(held)) if held else kept[:0]
        problem = f"{len(still)} pages are held while no request runs: {still[:8].tolist()}" if len(still) else None
        counted = 0, 0, len(still), 0
        site.ask(invariants.slot_conservation, *counted, problem=problem, column="pages", remedy=_LOST.format("pages"))

    return _install(cls, after, question, "watch_pages", on_violation, every, idle)


def watch_slots(
    cls: type,
    *,
    after: Collection[Hook],
    live: Name,
    free: Name,
    size: Name | int | None = None,
    zero: bool = False,
    on_violation: OnViolation = "raise",
    every: int = 1,
) -> WatchedPool:
    """Checks that each slot is free or has one request, round methods of a class.

    Args:
        cls: the owner of the slots, or of the requests.
        after: methods after which they are counted.
        live: the slots of all requests.
        free: the slots that can be handed out.
        size: how many there are in all. With it, a slot that is nowhere is a leak.
        zero: whether slot 0 may have a request; in most engines it is padding.
        on_violation: as for `watch`.
        every: as for `watch`.
    """
    read_live, read_free, read_size = getter(live), getter(free), _size_of(size)

    def question(pool: Any, site: CallSite, _: Sequence[Any]) -> None:
        used, freed = _ints(read_live(pool)), _ints(read_free(pool))
        if not zero:
            remedy = "slot 0 is padding: padded rows write it; say `zero=True` if it is not so here"
            site.ask(invariants.slot_zero_allocated, np.concatenate([used, freed]), column="slots", remedy=remedy)
        remedy = f"two requests write one row: look in {site.suspects}"
        site.ask(invariants.slot_shared, used + 1, column="slots", remedy=remedy)
        remedy = f"a slot in the free list still has a request, or stands there twice: look in {site.suspects}"
        site.ask(invariants.slot_double_free, freed, ~np.isin(freed, used), column="slots", remedy=remedy)
        if read_size is not None:
            counted = len(freed), 0, len(used), int(read_size(pool))
            remedy = _LOST.format("slot") + "; or `live` leaves a request out, as in the middle of a step"
            site.ask(invariants.slot_conservation, *counted, column="slots", remedy=remedy)

    return _install(cls, after, question, "watch_slots", on_violation, every)


def watch_copy(
    cls: type, method: str, *, host: Name, device: Name, on_violation: OnViolation = "raise", every: int = 1
) -> WatchedPool:
    """Checks at `full` that a staging buffer's copy to the device brought what the host side holds.

    Args:
        cls: the buffer.
        method: copies; its first argument, if it is a number, says how many rows.
        host: the side that is copied.
        device: where it goes.
        on_violation: as for `watch`.
        every: as for `watch`.
    """
    read_host, read_device = getter(host), getter(device)

    def question(buffer: Any, site: CallSite, args: Sequence[Any]) -> None:
        if not levels.full:
            return
        source, target = read_host(buffer), read_device(buffer)
        n = args[0] if args and isinstance(args[0], int) else rows_of(source)
        sides = Snapshot.of(source, n).values, Snapshot.of(target, n).values
        remedy = "the host side was written while its copy was under way, or fewer rows were copied than are used"
        site.ask(invariants.mirror_equal, *sides, column=f"{label_of(host)} / {label_of(device)}", remedy=remedy)

    return _install(cls, [method], question, "watch_copy", on_violation, every)
