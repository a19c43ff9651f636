"""What engines do today, written for the purpose: the ways that ours are compared with. Real engines are in `peers`."""
