"""What `batchstate.hisparse` is made of: books, the guard of the slots, moves between device and host memory."""
