"""The command line: `batchstate COMMAND`, or `python -m batchstate COMMAND`.

Each command is a module of its name, listed in `app`. Modules here import torch and hypothesis only inside `run`, so
that help and mistyped options answer at once.
"""

from batchstate.cli.app import main

__all__ = ["main"]
