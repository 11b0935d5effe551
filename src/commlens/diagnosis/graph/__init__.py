"""Which ranks wait for which."""
