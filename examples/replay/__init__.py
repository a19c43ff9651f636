"""Bugs planted in engines, recorded, replayed, and shrunk to tests: `python -m examples.replay`."""
