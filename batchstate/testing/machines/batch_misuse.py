"""Ways to misuse a `Batch`."""

from collections.abc import Callable

import numpy as np
import torch

from batchstate.batch import Batch
from batchstate.columns import mirrored
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DtypeError,
    RowIndexError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.indices import Pages, Slots
from batchstate.invariants import Code
from batchstate.mirror import MirroredTensor
from batchstate.testing.machines.batch_model import Decode
from batchstate.testing.misuse import Misuse


class Another(Batch):
    """A batch of another declaration."""

    seq_lens = mirrored(torch.int64)


def _bound(batch: Decode) -> MirroredTensor:
    return MirroredTensor.from_host(batch.runtime, np.zeros(len(batch), np.int64)).weaken("upper_bound")


def _slots(batch: Decode, numbers: list[int], pool: int = 7) -> Slots:
    return Slots.from_host(batch.runtime, numbers, pool=pool)


def _every_slot(number: int) -> Callable[[Decode], Decode]:
    """Gives every request of a batch the same slot."""
    return lambda batch: batch.evolve(slots=_slots(batch, [number] * len(batch)))


def _alone(batch: Decode, slots: object) -> Decode:
    """A batch of one request with the values of the padded row of `batch`."""
    row = batch.filter([]).pad(1)
    columns = {name: row[name].np for name in ("seq_lens", "small", "temperature", "greedy", "bias", "accepted")}
    zeros = {"drafts": np.zeros((1, 2), np.int32), "last_token": [0], "hidden": np.zeros((1, 2), np.float32)}
    return Decode.build(batch.runtime, slots=slots, requests=["one"], **columns, **zeros)


def _has_rows(batch: Decode) -> bool:
    return len(batch) > 0


def _has_two(batch: Decode) -> bool:
    return len(batch) > 1


MISUSES: tuple[Misuse[Decode], ...] = (
    Misuse("a mask too long", (ShapeError,), lambda one: one.filter(np.ones(len(one) + 1, np.bool_))),
    Misuse("a row kept twice", (ArgumentError,), lambda one: one.filter([0, 0]), _has_rows),
    Misuse("a negative row kept", (RowIndexError,), lambda one: one.filter([-1])),
    Misuse("half a row kept", (DtypeError,), lambda one: one.filter([0.5])),
    Misuse("a merge with itself", (Code.SLOT_SHARED,), lambda one: one.merge(one), _has_rows),
    Misuse(
        "a merge with another declaration",
        (DeclarationError,),
        lambda one: one.merge(Another.build(one.runtime, seq_lens=[1])),  # type: ignore[arg-type]
    ),
    Misuse(
        "a merge of two pools", (ArgumentError,), lambda one: one.merge(_alone(one, _slots(one, [9], 8))), _has_rows
    ),
    Misuse("split into too much", (ArgumentError,), lambda one: one.split([len(one), 1])),
    Misuse("pad to fewer rows", (ArgumentError,), lambda one: one.pad(len(one) - 1)),
    Misuse("pad to True", (DtypeError,), lambda one: one.pad(True)),
    Misuse("advance a float column", (DtypeError,), lambda one: one.advance("temperature", 1)),
    Misuse("advance slots", (DtypeError,), lambda one: one.advance("slots", 1)),
    Misuse("advance the requests", (DeclarationError,), lambda one: one.advance("requests", 1)),
    Misuse("advance one column twice", (ArgumentError,), lambda one: one.advance(["accepted", "accepted"], 1)),
    Misuse("advance by a half", (DtypeError,), lambda one: one.advance("seq_lens", 0.5)),
    Misuse("advance beyond uint8", (ValueOverflowError,), lambda one: one.advance("small", 256), _has_rows),
    Misuse("one amount too many", (ShapeError,), lambda one: one.advance("seq_lens", np.ones(len(one) + 1, np.int64))),
    Misuse("update the slots", (ArgumentError,), lambda one: one.update("slots", [], [])),
    Misuse("update the device alone", (ArgumentError,), lambda one: one.update("last_token", [], [])),
    Misuse("update beyond the last row", (RowIndexError,), lambda one: one.update("seq_lens", [len(one)], 1)),
    Misuse("update one row with two", (ShapeError,), lambda one: one.update("seq_lens", [0], [1, 2]), _has_rows),
    Misuse("evolve something undeclared", (DeclarationError,), lambda one: one.evolve(seqlens=[1] * len(one))),
    Misuse("evolve too many rows", (ShapeError,), lambda one: one.evolve(seq_lens=[1] * (len(one) + 1))),
    Misuse("evolve an exact column to a bound", (ContractError,), lambda one: one.evolve(seq_lens=_bound(one))),
    Misuse(
        "evolve a column of another dtype",
        (DtypeError,),
        lambda one: one.evolve(seq_lens=np.zeros(len(one), np.float32)),
        _has_rows,
    ),
    Misuse(
        "evolve slots to pages",
        (Code.UNIT_MISMATCH,),
        lambda one: one.evolve(slots=Pages.from_host(one.runtime, [1] * len(one), dtype=torch.int64)),
    ),
    Misuse("slots that are mere numbers", (DtypeError,), lambda one: one.evolve(slots=[1] * len(one)), _has_rows),
    Misuse(
        "two requests in one slot",
        (Code.SLOT_SHARED,),
        _every_slot(1),
        _has_two,
    ),
    Misuse(
        "a request in slot 0",
        (Code.SLOT_ZERO_ALLOCATED,),
        _every_slot(0),
        _has_rows,
    ),
    Misuse(
        "a request in slot -1",
        (Code.SENTINEL_ESCAPED,),
        _every_slot(-1),
        _has_rows,
    ),
    Misuse("build without columns", (DeclarationError,), lambda one: Decode.build(one.runtime)),
    Misuse("assign to a column", (DeclarationError,), lambda one: setattr(one, "seq_lens", [1])),
    Misuse("a column that is not there", (DeclarationError,), lambda one: one["seqlens"]),
    Misuse("objects of a tensor column", (DeclarationError,), lambda one: one.objects("seq_lens")),
)
