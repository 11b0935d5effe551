"""Programs that call NCCL past torch, as vLLM's pynccl does, and replay it in CUDA graphs: on the
emulation of ``tests/nccl_like``, which calls commlens's plugin as NCCL does.

Usage as of ``programs.py``. Rank 1 is at fault, unless a program says otherwise.
"""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from meeting import Meeting
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

import nccl_like

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STAY_S = float(os.environ.get("PAST_TORCH_STAY_S", "30"))
ROWS = torch.ones(4, 16)
STEPS = Meeting("steps", RANK, SIZE)


def stay():
    """The place where the report's program hangs."""
    threading.Event().wait(STAY_S)


def tensor_parallel():
    return PyNcclCommunicator(dist.group.WORLD, "cuda")


def synchronize():
    STEPS.arrive()
    torch.cpu.synchronize()


def layers(tp, tokens=4):
    """A forward pass: two all_reduces, as a model of one layer has."""
    for _ in range(2):
        tp.all_reduce(torch.ones(tokens, 16))


def captured(tp, tokens=4):
    with nccl_like.capture() as graph:
        layers(tp, tokens)
    return graph


def step_left_out():
    """A rank that scheduled no token leaves out the dummy run of the experts."""
    ep = tensor_parallel()
    for step in range(8):
        if RANK == 1 and step == 6:
            stay()
        ep.all_gather(torch.ones(SIZE * 4), torch.ones(4))
        ep.reduce_scatter(torch.ones(4), torch.ones(SIZE * 4))
        synchronize()


def drafter_left_out():
    """A rank leaves out the drafter's all_reduce near the end of a request, and goes on."""
    tp = tensor_parallel()
    for step in range(8):
        layers(tp)
        if not (RANK == 1 and step == 5):
            tp.all_reduce(torch.ones(1, 16))
        tp.all_gather(torch.ones(SIZE * 16), torch.ones(16))
        synchronize()


def stands_before_replay():
    """A rank waits for its host between two segments; the others' replays stand."""
    tp = tensor_parallel()
    graph = captured(tp)
    for step in range(12):
        if RANK == 1 and step == 9:
            stay()
        graph.replay()
        synchronize()


def device_stands_before_replay():
    """A rank replays, too, but its device does not end what came before."""
    tp = tensor_parallel()
    graph = captured(tp)
    for step in range(12):
        if RANK == 1 and step == 9:
            nccl_like.launch_kernel()
        graph.replay()
        synchronize()


def other_graph():
    """A rank pads its batch to another size, and replays that size's graph."""
    tp = tensor_parallel()
    graphs = {tokens: captured(tp, tokens) for tokens in (8, 4)}
    for step in range(12):
        graphs[8 if RANK == 1 and step == 9 else 4].replay()
        synchronize()


def eager_among_graphs():
    """A rank runs a batch without its graph, and unpadded, while the others replay theirs."""
    tp = tensor_parallel()
    graph = captured(tp)
    for step in range(12):
        if RANK == 1 and step == 9:
            layers(tp, 3)
        else:
            graph.replay()
        synchronize()


def stands_after_eager():
    """Rank 0 stands, after rank 1 has run some steps without its graph, as it may."""
    tp = tensor_parallel()
    steps_of_two_kinds(tp)
    if RANK == 0:
        stay()
    steps_of_two_kinds(tp)


def stands_before_torch():
    """All replay, and a rank does not come to torch's own all_reduce between two replays."""
    tp = tensor_parallel()
    graph = captured(tp)
    for step in range(12):
        graph.replay()
        synchronize()
        if RANK == 1 and step == 9:
            stay()
        dist.all_reduce(torch.ones(4))
        synchronize()


def device_stands_before_torch():
    """A rank's device does not come to torch's all_reduce, which NCCL's plugin tells of, too."""
    for step in range(8):
        if RANK == 1 and step == 6:
            nccl_like.launch_kernel()
        dist.all_reduce(torch.ones(4))
        synchronize()


def healthy_torch():
    """Torch's calls alone, of all kinds, and graphs of them: no record is doubled."""
    graph = torch.cuda.CUDAGraph()
    for _ in range(20):
        layers_of_torch()
    graph.capture_begin()
    dist.all_reduce(torch.ones(4))
    graph.capture_end()
    for _ in range(20):
        graph.replay()
        layers_of_torch()
    synchronize()


def layers_of_torch():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    dist.all_gather_into_tensor(torch.ones(SIZE * 4), torch.ones(4))
    dist.all_to_all_single(torch.ones(SIZE * 4), torch.ones(SIZE * 4))
    dist.broadcast(torch.ones(4), 0)
    batch = [dist.P2POp(dist.isend, ROWS, right), dist.P2POp(dist.irecv, torch.ones(4, 16), left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def healthy_replays():
    """A server that replays graphs of several sizes, calls torch, and has no request for a while."""
    tp = tensor_parallel()
    layers(tp)
    graphs = [captured(tp, tokens) for tokens in (8, 4, 2)]
    for step in range(60):
        graphs[step % 3].replay()
        if step % 5 == 0:
            dist.all_reduce(torch.ones(4))
        if step == 40:
            synchronize()
            time.sleep(12)
    synchronize()


def healthy_eager_among_graphs():
    """A rank runs some steps without its graph, of the same sizes, and captures one late; then no
    request comes for a while.
    """
    tp = tensor_parallel()
    steps_of_two_kinds(tp)
    time.sleep(12)
    steps_of_two_kinds(tp)


def steps_of_two_kinds(tp):
    graph = captured(tp)
    for step in range(20):
        if RANK == 1 and step in (9, 15):
            layers(tp)
        else:
            graph.replay()
        if RANK == 1 and step == 12:
            captured(tp, 8)
        layers(tp)
        synchronize()


def healthy_eager_and_graphs():
    """A rank's host is late with each step; calls and replays take turns in two communicators."""
    tp, ep = tensor_parallel(), tensor_parallel()
    graph = captured(tp)
    for step in range(40):
        graph.replay()
        ep.reduce_scatter(torch.ones(4), torch.ones(SIZE * 4))
        layers(tp)
        if step % SIZE == RANK:
            synchronize()
            time.sleep(0.4)
    synchronize()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(4))
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
