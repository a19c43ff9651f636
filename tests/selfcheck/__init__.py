"""The library checking itself: state machines, models and mutants. Engines use `batchstate.testing`."""
