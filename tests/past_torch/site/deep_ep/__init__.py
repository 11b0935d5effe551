"""A stand-in for DeepEP, see tests/past_torch/README.md."""

import os

import torch
import torch.distributed as dist
from meeting import Meeting


class EventOverlap:
    """What a call returns for its stream; ``current_stream_wait`` waits for the kernel."""

    def __init__(self, meeting, number):
        self._meeting, self._number = meeting, number

    def current_stream_wait(self):
        self._meeting.wait(self._number)


class Buffer:
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False):
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self._meeting = Meeting(
            f"deep_ep{dist.get_process_group_ranks(group)}", self.rank, self.group_size
        )
        self.enqueues = os.environ.get("PAST_TORCH_ENQUEUES") == "1"

    def _kernel(self):
        number = self._meeting.arrive()
        if not self.enqueues:
            self._meeting.wait(number)
        return EventOverlap(self._meeting, number)

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        if isinstance(x, torch.Tensor) and x.dim() != 2:
            raise AssertionError("x must have two dimensions")
        return x, topk_idx, topk_weights, [], (x,), self._kernel()

    def combine(
        self, x, handle, topk_weights=None, config=None, previous_event=None, async_finish=False
    ):
        return x, topk_weights, self._kernel()

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        use_fp8=True,
        return_recv_hook=False,
    ):
        event = self._kernel()
        return x, topk_idx, (x,), event, event.current_stream_wait

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, return_recv_hook=False):
        event = self._kernel()
        return x, event, event.current_stream_wait


class ElasticBuffer:
    def __init__(self, group, num_bytes=None):
        self.group = group
        self._meeting = Meeting(
            f"elastic{dist.get_process_group_ranks(group)}", group.rank(), group.size()
        )

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, num_experts=None, handle=None, do_cpu_sync=None
    ):
        self._meeting.meet()
        return x, topk_idx, topk_weights, (x,), None

    def combine(self, x, handle, topk_weights=None, bias=None):
        self._meeting.meet()
        return x, topk_weights, None

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        self._meeting.meet()

    def all_gather(self, t):
        self._meeting.meet()
        return t, lambda: None

    def engram_write(self, storage, sf=None):
        self._meeting.meet()

    def _pair(self, source, destination, member):
        return Meeting(f"elastic{source}to{destination}", member, 2)

    def pp_send(self, t, dst_rank_idx, num_sms=0):
        self._pair(self.group.rank(), dst_rank_idx, 0).arrive()

    def pp_recv(self, t, src_rank_idx, num_sms=0):
        pair = self._pair(src_rank_idx, self.group.rank(), 1)
        pair.wait(pair.arrive(), [0])
