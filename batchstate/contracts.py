"""How the host side of a value relates to its device side, and what becomes of that when values are combined."""

import enum

from batchstate.errors import ArgumentError


class Contract(enum.Enum):
    """The relation between the two sides, element by element."""

    EXACT = "exact"
    """host == device."""
    UPPER_BOUND = "upper_bound"
    """host >= device: the host knows a bound until the exact value is resolved."""
    DEVICE_ONLY = "device_only"
    """There is no host side; reading it raises."""
    HOST_ONLY = "host_only"
    """Not uploaded yet; uploaded once, on the stream that first uses it."""


_STRENGTH = {Contract.DEVICE_ONLY: 0, Contract.UPPER_BOUND: 1, Contract.EXACT: 2, Contract.HOST_ONLY: 3}


def parse_contract(contract: str | Contract) -> Contract:
    """The contract of that name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if isinstance(contract, Contract):
        return contract
    try:
        return Contract(contract)
    except ValueError:
        legal = ", ".join(one.value for one in Contract)
        raise ArgumentError(f"unknown contract {contract!r}", value=contract, remedy=f"use one of: {legal}") from None


def combined(first: Contract, second: Contract) -> Contract:
    """The contract of a value made of rows of both: the weaker of the two.

    A `host_only` value is the strongest, since uploading it makes it exact. No operation strengthens a contract.
    """
    return first if _STRENGTH[first] <= _STRENGTH[second] else second


def weaker_or_equal(contract: Contract, than: Contract) -> bool:
    """Whether `contract` promises no more than `than` does."""
    return _STRENGTH[contract] <= _STRENGTH[than]
