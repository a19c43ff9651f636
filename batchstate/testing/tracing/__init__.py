"""What the race detector and the simulated device share: which memory is whose, and what an operation touches."""
