"""A stand-in for the all-reduce through symmetric memory, see tests/past_torch/README.md."""

import torch
import torch.distributed as dist
from meeting import Meeting


class SymmMemCommunicator:
    def __init__(self, group, device, force_multimem=None, max_size_override=1 << 20):
        self.group, self.dtype, self.max_size = group, torch.bfloat16, max_size_override
        ranks = dist.get_process_group_ranks(group)
        self._meeting = Meeting(f"symm{ranks}", group.rank(), group.size())

    def should_use_symm_mem(self, inp):
        return inp.dtype == self.dtype and inp.numel() * inp.element_size() <= self.max_size

    def all_reduce(self, inp, *, out=None):
        if not self.should_use_symm_mem(inp):
            return None
        self._meeting.meet()
        return inp.clone()
