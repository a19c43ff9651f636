"""What several tests stand in for the real thing."""

import threading
from collections.abc import Callable

import attrs
import pytest

from batchstate.violations import Code, Violation


@attrs.define(eq=False)
class Gate:
    """A fence that a test opens; counts how often it was asked."""

    done: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done

    def wait(self) -> None:
        raise AssertionError("the host waited")


def refused(code: Code, action: Callable[[], object]) -> Violation:
    """Runs `action`, which has to break the law of `code`."""
    with pytest.raises(Violation) as caught:
        action()
    assert caught.value.code == code, caught.value
    return caught.value


def in_a_thread(action: Callable[[], object]) -> BaseException | None:
    """Runs `action` in a second thread and returns what it raised."""
    raised: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return raised[0] if raised else None
