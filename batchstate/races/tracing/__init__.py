"""Shared by the race detector and the simulated device: memory, operations of torch, clocks, and the window."""
