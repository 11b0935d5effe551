"""A stand-in for the message queue in shared memory, see tests/past_torch/README.md."""

import pickle
import time

import torch.distributed as dist
from meeting import Meeting, folder


class SharedMemory:
    def __init__(self, name):
        self.name = name


class ShmRingBuffer:
    def __init__(self, n_reader, max_chunk_bytes, max_chunks, name):
        self.n_reader, self.max_chunks, self.shared_memory = (
            n_reader,
            max_chunks,
            SharedMemory(name),
        )


class MessageQueue:
    """Member 0 of the meeting counts the messages written, the others those that they have read."""

    def __init__(
        self,
        n_reader,
        n_local_reader,
        local_reader_ranks=None,
        max_chunk_bytes=1024,
        max_chunks=10,
        name="",
    ):
        self.buffer = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks, name)
        self.local_reader_ranks = local_reader_ranks or list(range(n_local_reader))
        self._is_writer, self._is_local_reader, self.local_reader_rank = True, False, -1
        self._meeting = Meeting(f"queue{name}", 0, 1 + n_local_reader)

    @staticmethod
    def create_from_handle(handle, rank):
        self = MessageQueue.__new__(MessageQueue)
        n_reader, chunk, chunks, name, ranks = handle
        self.buffer = ShmRingBuffer(n_reader, chunk, chunks, name)
        self._is_writer, self._is_local_reader = False, True
        self.local_reader_rank = ranks.index(rank)
        self._meeting = Meeting(f"queue{name}", 1 + self.local_reader_rank, 1 + n_reader)
        return self

    @staticmethod
    def create_from_process_group(pg, max_chunk_bytes, max_chunks, writer_rank=0, name="q"):
        rank, size = dist.get_rank(pg), dist.get_world_size(pg)
        readers = [each for each in range(size) if each != writer_rank]
        if rank == writer_rank:
            return MessageQueue(size - 1, size - 1, readers, max_chunk_bytes, max_chunks, name)
        return MessageQueue.create_from_handle(
            (size - 1, max_chunk_bytes, max_chunks, name, readers), rank
        )

    def _wait(self, number, members, timeout):
        end = time.monotonic() + (90 if timeout is None else timeout)
        while not self._meeting.reached(number, members):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.002)

    def enqueue(self, obj, timeout=None):
        number = self._meeting.calls + 1
        self._wait(number - self.buffer.max_chunks, range(1, self._meeting.size), timeout)
        (folder() / f"{self.buffer.shared_memory.name}.{number}").write_bytes(pickle.dumps(obj))
        self._meeting.arrive()

    def dequeue(self, timeout=None, cancel=None, indefinite=False):
        number = self._meeting.calls + 1
        self._wait(number, [0], timeout)
        self._meeting.arrive()
        return pickle.loads((folder() / f"{self.buffer.shared_memory.name}.{number}").read_bytes())

    def broadcast_object(self, obj=None):
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()
