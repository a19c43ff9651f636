"""The laws themselves, by what they are about; `batchstate.invariants` is the door to all of them."""
