"""Options that several commands have, and the types of their values."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device D`; see `chosen_device`."""
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def add_device_or_tool(parser: argparse.ArgumentParser) -> None:
    """`--device D`, where D may be a tool of `batchstate.testing.devices`."""
    parser.add_argument(
        "--device",
        metavar="D",
        help="cpu, cuda, cuda:1, ...; race or race:cuda, the race detector; sim or sim:SCHEDULER, the simulated device "
        "(default: cuda where there is one)",
    )


def add_seed(parser: argparse.ArgumentParser, *, default: int | None = 0) -> None:
    """`--seed S`."""
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument(
        "--seed", metavar="S", type=whole(0), default=default, help=f"the same seed gives the same run{shown}"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`; see `write_json`."""
    parser.add_argument("--json", metavar="FILE", type=_new_file, help="also write the figures to FILE, for machines")


def chosen_device(name: str | None) -> str:
    """The device that was asked for, or else an accelerator if there is one. Imports torch."""
    if name is not None:
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def whole(least: int) -> Callable[[str], int]:
    """The type of options that are whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return parse


def share(text: str) -> float:
    """The type of options that are a share from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def _new_file(text: str) -> Path:
    # Asked now, because a run of a minute should not end in an error that was there from the start.
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no such folder, or a folder itself")
    return path
