"""A stand-in for torchcomms, see tests/past_torch/README.md."""

from meeting import Meeting


def of_pybind11(parameters):
    """Let a method have no signature but the first line of its docstring, as pybind11's do."""

    def wrap(method):
        def compiled(*args, **kwargs):
            return method(*args, **kwargs)

        compiled.__signature__ = "none"  # inspect.signature raises
        compiled.__doc__ = (
            f"{method.__name__}(self: torchcomms._comms.TorchComm, {parameters}async_op: bool, hints:"
            " collections.abc.Mapping[str, str] | None = None, timeout: datetime.timedelta | None ="
            " None) -> torchcomms._comms.TorchWork\n\nWhat it does."
        )
        return compiled

    return wrap


class TorchComm:
    def __init__(self, rank, size, name):
        self._rank, self._size, self._name = rank, size, name
        self._meeting = Meeting(f"torchcomms{name}", rank, size)
        self._pairs = {}

    def get_rank(self):
        return self._rank

    def get_size(self):
        return self._size

    def get_name(self):
        return self._name

    def get_backend(self):
        return "gloo"

    def _meet(self):
        self._meeting.meet()

    @of_pybind11("tensor: torch.Tensor, op: torchcomms._comms.ReduceOp, ")
    def all_reduce(self, tensor, op, async_op, hints=None, timeout=None):
        if tensor is None:
            raise TypeError("incompatible function arguments")
        self._meet()

    @of_pybind11("tensor: torch.Tensor, root: typing.SupportsInt, ")
    def broadcast(self, tensor, root, async_op, hints=None, timeout=None):
        self._meet()

    @of_pybind11("")
    def barrier(self, async_op, hints=None, timeout=None):
        self._meet()

    def _pair(self, source, destination, member):
        name = f"torchcomms{self._name}{source}to{destination}"
        return self._pairs.setdefault(name, Meeting(name, member, 2))

    @of_pybind11("tensor: torch.Tensor, dst: typing.SupportsInt, ")
    def send(self, tensor, dst, async_op, hints=None, timeout=None):
        self._pair(self._rank, dst, 0).meet()

    @of_pybind11("tensor: torch.Tensor, src: typing.SupportsInt, ")
    def recv(self, tensor, src, async_op, hints=None, timeout=None):
        self._pair(src, self._rank, 1).meet()


def new_comm(backend, device, rank, size, name):
    """The real one takes rank and size from the environment."""
    return TorchComm(rank, size, name)
