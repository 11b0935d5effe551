"""A stand-in for vLLM's calls of NCCL by ctypes, see tests/past_torch/README.md."""

import itertools

import torch.distributed as dist
from meeting import folder
from torch._C import _distributed_c10d as c10d

import nccl_like

_made = itertools.count()


class PyNcclCommunicator:
    def __init__(self, group, device, library_path=None):
        self.world_size, self.rank, self.disabled = group.size(), group.rank(), False
        name = f"nccl{next(_made)}-{dist.get_process_group_ranks(group)}"
        store = dist.FileStore(str(folder() / name), self.world_size)
        self._comm = nccl_like.native().communicator(store, self.rank, self.world_size)

    def all_reduce(self, tensor):
        self._comm.allreduce([tensor], _on_the_stream(c10d.AllreduceOptions()))
        return tensor

    def all_gather(self, output, tensor):
        self._comm._allgather_base(output, tensor, _on_the_stream(c10d.AllgatherOptions()))

    def reduce_scatter(self, output, tensor):
        options = _on_the_stream(c10d.ReduceScatterOptions())
        self._comm._reduce_scatter_base(output, tensor, options)


def _on_the_stream(options):
    options.asyncOp = False
    return options
