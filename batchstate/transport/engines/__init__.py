"""How bytes reach another process: one small protocol, and an engine for each way. `base` is the protocol."""
