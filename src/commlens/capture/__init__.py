"""Recording, inside the training process: what the tap sees is written into the black box."""
