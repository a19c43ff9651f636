"""`batchstate info`: versions, devices and settings, for a report of a bug."""

import argparse
import importlib.metadata
import platform
import sys

import batchstate

NAME = "info"
SUMMARY = "print versions, devices and settings, for a report of a bug"

_PACKAGES = ("torch", "numpy", "attrs", "hypothesis", "pytest", "nixl", "mooncake-transfer-engine-non-cuda")
_ENGINES = ("vllm", "sglang", "transformers", "lmdeploy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(_: argparse.Namespace) -> int:
    """Prints a line for each, and returns 0."""
    import torch

    from batchstate import levels  # it refuses a wrong level in the environment: by a message

    cuda = torch.version.cuda or torch.version.hip
    lines = {
        "batchstate": f"{batchstate.__version__}, core {'compiled' if batchstate.compiled else 'interpreted'}",
        "checks": levels.current_checks().value,
        "python": f"{platform.python_version()}, {sys.platform} {platform.machine()}",
        "cuda": f"{cuda or 'none'} in this build of torch",
        "devices": ", ".join(
            ["cpu", *(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))]
        ),
    }
    for name in (*_PACKAGES, *_ENGINES):
        try:
            lines[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, text in lines.items():
        print(f"{name:<{max(map(len, lines))}}  {text}")
    return 0
