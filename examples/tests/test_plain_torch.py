"""Scripts in plain torch: right in all orders of the streams; without a wait found, and wrong in one."""

import sys
from pathlib import Path

import pytest

from batchstate.cli import main

EXAMPLES = sorted((Path(__file__).parents[1] / "plain_torch").glob("*.py"))

PRINTED = {
    "double_buffer": [0.0, 8.0, 16.0, 24.0, 32.0, 40.0],
    "kv_offload": [4.0, 8.0, 12.0, 16.0],
    "pipeline": [0.0, 16.0, 32.0, 48.0],
    "prefetch": [0.0, 8.0, 16.0, 24.0],
}
"""Script -> its last line."""

ORDERS = ("lazy", "newest", "oldest", "pct")


def printed(device: str, example: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of a run."""
    code = main(["race", "run", "--device", device, str(example), *arguments])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    return code, lines[-1]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example(example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, and with `--forget`."""
    monkeypatch.setattr(sys, "argv", ["batchstate"])
    right = str(PRINTED[example.stem])
    assert printed("race", example, capsys=capsys) == (0, right)
    assert {printed(f"sim:{order}", example, capsys=capsys) for order in ORDERS} == {(0, right)}
    assert printed("race", example, "--forget", capsys=capsys)[0] == 1
    assert any(printed(f"sim:{order}", example, "--forget", capsys=capsys)[1] != right for order in ORDERS)
