"""The machine of the figures."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchstate.runtime import Runtime


def machine(runtime: Runtime) -> dict[str, Any]:
    """The machine and the versions, by name; a figure without them says little."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "device": str(runtime.device),
        "device_name": _device_name(runtime.device),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _commit() -> str:
    """The commit that was measured, with a `+` where the sources differ from it; empty outside of a repository."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return ""
    return commit + ("+" if git("status", "--porcelain", "--", ":/batchstate", ":/benchmarks") else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _cpu_model()
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))
