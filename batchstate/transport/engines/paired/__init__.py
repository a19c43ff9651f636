"""What the torch.distributed engine is made of: two processes that take part in each write. `pairs` joins them."""
