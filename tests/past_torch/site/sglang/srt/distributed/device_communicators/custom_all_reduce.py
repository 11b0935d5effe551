"""A stand-in for the custom all-reduce kernel, see tests/past_torch/README.md."""

import torch
import torch.distributed as dist
from meeting import Meeting


class CustomAllreduce:
    def __init__(self, group, device, max_size=8192 * 1024, symm_mem_enabled=False):
        self.group, self.disabled, self.max_size = group, False, max_size
        ranks = dist.get_process_group_ranks(group)
        self._meeting = Meeting(f"car{ranks}", group.rank(), group.size())

    def should_custom_ar(self, inp):
        size = inp.numel() * inp.element_size()
        return size % 16 == 0 and size < self.max_size

    def all_reduce(self, inp, *, out=None, registered=False):
        out = torch.empty_like(inp) if out is None else out
        self._meeting.meet()
        return out.copy_(inp)

    def custom_all_reduce(self, input):
        return self.all_reduce(input) if self.should_custom_ar(input) else None
