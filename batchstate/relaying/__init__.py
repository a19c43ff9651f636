"""What a `FutureMap` is made of: declared fields, a ledger of entries, and values on their way to the host."""
