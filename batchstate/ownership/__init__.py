"""Who has what: the ledger, free list and fence queue that slots, pages and states share, and the books of pages."""
