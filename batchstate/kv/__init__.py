"""KV memory: pages on the device, the host tier, and what of both each request has."""
