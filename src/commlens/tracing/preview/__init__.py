"""Preview: one process acts as any rank of a world of any size, without GPUs or a network."""
