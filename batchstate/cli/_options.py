"""Options of the commands that name a file."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`; see `write_json`."""
    parser.add_argument("--json", metavar="FILE", type=new_file, help="also write the figures to FILE, for machines")


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def new_file(text: str) -> Path:
    """The type of options that name a file to write. Checked at the start: a long run should not end in this error."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: expected a file in a folder that exists")
    return path
