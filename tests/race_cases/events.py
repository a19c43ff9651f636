"""Fences and events: which recording a wait is for, who waits, and what the host knows."""

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime, new_event
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, given, index, result_and_fence, table, use


@pair(RaceKind.READ_AFTER_WRITE, "left: add_", "right: clone", "all 8 rows")
def event_recorded_again(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An event is waited for, recorded again behind another write, and the memory is read.

    Racy: the wait came before the second recording, so it is for the first.
    Safe: the reader waits once more, for the second recording.
    """
    numbers = table(rt)
    event = new_event(rt)
    with rt.use(left):
        numbers.fill_(7)
        event.record()
    event.wait(right)
    with rt.use(left):
        numbers.add_(1)
        event.record()
    with rt.use(right):
        if not racy:
            event.wait()
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def event_recorded_too_early(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An event that a reader waits for.

    Racy: it is recorded before the kernel, and says nothing of it.
    Safe: it is recorded behind the kernel.
    """
    numbers = table(rt)
    event = new_event(rt)
    with rt.use(left):
        if racy:
            event.record()
        numbers.fill_(7)
        if not racy:
            event.record()
    with rt.use(right):
        event.wait()
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def event_recorded_on_the_wrong_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An event is recorded outside of the window in which the kernel was launched.

    Racy: it is recorded on the reader's own stream, where it waits for nothing.
    Safe: it is recorded on the writer's stream.
    """
    numbers = table(rt)
    event = new_event(rt)
    with rt.use(left):
        numbers.fill_(7)
    with rt.use(right):
        event.record(right if racy else left)
        event.wait()
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def fence_waited_on_the_wrong_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Of three streams, one waits for the writer, and one reads.

    Racy: another stream waits, and the reader does not.
    Safe: the reader waits.
    """
    middle = rt.stream("middle")
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(7))
    rt.wait(written, stream=middle if racy else right)
    with rt.use(right):
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "all 8 rows")
def wait_behind_the_launch(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A writer waits for a reader.

    Racy: the wait stands behind the launch that it should protect.
    Safe: the wait stands before the launch.
    """
    numbers = table(rt)
    copy, read = result_and_fence(rt, left, lambda: numbers.clone())
    with use(rt, right, behind=None if racy else read):
        numbers.fill_(7)
        if racy:
            rt.wait(read)
    return [copy]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "rows 0-3")
def one_event_for_two_publishers(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams publish rows of a table, and a third gathers all of them.

    Racy: both record one event, and the wait is for the later recording alone.
    Safe: each records an event of its own, and the reader waits for both.
    """
    middle = rt.stream("middle")
    numbers = table(rt)
    event = new_event(rt)
    other = event if racy else new_event(rt)
    with rt.use(left):
        numbers[:4].fill_(7)
        event.record()
    with rt.use(middle):
        numbers[4:].fill_(8)
        other.record()
    with rt.use(right):
        event.wait()
        other.wait()
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: fill_", "right: fill_", "all 8 rows")
def the_host_waits(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """No stream waits for the other; the host may.

    Racy: the host launches the second without waiting.
    Safe: the host waits for the fence, and launches then.
    """
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(7))
    if not racy:
        written.wait()
    with rt.use(right):
        numbers.fill_(8)
    return [numbers]


@pair(RaceKind.READ_AFTER_WRITE, "left: add_", "right: clone", "all 8 rows")
def the_host_waits_for_an_older_fence(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream writes twice, the host waits, another stream reads.

    Racy: the host waits for a fence between the two writes.
    Safe: the host waits for a fence behind both.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.fill_(7)
        fence = rt.record()
        numbers.add_(1)
        if not racy:
            fence = rt.record()
    fence.wait()
    with rt.use(right):
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def the_host_asks(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The host asks an event whether it is complete, and launches a reader on another stream.

    Racy: the host asks once, and goes on whatever the answer is.
    Safe: the host asks until the answer is yes.
    """
    numbers = table(rt)
    event = new_event(rt)
    with rt.use(left):
        numbers.fill_(7)
        event.record()
    done = event.query()
    while not racy and not done:
        done = event.query()
    with rt.use(right):
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def synchronize(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams use one table one after the other.

    Racy: nothing waits.
    Safe: the host waits for the whole device.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.fill_(7)
    if not racy:
        rt.synchronize()
    with rt.use(right):
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def a_number_read_by_the_host(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The host may read one number of what a stream computes before another stream uses the table.

    Racy: nothing is read by the host, and nothing waits.
    Safe: `.item()` makes the host wait for the stream, which orders what it launches then: by accident.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.fill_(7)
        total = numbers.sum()
        if not racy:
            total.item()
    with rt.use(right):
        return [numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def a_boolean_index_waits(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream takes rows of what it wrote; another then reads the table.

    Racy: indices name the rows, and the host does not wait.
    Safe: a mask names them: how many there are has to be known, so the host waits for the stream.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.fill_(7)
        rows = index(rt, 1, 3) if racy else given(rt, [False, True, False, True, False, False, False, False])
        taken = numbers[rows]
    with rt.use(right):
        return [taken, numbers.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def a_fence_covers_what_lies_before(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream writes, and does something else; a reader waits for a fence behind that.

    Racy: a fence of the other stream was waited for.
    Safe: a later fence of the same stream covers what lies before it.
    """
    middle = rt.stream("middle")
    numbers, other = table(rt), table(rt)
    with rt.use(left):
        numbers.fill_(7)
    with rt.use(middle if racy else left):
        other.fill_(8)
        fence = rt.record()
    with rt.use(right):
        rt.wait(fence)
        return [numbers.clone(), other.clone()]
