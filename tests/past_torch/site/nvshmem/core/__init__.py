"""A stand-in for NVSHMEM4Py, see tests/past_torch/README.md."""

import os


def init():
    """Nothing: the stand-in needs none."""


def my_pe():
    return int(os.environ["RANK"])


def n_pes():
    return int(os.environ["WORLD_SIZE"])


from nvshmem.core.collective import *  # noqa: E402, F403
