"""One file a stage: `run(setting, notes)` notes what it finds."""
