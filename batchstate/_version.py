"""The version of the package, as it is installed. Apart, so that importing the package reads no metadata."""

from importlib import metadata

try:
    __version__ = metadata.version("batchstate")
except metadata.PackageNotFoundError:
    __version__ = "unknown (a checkout that is not installed)"
