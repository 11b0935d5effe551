"""The facts in a collective's Python stack, read once for each place in the program.

The torch files and functions named here are those of 2.6.0, 2.13.0 and 2.15.0. A stack without any
of them still yields the user's line.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch

from commlens import native
from commlens.model.collective import Frame, FrameKind
from commlens.tap.running_frames import kind_of_file
from commlens.tracing.attribution.recomputations import recomputes

log = logging.getLogger("commlens")

_CACHE_LIMIT = 20_000
_LOCALS_ARE_A_COPY = sys.version_info < (3, 13)

ENGINE = "engine"
RECOMPUTE = "recompute"

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120
_GRAPH = "autograd/graph.py"
_OPTIMIZER = "optim/optimizer.py"
_REDISTRIBUTE = "distributed/tensor/_redistribute.py"
_DISPATCH = "distributed/tensor/_dispatch.py"
_FSDP = (
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    "distributed/_composable/fsdp/_fsdp_param_group.py",
)
_FSDP_STATE = (
    "distributed/fsdp/_fully_shard/_fsdp_state.py",
    "distributed/_composable/fsdp/_fsdp_state.py",
)
_FSDP1 = ("distributed/fsdp/_flat_param.py", "distributed/fsdp/_runtime_utils.py")
_DDP_HOOKS = "distributed/algorithms/ddp_comm_hooks/"
_C10D = "distributed/distributed_c10d.py"
_OPS = "_ops.py"
# frames that our own dispatch mode adds below the issuer
_DISPATCHING = (_OPS, "utils/_python_dispatch.py")
_MODULE = "nn/modules/module.py"
_WRAPPERS = (
    "_compile.py",
    "_dynamo/eval_frame.py",
    "utils/_contextlib.py",
    "distributed/c10d_logger.py",
    "distributed/checkpoint/logger.py",
    "distributed/checkpoint/utils.py",
)
_DCP = "distributed/checkpoint/"
_STAGE = "distributed/pipelining/stage.py"
_SCHEDULES = "distributed/pipelining/schedules.py"
_FORWARD_CHUNK = "fwd_chunk_id"
_BACKWARD_CHUNK = "bwd_chunk_id"
_NOT_CALLED_BY_NAME = (
    "autograd/",
    "_tensor.py",
    "_library/",
    "_ops.py",
    "distributed/tensor/_dispatch.py",
    _C10D,
    "distributed/_functional_collectives.py",
    "_functorch/",
    "_dynamo/",
    "_inductor/",
    "fx/",
)


_stack_key: Any = None
_local_values: Any = None


@functools.lru_cache(maxsize=1)
def use_native_engine() -> None:
    """Read frames with the native engine, if it is built and wanted: it makes no Python objects of
    them.
    """
    global _stack_key, _local_values
    if os.environ.get("COMMLENS_ENGINE", "").strip().lower() == "python":
        return
    try:
        module = native.load()
    except Exception as error:
        log.debug(
            "commlens: the native engine cannot be loaded: %s: %s", type(error).__name__, error
        )
        return
    if hasattr(module, "stack_key"):  # not with every Python
        _stack_key, _local_values = module.stack_key, module.local_values


class StackInfo:
    """The facts of one stack. Depths count frames outwards from the caller of the tap's kernel; -1
    means absent.
    """

    __slots__ = (
        "chunk_depth",
        "chunk_name",
        "codes",
        "dispatch_depth",
        "engine_calls",
        "explicit",
        "fsdp1_depth",
        "fsdp_depth",
        "fsdp_state_depth",
        "hook_depth",
        "in_optimizer",
        "in_pass",
        "index",
        "may_be_functional",
        "message_depth",
        "message_name",
        "packet",
        "redistribute_depth",
        "returns_work",
        "source",
        "through",
    )

    def __init__(self, index: int, codes: list[CodeType]) -> None:
        self.index = index
        self.codes = codes  # kept alive, since they are looked up by id
        self.source: Frame | None = None
        self.through: str | None = None
        self.in_pass: str | None = None  # ENGINE or RECOMPUTE, whichever is innermost
        self.in_optimizer = False
        self.engine_calls = False  # issued by C++ inside the engine, such as DDP's reducer
        # "_c10d_functional.all_reduce", if Python called a functional op
        self.packet: str | None = None
        self.fsdp_depth = self.fsdp_state_depth = self.fsdp1_depth = self.hook_depth = (
            self.redistribute_depth
        ) = self.dispatch_depth = -1
        self.explicit = False
        # waited for by tensor; or by the Work that Python gets
        self.may_be_functional = self.returns_work = True
        # of the function that issues a P2POp; of a pipeline stage's for one microbatch
        self.message_depth = self.chunk_depth = -1
        # the local variables that hold the P2POp, or the microbatch's number
        self.message_name = self.chunk_name = ""


class StackInfos:
    """The stacks seen so far."""

    def __init__(self) -> None:
        self._known: dict[Any, StackInfo] = {}
        self._count = 0

    def find(self, frame: FrameType | None, op: str) -> StackInfo:
        """Return the facts of the stack that ends at ``frame``, for a call of dispatcher op
        ``op``.
        """
        packed = (op, _stack_key()) if _stack_key is not None else _key_of(frame, op)
        known = self._known.get(packed)
        if known is None:
            if len(self._known) >= _CACHE_LIMIT:
                self._known = {}
            known = self._known[packed] = self._read(frame)
        return known

    def forget_codes(self) -> None:
        """Release the program's code objects, to which dynamo attaches compiled code."""
        for info in self._known.values():
            info.codes = []
        self._known = {}

    def _read(self, frame: FrameType | None) -> StackInfo:
        info = StackInfo(self._count, [])
        self._count += 1
        library: Frame | None = None
        outer_torch: FrameType | None = None  # the outermost torch frame so far
        depth = 0
        issued_by_python = False
        while frame is not None:
            info.codes.append(frame.f_code)
            if info.in_pass is None and recomputes(frame.f_code):
                info.in_pass = RECOMPUTE
            file = frame.f_code.co_filename
            if file.startswith(_TORCH):
                inside = file[len(_TORCH) :]
                if info.source is None and library is None:
                    if inside == _MODULE:
                        outer_torch = None  # do not name functions that a module calls
                    elif (
                        inside not in _WRAPPERS
                        and frame.f_code.co_name != "_no_grad_wrapper"
                        and not _wraps_step(inside, frame)
                    ):
                        outer_torch = frame
                info.engine_calls = info.engine_calls or (
                    not issued_by_python and _runs_engine(inside, frame)
                )
                issued_by_python = issued_by_python or inside not in _DISPATCHING
                self._torch_frame(info, inside, frame, depth)
            else:
                issued_by_python = issued_by_python or not file.startswith(_OWN)
            if info.source is None and not file.startswith(_TORCH):
                kind = kind_of_file(file)
                if kind is FrameKind.USER:
                    info.source = Frame(file, frame.f_lineno or 0, frame.f_code.co_name, kind)
                elif kind is FrameKind.LIBRARY and library is None:
                    library = Frame(file, frame.f_lineno or 0, frame.f_code.co_name, kind)
            frame = frame.f_back
            depth += 1
        info.source = info.source or library
        info.through = _through(outer_torch, called_by_user=info.source is not None)
        info.may_be_functional = (
            info.packet is not None
            or not info.codes
            or not info.codes[0].co_filename.endswith(_C10D)
        )
        info.returns_work = info.packet is None and not info.engine_calls and bool(info.codes)
        return info

    def _torch_frame(self, info: StackInfo, file: str, frame: FrameType, depth: int) -> None:
        function = frame.f_code.co_name
        if file == _OPS:
            if info.packet is None and len(info.codes) <= 6 and function == "__call__":
                info.packet = _packet_name(frame)
        elif file == _GRAPH:
            if _runs_engine(file, frame):
                info.in_pass = info.in_pass or ENGINE
        elif file == _OPTIMIZER:
            # Not if the optimizer runs a backward pass, as with a closure.
            info.in_optimizer = info.in_optimizer or (
                info.in_pass is None and _wraps_step(file, frame)
            )
        elif file == _STAGE:
            self._stage_frame(info, frame, depth)
        elif file == _C10D:
            if function == "batch_isend_irecv":
                info.message_depth, info.message_name = depth, "p2p_op"
        elif file == _SCHEDULES:
            if (
                info.message_depth < 0
                and function in ("_batch_p2p", "<listcomp>")
                and "p" in frame.f_code.co_varnames
            ):
                info.message_depth, info.message_name = depth, "p"
        elif file == _REDISTRIBUTE:
            if function == "redistribute_local_tensor" and info.redistribute_depth < 0:
                info.redistribute_depth = depth
            elif (
                function in ("forward", "backward")
                and info.redistribute_depth >= 0
                and info.dispatch_depth < 0
            ):
                info.explicit = True
        elif file == _DISPATCH:
            if (
                info.dispatch_depth < 0
                and "op_call" in frame.f_code.co_varnames[: frame.f_code.co_argcount]
            ):
                info.dispatch_depth = depth
        else:
            self._wrapper_frame(info, file, frame, depth)

    def _wrapper_frame(self, info: StackInfo, file: str, frame: FrameType, depth: int) -> None:
        """Note a frame of FSDP2, FSDP or DDP's hooks."""
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if file in _FSDP:
            if info.fsdp_depth < 0 and "self" in names:
                info.fsdp_depth = depth
        elif file in _FSDP_STATE:
            if info.fsdp_state_depth < 0 and frame.f_code.co_name == "_pre_backward":
                info.fsdp_state_depth = depth
        elif file in _FSDP1:
            if info.fsdp1_depth < 0 and (
                "handle" in names or (file == _FSDP1[0] and "self" in names)
            ):
                info.fsdp1_depth = depth
        elif file.startswith(_DDP_HOOKS) and info.hook_depth < 0 and "bucket" in names:
            info.hook_depth = depth

    def _stage_frame(self, info: StackInfo, frame: FrameType, depth: int) -> None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if info.chunk_depth < 0 and (_FORWARD_CHUNK in names or _BACKWARD_CHUNK in names):
            info.chunk_depth = depth
            info.chunk_name = _FORWARD_CHUNK if _FORWARD_CHUNK in names else _BACKWARD_CHUNK
        if _BACKWARD_CHUNK in names or frame.f_code.co_name == "perform_reduce_grad":
            # FSDP's work after backward is done outside of the engine
            info.in_pass = info.in_pass or ENGINE


