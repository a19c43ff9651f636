"""`python -m examples.disaggregated`: prefill in one process, decode in another, and compare every token.

Nothing heavy is imported before Ctrl-C is heeded; `command` has the rest.
"""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Serves; see `command.run`. 130 when it was interrupted."""
    try:
        from examples.disaggregated.command import run

        return run(arguments)
    except KeyboardInterrupt:
        print("examples.disaggregated: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
