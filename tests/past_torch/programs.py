"""Programs as public reports of serving and reinforcement learning describe them, over the stand-ins
in ``site``, and healthy ones. Each is a function of its rank; a faulty one stays where it hangs.

Usage: programs.py NAME, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as usual.
"""

import contextlib
import os
import random
import sys
import threading
import time
from pathlib import Path

import ray  # noqa: F401 - the adapter asks it for the job
import torch
import torch.distributed as dist
import torchcomms
from deep_ep import Buffer, ElasticBuffer
from meeting import Meeting
from ray.util.collective.collective_group.nccl_collective_group import BroadcastOptions, NCCLGroup
from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2
from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue as SglangQueue
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STAY_S = float(os.environ.get("PAST_TORCH_STAY_S", "30"))
ROWS = torch.ones(4, 16)
CHOSEN = torch.zeros(4, 2, dtype=torch.int64)
MARK = Meeting("mark", RANK, SIZE)


def stay():
    """The place where the report's program hangs."""
    threading.Event().wait(STAY_S)


def mark():
    """Note that the program goes on, where no stand-in does."""
    MARK.arrive()


def everyone(name="tp"):
    return dist.new_group(list(range(SIZE)), group_desc=name)


def experts(buffer, rows=ROWS):
    rows, _, _, _, handle, _ = buffer.dispatch(rows)
    buffer.combine(rows, handle)


def experts_low_latency(buffer):
    _, _, handle, _, _ = buffer.low_latency_dispatch(ROWS, CHOSEN, 128, 8)
    buffer.low_latency_combine(ROWS, CHOSEN, CHOSEN, handle)


# --- the reports: rank 1 is at fault unless the name of the function's row says otherwise


def dummy_batch_left_out():
    """An engine without requests leaves out the dummy batch; the others wait in the experts."""
    buffer = Buffer(everyone("ep"))
    for step in range(8):
        if RANK == 1 and step == 6:
            stay()
        experts_low_latency(buffer)


def other_mode():
    """One engine decodes with low-latency kernels while the others prefill with the normal ones."""
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        if RANK == 1 and step == 4:
            buffer.low_latency_dispatch(ROWS, CHOSEN, 128, 8)
        else:
            buffer.dispatch(ROWS)


def crashes_before_combine():
    """A rank asserts on its batch between dispatch and combine; the others spin in combine."""
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        rows, _, _, _, handle, _ = buffer.dispatch(ROWS)
        if RANK == 1 and step == 4:
            raise AssertionError("batch of no tokens")
        buffer.combine(rows, handle)


def asleep_before_combine():
    """A rank compiles a kernel between dispatch and combine."""
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        rows, _, _, _, handle, _ = buffer.dispatch(ROWS)
        if RANK == 1 and step == 4:
            stay()
        buffer.combine(rows, handle)


def extra_all_gather():
    """One rank enters an all_gather of the data-parallel attention, the others the experts."""
    group = everyone("attention")
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        if RANK == 1 and step == 4:
            gathered = [torch.ones(1) for _ in range(SIZE)]
            dist.all_gather(gathered, torch.ones(1), group=group)
        experts(buffer)


def all_inside():
    """All ranks are in the all_gather of the attention, and none goes on: nobody is at fault."""
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        if step == 4:
            buffer._meeting.reached = lambda *_: False  # the network lost a packet
        experts(buffer)


def combine_left_out():
    """A rank that received no rows goes on without combine."""
    buffer = Buffer(everyone("ep"))
    for step in range(6):
        rows, _, _, _, handle, _ = buffer.dispatch(ROWS)
        if RANK != 1 or step != 4:
            buffer.combine(rows, handle)


def left_in_the_kernel():
    """One rank's kernel never ends; the others have left it, and wait in the next one."""
    kernel = CustomAllreduce(everyone(), "cpu")
    for step in range(8):
        if RANK == 1 and step == 5:
            kernel._meeting.reached = lambda *_: False
        kernel.custom_all_reduce(torch.ones(64))


def custom_and_torch():
    """One rank's tensor does not suit the kernel: it reduces with torch, the others with the kernel."""
    group = everyone()
    kernel = CustomAllreduce(group, "cpu")
    for step in range(8):
        value = torch.ones(63 if RANK == 1 and step == 5 else 64)
        if kernel.custom_all_reduce(value) is None:
            dist.all_reduce(value, group=group)


