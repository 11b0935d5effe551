"""A stand-in for the NCCL groups of Ray, see tests/past_torch/README.md."""

from dataclasses import dataclass

from meeting import Meeting


@dataclass
class AllReduceOptions:
    reduceOp = 0


@dataclass
class BroadcastOptions:
    root_rank = 0


@dataclass
class SendOptions:
    dst_rank = 0


@dataclass
class RecvOptions:
    src_rank = 0


ALL_REDUCE, BROADCAST, SEND, RECV = (
    AllReduceOptions(),
    BroadcastOptions(),
    SendOptions(),
    RecvOptions(),
)


class NCCLGroup:
    def __init__(self, world_size, rank, group_name):
        self.world_size, self.rank, self.group_name = world_size, rank, group_name
        self._meeting = Meeting(f"ray{group_name}", rank, world_size)
        self._pairs = {}

    def allreduce(self, tensors, allreduce_options=ALL_REDUCE):
        self._meeting.meet()

    def barrier(self, barrier_options=None):
        self.allreduce([object()])

    def broadcast(self, tensors, broadcast_options=BROADCAST):
        self._meeting.meet()

    def _pair(self, source, destination, member):
        name = f"ray{self.group_name}{source}to{destination}"
        return self._pairs.setdefault(name, Meeting(name, member, 2))

    def send(self, tensors, send_options=SEND):
        self._pair(self.rank, send_options.dst_rank, 0).meet()

    def recv(self, tensors, recv_options=RECV):
        self._pair(recv_options.src_rank, self.rank, 1).meet()
