"""The ways of engines today, written to be compared with ours. Real engines are in `peers`."""
