"""Start programs with commlens in them: torchrun for a whole node, and the bootstrap of one worker."""
