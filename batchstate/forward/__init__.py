"""The inputs of a forward: planned on the host, resolved on the device."""
