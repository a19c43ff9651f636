"""The files of a release say one version."""

import re
import tomllib

from tests.test_typed_at_the_prompt import ROOT


def test_one_version() -> None:
    """A release has its section of the changelog, and CITATION.cff names it; a version in between has neither."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", version)
    assert (version in sections) is not version.endswith(".dev0")
    assert cited == sections[:1]
