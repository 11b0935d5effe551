"""Stand-ins for torch's symmetric memory and for its windows (torch 2.15), which need a GPU: see
tests/past_torch/README.md. They take the place of torch's own classes.
"""

import sys

import torch.distributed as dist
from meeting import Meeting
from torch._C import _distributed_c10d


class _Signals:
    """One counter of signals for each pair: a receiver takes the sender's next one."""

    def __init__(self, group, name):
        self._group, self._name = group, f"{name}{dist.get_process_group_ranks(group)}"
        self._all = Meeting(self._name, group.rank(), group.size())
        self._pairs = {}

    def _pair(self, source, destination, member):
        name = f"{self._name}{source}to{destination}"
        return self._pairs.setdefault(name, Meeting(name, member, 2))

    def _put(self, to):
        self._pair(self._group.rank(), to, 0).arrive()

    def _take(self, source):
        pair = self._pair(source, self._group.rank(), 1)
        pair.wait(pair.arrive(), [0])


class SymmetricMemory(_Signals):
    never = False

    @staticmethod
    def rendezvous(tensor, group_name=None):
        group = dist.distributed_c10d._resolve_process_group(group_name)
        handle = SymmetricMemory(group, "memory")
        if SymmetricMemory.never:
            handle._all.reached = lambda *_: False
        handle._all.meet()
        return handle

    @staticmethod
    def set_group_info(group_name, rank, world_size, store):
        """torch 2.6 calls it before the first rendezvous of a group."""

    def barrier(self, channel=0, timeout_ms=0):
        self._all.meet()

    def put_signal(self, dst_rank, channel=0, timeout_ms=0):
        self._put(dst_rank)

    def wait_signal(self, src_rank, channel=0, timeout_ms=0):
        self._take(src_rank)


class Window(_Signals):
    def tensor_register(self, tensor, owning=True):
        self._all.meet()

    def put(self, tensor, dst_rank, target_offset_nelems, async_op, opts=None):
        self._put(dst_rank)

    def signal(self, peer_rank, async_op, opts=None):
        self._put(peer_rank)

    def wait_signal(self, peer_rank, async_op, opts=None):
        self._take(peer_rank)


def _new_window(self, tensor=None):
    window = Window(self, "window")
    window._all.meet()
    return window


def install():
    """Take the place of torch's classes, and let the adapters see it."""
    _distributed_c10d._SymmetricMemory = SymmetricMemory
    _distributed_c10d.Window = Window
    dist.ProcessGroup.new_window = _new_window
    if "commlens.tap.libraries" in sys.modules:
        sys.modules["commlens.tap.libraries"]._apply_to(_distributed_c10d)
    import torch.distributed._symmetric_memory as memory

    memory._SymmetricMemory = SymmetricMemory
    return memory