def queue_full():
    """A worker is stuck and reads no more; the writer finds no free block."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    for step in range(40):
        if RANK == 1 and step == 6:
            stay()
        queue.broadcast_object(step)


def worker_stuck_behind_queue():
    """A worker does not take part in the model's all_reduce; the others' next message waits."""
    queue = SglangQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    for step in range(40):
        queue.broadcast_object(step)
        if RANK == 1 and step == 6:
            stay()
        dist.all_reduce(torch.ones(4))


def result_not_sent():
    """The scheduler never sends the next batch to its workers, though they have reported."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    group = everyone("results")
    for step in range(6):
        if RANK == 0 and step == 4:
            stay()
        queue.broadcast_object(step)
        dist.all_reduce(torch.ones(1), group=group)


def weights_not_received():
    """A rollout worker does not come to the broadcast of weights in Ray's NCCL group."""
    group = NCCLGroup(SIZE, RANK, "weights")
    for step in range(8):
        if RANK == 1 and step == 5:
            stay()
        group.broadcast([torch.ones(64)], BroadcastOptions())


def first_ray_collective():
    """The first call of Ray's NCCL group hangs without a word: a worker never makes it."""
    group = NCCLGroup(SIZE, RANK, "weights")
    dist.barrier()
    if RANK == 1:
        stay()
    group.allreduce([torch.ones(1)])


def trainer_never_broadcasts():
    """After a resume the trainer skips the broadcast; the servers wait."""
    group = NCCLGroup(SIZE, RANK, "refit")
    for step in range(6):
        if RANK == 0 and step == 4:
            stay()
        group.broadcast([torch.ones(64)], BroadcastOptions())


def dead_shard():
    """A shard is killed during the refit; the others wait for it."""
    group = NCCLGroup(SIZE, RANK, "refit")
    for step in range(6):
        if RANK == 1 and step == 4:
            os.kill(os.getpid(), 9)
        group.broadcast([torch.ones(64)], BroadcastOptions())


def drafter_skipped():
    """An engine whose sequence is nearly as long as allowed skips the draft model, and its experts;
    it is in the next step's agreement on the batch.
    """
    buffer, engines = Buffer(everyone("ep")), everyone("dp")
    for step in range(6):
        dist.all_reduce(torch.ones(SIZE), group=engines)
        experts(buffer)
        if RANK != 1 or step != 3:
            experts(buffer)  # the draft model's


def empty_step_left_out():
    """An engine that has scheduled no token leaves out the agreement on the batch, and enters the
    experts; the others are in the agreement.
    """
    buffer, engines = Buffer(everyone("ep")), everyone("dp")
    for step in range(6):
        if RANK != 1 or step != 4:
            dist.all_reduce(torch.ones(SIZE), group=engines)
        experts(buffer)


def finishes_early():
    """An engine has generated all of its tokens and exits; the others wait for it in the experts."""
    buffer = Buffer(everyone("ep"))
    for step in range(8):
        if RANK == 1 and step == 5:
            return
        experts(buffer)


def other_order():
    """One rank calls dispatch before an all_gather of torch, the others after it."""
    buffer, group = Buffer(everyone("ep")), everyone("indices")

    def gather():
        dist.all_gather([torch.ones(4) for _ in range(SIZE)], torch.ones(4), group=group)

    for step in range(6):
        first = RANK == 1 and step == 4
        if not first:
            gather()
        buffer.low_latency_dispatch(ROWS, CHOSEN, 128, 8)
        if first:
            gather()


def elastic_combine():
    """All ranks are in DeepEP's combine, whose network has lost its messages."""
    buffer = ElasticBuffer(everyone("ep"))
    for step in range(6):
        rows, _, _, handle, _ = buffer.dispatch(ROWS, CHOSEN)
        if step == 4:
            buffer._meeting.reached = lambda *_: False
        buffer.combine(rows, handle)


def still_initialising():
    """An engine still registers its cache while the others capture their graphs with the experts."""
    buffer = ElasticBuffer(everyone("ep"))
    dist.barrier()
    if RANK == 1:
        stay()
    buffer.dispatch(ROWS, CHOSEN)


def prefetch_check_extra():
    """A scheduler checks one prefetch more than the others, which are at the next request."""
    requests, caches = everyone("requests"), everyone("caches")
    for step in range(6):
        mark()
        dist.broadcast(torch.ones(1), 0, group=requests)
        for _ in range(2 + (RANK == 1 and step == 4)):
            dist.all_reduce(torch.ones(1), group=caches)


