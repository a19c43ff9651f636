"""What a mirrored value is made of: its two sides, the door for host arrays, integer arithmetic, stale windows."""
