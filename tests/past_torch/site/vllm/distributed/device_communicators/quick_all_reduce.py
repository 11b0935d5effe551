"""A stand-in for the quick all-reduce kernel, see tests/past_torch/README.md."""

import torch.distributed as dist
from meeting import Meeting


class QuickAllReduce:
    def __init__(self, group, device):
        self.group, self.disabled = group, False
        ranks = dist.get_process_group_ranks(group)
        self._meeting = Meeting(f"quick{ranks}", group.rank(), group.size())

    def quick_all_reduce(self, inp, *, out=None):
        self._meeting.meet()
        return inp.clone()