def _key_of(frame: FrameType | None, op: str) -> tuple[Any, ...]:
    key: list[Any] = [op]
    add = key.append
    while frame is not None:
        add(id(frame.f_code))
        add(frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


def _runs_engine(file: str, frame: FrameType) -> bool:
    return file == _GRAPH and frame.f_code.co_name == "_engine_run_backward"


def _wraps_step(file: str, frame: FrameType) -> bool:
    return file == _OPTIMIZER and frame.f_code.co_name == "wrapper"


def running_steps(frame: FrameType | None) -> int:
    """Count the optimizer steps on a stack: two if one wraps another (ZeRO) or calls its base
    class's.
    """
    count = 0
    while frame is not None:
        file = frame.f_code.co_filename
        count += file.startswith(_TORCH) and _wraps_step(file[len(_TORCH) :], frame)
        frame = frame.f_back
    return count


def local_values(
    info: StackInfo, frame: FrameType | None, depth: int, names: tuple[str, ...]
) -> tuple[Any, ...]:
    """Return the values of local variables at a depth of a stack that starts at ``frame``, None for
    missing ones.
    """
    if _local_values is not None and depth < len(info.codes):
        values: tuple[Any, ...] = _local_values(info.codes[depth], names)
        return values
    for _ in range(depth):
        frame = frame.f_back if frame is not None else None
    return values_of(frame, names) if frame is not None else (None,) * len(names)


def values_of(frame: FrameType, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of a frame's local variables.

    Before Python 3.13, reading a frame's locals leaves a copy on the frame that keeps tensors alive
    until the function returns, so it is cleared. (Debuggers refresh it before they use it.)
    """
    values = frame.f_locals
    found = tuple([values.get(name) for name in names])
    if _LOCALS_ARE_A_COPY:
        values.clear()
    return found


def _packet_name(frame: FrameType) -> str | None:
    (operator,) = values_of(frame, ("self",))
    name = str(
        getattr(operator, "_qualified_op_name", "") or getattr(operator, "_name", "")
    ).replace("::", ".")
    return name if name.startswith(("_c10d_functional.", "c10d_functional.", "_dtensor.")) else None


def _through(frame: FrameType | None, *, called_by_user: bool) -> str | None:
    """Return the torch function that the user's line called; None if it is torch.distributed's
    function for this op.
    """
    if frame is None:
        return None
    file = frame.f_code.co_filename[len(_TORCH) :]
    name: str = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    if file.startswith(_NOT_CALLED_BY_NAME):
        return None
    if not called_by_user and file.startswith(_DCP):
        return "async_save"  # in its thread or process, in which no user's line runs
    return name.replace(".<locals>", "").removesuffix(".__init__")
