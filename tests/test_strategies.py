"""The strategies of `batchstate.testing` draw what the library takes, and refuse what cannot be meant."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchstate._arrays import kept_rows, row_indices
from batchstate.errors import ArgumentError, BatchStateError
from batchstate.mirror import Contract
from batchstate.runtime import NUMPY_DTYPES, Runtime, numpy_dtype
from batchstate.testing import (
    ManualStream,
    amounts,
    column_values,
    contracts,
    dtypes,
    keep_lists,
    mirrored_tensors,
    row_lists,
    row_shapes,
    split_sizes,
)
from tests.selfcheck.machines.pools import SlotPoolMachine

quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@quick
@given(st.data(), st.integers(0, 6))
def test_rows_are_what_the_operations_take(data: st.DataObject, n: int) -> None:
    """A keep list names each row once, a row list rows that are there; sizes are counts that sum to the rows."""
    rows = kept_rows(data.draw(keep_lists(n)), n, "filter")
    assert len(set(rows.tolist())) == len(rows) <= n
    row_indices(data.draw(row_lists(n)), n, "take")
    sizes = data.draw(split_sizes(n))
    assert sum(sizes) == n
    assert min(sizes) >= 0


@quick
@given(st.data(), dtypes(), st.integers(0, 4), row_shapes())
def test_column_values_have_dtype_and_shape(
    data: st.DataObject, dtype: torch.dtype, n: int, shape: tuple[int, ...]
) -> None:
    """Arrays are of the dtype and shape that was asked for."""
    array = data.draw(column_values(dtype, n, shape))
    assert array.dtype == numpy_dtype(dtype)
    assert array.shape == (n, *shape)


@quick
@given(st.data(), st.integers(0, 4))
def test_amounts_are_one_or_one_per_row(data: st.DataObject, n: int) -> None:
    """An amount is a number within the limits, or one per row."""
    amount = np.asarray(data.draw(amounts(n, -1, 2)))
    assert amount.shape in ((), (n,))
    assert ((amount >= -1) & (amount <= 2)).all()


@settings(quick, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mirrored_tensors_agree_with_their_models(data: st.DataObject, rt: Runtime) -> None:
    """A drawn value agrees with its model, on both sides and under its contract."""
    one = data.draw(mirrored_tensors(rt))
    one.check()
    one.check_device()
    assert (one.host is None) == (one.value.contract is Contract.DEVICE_ONLY)


@quick
@given(dtypes("iu"), contracts("exact", "host_only"))
def test_kinds_and_names_are_kept(dtype: torch.dtype, contract: Contract) -> None:
    """Only the kinds and contracts that were asked for are drawn."""
    assert NUMPY_DTYPES[dtype].kind in "iu"
    assert contract in (Contract.EXACT, Contract.HOST_ONLY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dtypes(""),
        lambda: dtypes("x"),
        lambda: contracts("roughly"),
        lambda: column_values(torch.bfloat16, 1),
        lambda: column_values(torch.int8, -1),
        lambda: keep_lists(-1),
        lambda: row_lists(1, -1),
        lambda: split_sizes(-1),
        lambda: amounts(1, 2, 1),
    ],
)
def test_bad_arguments_are_refused_when_a_strategy_is_made(make: Callable[[], object]) -> None:
    """A strategy that cannot draw anything is refused before a value is drawn."""
    with pytest.raises(BatchStateError):
        make()


def test_manual_fences_complete_in_order() -> None:
    """Fences of one stream complete oldest first, by hand or by waiting for a later one."""
    stream = ManualStream("forward")
    first, second, third = stream.record(), stream.record(), stream.record()
    assert stream.depth == 3
    assert stream.complete() == 1
    assert (first.query(), second.query()) == (True, False)
    third.wait()
    assert second.query()
    assert third.waits == 1
    assert (stream.depth, stream.last, stream.complete()) == (0, None, 0)
    assert repr(first) == "ManualFence('forward', number 1, complete)"


def test_undeclared_states_are_refused() -> None:
    """A state that is not declared would never be missed, so it cannot be counted."""
    with pytest.raises(ArgumentError, match="declare it in `TARGETS`"):
        SlotPoolMachine().reached("something nice")