def aborted_on_one_rank():
    """By its own clock one rank aborts the only request, and runs no batch; the others run it."""
    requests, group = everyone("requests"), everyone("tp")
    kernel = CustomAllReduceV2(group, "cpu")
    for step in range(6):
        dist.broadcast(torch.ones(1), 0, group=requests)
        if RANK != 1 or step != 4:
            kernel.custom_all_reduce(torch.ones(64))


def source_has_no_list():
    """A scheduler dies at the length of None before it broadcasts; the others wait for it."""
    group = everyone("attention")
    for step in range(6):
        mark()
        if RANK == 1 and step == 4:
            len(None)
        dist.broadcast(torch.ones(1), 1, group=group)


def two_streams():
    """Two streams of each rank use one custom all-reduce at once: none of the kernels ends."""
    kernel = CustomAllReduceV2(everyone(), "cpu")
    for step in range(6):
        if step == 4:
            kernel._meeting.reached = lambda *_: False
        kernel.custom_all_reduce(torch.ones(64))


def memory_of_a_sub_group():
    """A rendezvous of some ranks leaves counters behind with which that of all ranks hangs."""
    import one_sided

    memory = one_sided.install()
    some = dist.new_group(list(range(SIZE - 1)))
    if RANK < SIZE - 1:
        memory.rendezvous(torch.ones(4), some).barrier()
    dist.barrier()
    one_sided.SymmetricMemory.never = True
    memory.rendezvous(torch.ones(4), dist.group.WORLD)


def freed_by_the_collector():
    """The collector of one rank frees a symmetric tensor, which is a collective; the others go on."""
    group, freed = everyone(), Meeting("free", RANK, SIZE)

    class Symmetric:
        def __del__(self):
            freed.meet()

    held = [Symmetric()]
    for step in range(6):
        if RANK == 1 and step == 4:
            held.clear()
        dist.all_reduce(torch.ones(4), group=group)


def first_allocation():
    """The first symmetric allocation is a collective in the store: one rank allocates before an
    all_reduce, the others after it.
    """
    group, store = everyone(), dist.distributed_c10d._get_default_store()

    def allocate():
        store.set(f"id{RANK}", "1")
        for rank in range(SIZE):
            store.get(f"id{rank}")

    for step in range(6):
        mark()
        if RANK == 1 and step == 4:
            allocate()
        dist.all_reduce(torch.ones(4), group=group)
    allocate()


def signal_of_another_group():
    """A wait takes the signal that another group has sent through the same slot, and the wait of that
    group hangs.
    """
    import one_sided

    memory = one_sided.install()
    pair, world = dist.new_group([0, 1]), dist.group.WORLD
    handles = [memory.rendezvous(torch.ones(4), world)]
    if RANK < 2:
        handles.append(memory.rendezvous(torch.ones(4), pair))
    for _ in range(3):
        handles[0].barrier()
    if RANK == 0:
        handles[1].put_signal(1)
    if RANK == 1:
        handles[0]._pairs["memory[0, 1]0to1"] = handles[1]._pair(0, 1, 1)
        handles[0]._take = lambda source: None  # the signal of the pair
        handles[0].wait_signal(0)
        handles[1]._pair(0, 1, 1).reached = lambda *_: False
        handles[1].wait_signal(0)
    dist.barrier()


def groups_in_other_order():
    """One receiver takes the stripes of two senders' groups in another order than the others."""
    groups = [NCCLGroup(SIZE, RANK, "stripe0"), NCCLGroup(SIZE, RANK, "stripe1")]
    for step in range(6):
        for group in groups[:: -1 if RANK == 1 and step == 4 else 1]:
            group.broadcast([torch.ones(64)], BroadcastOptions())


def driver_dies():
    """The driver's rank is killed while the others are in the model's all_reduce."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    kernel = CustomAllreduce(everyone(), "cpu")
    for step in range(8):
        queue.broadcast_object(step)
        if RANK == 0 and step == 5:
            os.kill(os.getpid(), 9)
        kernel.custom_all_reduce(torch.ones(64))


def caught_in_the_worker():
    """A worker logs the exception of its forward pass, and waits for its next message; the others
    are in the model's all_reduce.
    """
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    kernel = CustomAllreduce(everyone(), "cpu")
    for step in range(8):
        queue.broadcast_object(step)
        with contextlib.suppress(ValueError):
            if RANK == 1 and step == 5:
                raise ValueError("the logits are not numbers")
            kernel.custom_all_reduce(torch.ones(64))


def communicator_left_out():
    """A rank leaves out an all-reduce of a communicator of torchcomms."""
    comm = torchcomms.new_comm("gloo", "cpu", RANK, SIZE, "dp")
    for step in range(8):
        if RANK == 1 and step == 5:
            stay()
        comm.all_reduce(torch.ones(64), "sum", False)


def signal_not_sent():
    """A stage does not signal that its part is in its neighbour's symmetric memory."""
    import one_sided

    handle = one_sided.install().rendezvous(torch.ones(4), dist.group.WORLD)
    for step in range(6):
        if RANK == 1 and step == 4:
            stay()
        handle.put_signal((RANK + 1) % SIZE)
        handle.wait_signal((RANK - 1) % SIZE)


