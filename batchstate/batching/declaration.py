"""What a batch class may say: columns, and methods that read them. What would be lost in silence is refused."""

import types
from collections.abc import Mapping
from typing import ClassVar, get_origin

import torch

from batchstate.columns import Column, SlotColumn
from batchstate.errors import DeclarationError


def declared_columns(cls: type, reserved: frozenset[str]) -> dict[str, Column]:
    """The columns of a batch class, those of all its bases first, in the order of declaration.

    Args:
        cls: the class under construction.
        reserved: names that every batch has.

    Raises:
        DeclarationError: a name that hides one of these or another column, or what was meant as a column and is none.
    """
    columns: dict[str, Column] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Column):
                _check_name(cls, name, reserved)
                columns[name] = value
            elif name in columns:
                raise DeclarationError(
                    f"{base.__name__}.{name} hides the column of that name",
                    value=name,
                    remedy="declare the column anew, or choose another name",
                )
    _check_own(cls, columns, reserved)
    slots = [name for name, column in columns.items() if isinstance(column, SlotColumn)]
    if len(slots) > 1:
        raise DeclarationError(
            f"{cls.__name__} declares {len(slots)} slot columns", value=slots, remedy="a request has one slot"
        )
    return columns


def _check_name(cls: type, name: str, reserved: frozenset[str]) -> None:
    if name in reserved or not name.isidentifier():
        raise DeclarationError(
            f"{cls.__name__}.{name} would hide what every batch has",
            value=name,
            remedy="choose another name for the column",
        )


def _check_own(cls: type, columns: Mapping[str, Column], reserved: frozenset[str]) -> None:
    for name, value in vars(cls).items():
        if name in columns:
            continue
        if name in ("__init__", "__new__") or (name in reserved and not name.startswith("__")):
            raise DeclarationError(
                f"{cls.__name__}.{name} would hide what every batch has",
                value=name,
                remedy="a subclass declares columns and may add methods; it overrides none",
            )
        if isinstance(value, torch.dtype) or _makes_columns(value):
            raise DeclarationError(
                f"{cls.__name__}.{name} is {value!r}, which declares nothing",
                value=name,
                remedy=f"write {name} = mirrored(dtype), device_only(dtype), slot_column() or host_list()",
            )
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if name not in vars(cls) and annotation is not ClassVar and get_origin(annotation) is not ClassVar:
            raise DeclarationError(
                f"{cls.__name__}.{name} is annotated and not declared",
                value=name,
                remedy=f"write {name} = mirrored(dtype), device_only(dtype), slot_column() or host_list()",
            )


def _makes_columns(value: object) -> bool:
    """Whether the parentheses were forgotten."""
    return isinstance(value, types.FunctionType) and value.__module__ == Column.__module__
