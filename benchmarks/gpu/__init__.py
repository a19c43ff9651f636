"""Checks that only a GPU can make, in one command: `python -m benchmarks.gpu --json FILE`, or `make gpu`.

It needs torch, numpy, attrs, hypothesis and pytest, and nothing else. Every stage runs in a process of its own, so that
one that fails, hangs or breaks the device leaves the others their say; what was found is written after each.

    outcome     which stages there are, how long each may take, and what came of it
    child       one stage in this process: `python -m benchmarks.gpu.child NAME`
    runner      all of them, each in a child
    report      the table that the command prints, and a page for `docs/measurements/` out of the file
    stages/     one file a stage
"""