def window_signal_not_sent():
    """The same with a window of torch 2.15."""
    import one_sided

    one_sided.install()
    window = dist.group.WORLD.new_window(torch.ones(4))
    for step in range(6):
        if RANK == 1 and step == 4:
            stay()
        window.put(torch.ones(1), (RANK + 1) % SIZE, 0, False)
        window.wait_signal((RANK - 1) % SIZE, False)


# --- healthy programs: no word


def healthy_communicators():
    """Two communicators of torchcomms, and torch's default group."""
    comm = torchcomms.new_comm("gloo", "cpu", RANK, SIZE, "dp")
    other = torchcomms.new_comm("gloo", "cpu", RANK, SIZE, "tp")
    for step in range(12):
        comm.all_reduce(torch.ones(64), "sum", False)
        dist.all_reduce(torch.ones(2))
        other.broadcast(torch.ones(8), step % SIZE, False)
    other.barrier(False)


def healthy_experts():
    buffer = Buffer(everyone("ep"))
    for step in range(40):
        experts(buffer, torch.ones(4 + (RANK + step) % 3, 16))
        experts_low_latency(buffer)
        dist.all_reduce(torch.ones(2))


def healthy_idle_server():
    """Workers wait for a request longer than the stall timeout."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    kernel = CustomAllreduce(everyone(), "cpu")
    for step in range(8):
        if RANK == 0 and step == 5:
            stay()
        queue.broadcast_object(step)
        kernel.custom_all_reduce(torch.ones(64))


def healthy_queue_ahead():
    """The writer runs ahead as far as the queue holds, and the readers are slow."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 8)
    for step in range(40):
        queue.broadcast_object(step)
        if RANK:
            time.sleep(0.05 * RANK)


def healthy_timeouts():
    """A reader polls with a timeout, as a server does that looks after its workers."""
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, 4)
    for step in range(6):
        if RANK == 0:
            time.sleep(1)
            queue.enqueue(step)
            continue
        while True:
            try:
                queue.dequeue(timeout=0.2)
                break
            except TimeoutError:
                pass
    dist.barrier()


def healthy_caught_error():
    """One rank's call is refused before it communicates, and is repeated."""
    buffer = Buffer(everyone("ep"))
    for step in range(10):
        if RANK == 1 and step == 4:
            with contextlib.suppress(AssertionError):
                buffer.dispatch(torch.ones(4))
        experts(buffer)
    if RANK == 0:
        time.sleep(1)
    experts(buffer)


