"""Programs of `tests/engine_idioms.py`: each racy one is found, and each safe one silent."""

import pytest

from batchstate.races.cuda import cuda_on_cpu
from tests.engine_idioms import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_racy_side_alone_is_found(name: str) -> None:
    """Whatever its kind, both lines are of the program."""
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as rt:
            PROGRAMS[name](racy)
        assert bool(rt.races) is racy, "\n".join(map(str, rt.races))
        for race in rt.races:
            assert "engine_idioms.py:" in race.first.site
            assert "engine_idioms.py:" in race.second.site


def test_there_are_sixty() -> None:
    """Of each side."""
    assert len(PROGRAMS) == 60
