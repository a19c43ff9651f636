"""The machine of the figures: a figure without them says little."""

import importlib.util
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from batchstate.runtime import open_runtime
from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.machine import machine

PACKAGES = ("torch", "numpy", "attrs", "hypothesis", "pytest", "transformers", "nixl", "triton")
"""Packages whose version is noted, or None where one is not installed."""


def run(setting: Setting, notes: Notes) -> None:
    """Opens the device, computes something on it, and notes what it is.

    Raises:
        ArgumentError: no such device here.
    """
    runtime = open_runtime(setting.device)
    notes.figures.update(machine(runtime))
    notes.figures["packages"] = {name: _version(name) for name in PACKAGES}
    if setting.on_cuda:
        notes.figures.update(_cuda(runtime.device))
    one_more = runtime.read_back(runtime.device_zeros((3,), torch.int64) + 1)
    notes.require_equal("0 + 1, computed there", one_more.tolist(), [1, 1, 1])


def _cuda(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str | None:
    """The driver's version, as its own tool says it, or as the kernel does."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=15,
        )
        return said.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