def healthy_sub_groups():
    """Experts in two halves, at different speeds, and Ray's groups of their own."""
    halves = [dist.new_group(list(range(SIZE // 2))), dist.new_group(list(range(SIZE // 2, SIZE)))]
    mine = halves[RANK >= SIZE // 2]
    buffer = Buffer(mine)
    group = NCCLGroup(SIZE, RANK, "weights")
    for _step in range(10):
        for _ in range(1 + 2 * (RANK >= SIZE // 2)):
            experts(buffer)
        group.broadcast([torch.ones(8)], BroadcastOptions())


def healthy_made_again():
    """Ray's group of one name is made for each update."""
    for step in range(5):
        group = NCCLGroup(SIZE, RANK, "update")
        group._meeting = type(group._meeting)(f"update{step}", RANK, SIZE)
        for _ in range(1 + step):
            group.broadcast([torch.ones(8)], BroadcastOptions())
    dist.barrier()


def healthy_overlap():
    """Experts in a second thread, while the main thread reduces."""
    buffer, group = Buffer(everyone("ep")), everyone("dp")

    def second():
        for _ in range(30):
            experts(buffer)

    thread = threading.Thread(target=second)
    thread.start()
    for _ in range(30):
        dist.all_reduce(torch.ones(4), group=group)
    thread.join()


def healthy_one_sided():
    """Signals and puts around a ring, and more signals than are waited for."""
    import one_sided

    handle = one_sided.install().rendezvous(torch.ones(4), dist.group.WORLD)
    window = dist.group.WORLD.new_window(torch.ones(4))
    for step in range(20):
        handle.put_signal((RANK + 1) % SIZE)
        handle.wait_signal((RANK - 1) % SIZE)
        handle.barrier(channel=step % 2)
        window.put(torch.ones(1), (RANK + 1) % SIZE, 0, False)
        if step % 2:
            window.signal((RANK + 1) % SIZE, False)
        window.wait_signal((RANK - 1) % SIZE, False)
        time.sleep(0.02 * RANK)


class Mixed:
    """Parts of a program, with a pause of each rank in each round. All ranks draw the same numbers,
    in the same order.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)
        some = list(range((SIZE + 1) // 2))
        self.some, self.is_some = dist.new_group(some), RANK in some
        self.experts_of_some = Buffer(self.some) if self.is_some else None
        self.buffer, self.elastic = Buffer(everyone("ep")), ElasticBuffer(everyone("ep2"))
        self.kernel = CustomAllreduce(everyone(), "cpu")
        self.second = CustomAllReduceV2(everyone(), "cpu")
        chunks = self.draw.randint(2, 8)
        self.queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1024, chunks)
        self.actors = NCCLGroup(SIZE, RANK, "weights")

    def rounds(self, most, longest=0.3):
        for number in range(self.draw.randint(1, most)):
            time.sleep([self.draw.uniform(0, longest) for _ in range(SIZE)][RANK])
            yield number

    def experts(self):
        for _ in self.rounds(6):
            rows = torch.ones(1 + (RANK * self.draw.randint(0, 9)) % 5, 16)
            if self.draw.random() < 0.5:
                experts(self.buffer, rows)
            else:
                experts_low_latency(self.buffer)

    def elastic_experts(self):
        for _ in self.rounds(6):
            rows, _, _, handle, _ = self.elastic.dispatch(ROWS, CHOSEN)
            self.elastic.combine(rows, handle)
        self.elastic.barrier()

    def kernels(self):
        for _ in self.rounds(12, 0.05):
            value = torch.ones(self.draw.choice((63, 64, 4096)))
            if self.kernel.custom_all_reduce(value) is None:
                dist.all_reduce(value)
            self.second.custom_all_reduce(torch.ones(64))

    def messages(self):
        for number in self.rounds(20, 0.1):
            self.queue.broadcast_object(number)

    def weights(self):
        for number in self.rounds(6):
            self.actors.broadcast([torch.ones(8 << number)], BroadcastOptions())
        self.actors.barrier()

    def torch_alone(self):
        for _ in self.rounds(6):
            dist.all_gather([torch.ones(2) for _ in range(SIZE)], torch.ones(2))
            dist.broadcast(torch.ones(4), self.draw.randrange(SIZE))
            dist.barrier()

    def some_ranks(self):
        for _ in self.rounds(8):
            if self.is_some:
                experts(self.experts_of_some)
                dist.all_reduce(torch.ones(2), group=self.some)

    def caught_error(self):
        if self.draw.randrange(SIZE) == RANK:
            with contextlib.suppress(AssertionError):
                self.buffer.dispatch(torch.ones(4))
        experts(self.buffer)

    def long_pause(self):
        """Shorter than the stall timeout."""
        late, seconds = self.draw.randrange(SIZE), self.draw.uniform(1, 3.5)
        if late == RANK:
            time.sleep(seconds)
        self.draw.choice((self.experts, self.kernels, self.weights, self.torch_alone))()

    def idle_server(self):
        """Longer than the stall timeout."""
        seconds = self.draw.uniform(6, 9)
        if RANK == 0:
            time.sleep(seconds)
        self.queue.broadcast_object("request")

    def second_thread(self):
        thread = threading.Thread(
            target=lambda: [self.elastic.combine(ROWS, None) for _ in range(20)]
        )
        thread.start()
        for _ in range(10):
            dist.all_reduce(torch.ones(4))
        thread.join()


def healthy_random():
    """Three to six parts that ``PAST_TORCH_SEED`` chooses."""
    mixed = Mixed(os.environ["PAST_TORCH_SEED"])
    parts = [
        *(mixed.experts, mixed.elastic_experts, mixed.kernels, mixed.messages, mixed.weights),
        *(mixed.torch_alone, mixed.some_ranks, mixed.caught_error, mixed.long_pause),
        *(mixed.idle_server, mixed.second_thread),
    ]
    for part in mixed.draw.choices(parts, k=mixed.draw.randint(3, 6)):
        part()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    Path(os.environ["PAST_TORCH_DIR"], f"done.{RANK}").touch()
    if dist.is_initialized():
        dist.destroy_process_group()
