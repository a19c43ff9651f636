"""What the race detector and the simulated device share: whose memory is whose, and what an operation does with it."""
