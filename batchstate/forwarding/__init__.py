"""What the inputs of a forward are made of: numpy on the host, and what only the device can set right."""
