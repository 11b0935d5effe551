"""A stand-in for the newer custom all-reduce kernel, see tests/past_torch/README.md."""

import torch.distributed as dist
from meeting import Meeting


class CustomAllReduceV2:
    def __init__(self, group, device, max_pull_size=1 << 24):
        self.group, self.disabled, self.max_size = group, False, max_pull_size
        ranks = dist.get_process_group_ranks(group)
        self._meeting = Meeting(f"car2{ranks}", group.rank(), group.size())

    def should_custom_ar(self, inp):
        size = inp.numel() * inp.element_size()
        return size % 16 == 0 and size <= self.max_size

    def custom_all_reduce(self, input, override_algo=None):
        self._meeting.meet()
        return input.clone()
