"""The facts in a collective's Python stack, read once for each place in the program.

A *marker frame* runs a function of torch whose local variables say more about the collective. A
stack through FSDP2's ``unshard``, called in a module's forward at train.py:57, has the source
train.py:57 and the marker "FSDP2 block": how many frames outwards the frame is whose variable
``self`` is the block. The variable's value is read at each collective, the rest once.

The torch files and functions named here are those of 2.6.0, 2.13.0 and 2.15.0. A stack without any
of them still yields the user's line.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from commlens import native
from commlens.model.collective import Frame, FrameKind
from commlens.model.trace import Phase
from commlens.tap.running_frames import kind_of_file, user_frame
from commlens.tracing.attribution.recomputations import recomputes

log = logging.getLogger("commlens")

_CACHE_LIMIT = 20_000
_LOCALS_ARE_A_COPY = sys.version_info < (3, 13)

_PROGRAM = (FrameKind.USER, FrameKind.LIBRARY)

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120
_GRAPH = "autograd/graph.py"
_OPTIMIZER = "optim/optimizer.py"
_REDISTRIBUTE = "distributed/tensor/_redistribute.py"
_FSDP1 = ("distributed/fsdp/_flat_param.py", "distributed/fsdp/_runtime_utils.py")
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
_PACKET_DEPTH = 6  # the frames, from the innermost one on, among which a packet's call is
_FORWARD_CHUNK = "fwd_chunk_id"
_BACKWARD_CHUNK = "bwd_chunk_id"
# files of torch through which calls go whose names a program does not write: autograd's, the
# dispatcher's, those of compiled code
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


class _Marker(NamedTuple):
    """Functions of torch whose local variables describe the collective that they issue."""

    kind: str
    files: tuple[str, ...]  # how the path of their file in torch begins
    variables: tuple[str, ...]
    argument: str = ""  # that they must have
    functions: tuple[str, ...] = ()  # their possible names; none: any

    def fits(self, file: str, code: CodeType) -> bool:
        """Return whether a frame with this code, in this file of torch, is of the kind."""
        return (
            file.startswith(self.files)
            and (not self.argument or self.argument in code.co_varnames[: code.co_argcount])
            and (not self.functions or code.co_name in self.functions)
            and self.variables[0] in code.co_varnames
        )


_MARKERS = (
    _Marker(
        kind="FSDP2 block",
        files=(
            "distributed/fsdp/_fully_shard/_fsdp_param_group.py",
            "distributed/_composable/fsdp/_fsdp_param_group.py",
        ),
        variables=("self",),
        argument="self",
    ),
    _Marker(
        kind="FSDP2 state",
        files=(
            "distributed/fsdp/_fully_shard/_fsdp_state.py",
            "distributed/_composable/fsdp/_fsdp_state.py",
        ),
        variables=("self",),
        functions=("_pre_backward",),
    ),
    _Marker(kind="FSDP unit", files=_FSDP1, variables=("handle",), argument="handle"),
    _Marker(kind="FSDP unit", files=_FSDP1[:1], variables=("self",), argument="self"),
    _Marker(
        kind="DDP bucket",
        files=("distributed/algorithms/ddp_comm_hooks/",),
        variables=("bucket",),
        argument="bucket",
    ),
    _Marker(
        kind="message",
        files=(_C10D,),
        variables=("p2p_op",),
        functions=("batch_isend_irecv",),
    ),
    _Marker(
        kind="message",
        files=("distributed/pipelining/schedules.py",),
        variables=("p",),
        functions=("_batch_p2p", "<listcomp>"),
    ),
    _Marker(
        kind="microbatch", files=(_STAGE,), variables=(_FORWARD_CHUNK,), argument=_FORWARD_CHUNK
    ),
    _Marker(
        kind="microbatch", files=(_STAGE,), variables=(_BACKWARD_CHUNK,), argument=_BACKWARD_CHUNK
    ),
    _Marker(
        kind="redistribution",
        files=(_REDISTRIBUTE,),
        variables=("current_spec", "target_spec", "is_explicit"),
        functions=("redistribute_local_tensor",),
    ),
    _Marker(
        kind="DTensor op",
        files=("distributed/tensor/_dispatch.py",),
        variables=("op_call",),
        argument="op_call",
    ),
)
"""The innermost frame of each kind is read: it is a *marker frame*."""


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


@dataclass(slots=True, eq=False)
class StackInfo:
    """The facts of one stack."""

    index: int  # among all stacks, to tell them apart
    source: Frame | None  # the user's line
    through: str | None  # torch's function that this line called: "clip_grad_norm_"
    engine_calls: bool  # issued by C++ inside the engine, such as DDP's reducer
    # from the innermost frame on; kept alive, since they are looked up by id
    codes: list[CodeType] = field(default_factory=list)
    # of the innermost frame that runs a backward pass, a checkpointed function again, or an
    # optimizer's step
    phase: Phase | None = None
    # "_c10d_functional.all_reduce", if Python called a functional op
    packet: str | None = None
    explicit: bool = False  # the program asked for the redistribution
    may_be_functional: bool = True  # the program may wait for its result by a tensor
    returns_work: bool = True  # Python gets its Work, so the program may wait for it by that
    # by kind of marker: how many frames outwards from the caller of the tap's kernel, and the names
    # of the variables
    markers: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def values(self, kind: str, frame: FrameType | None) -> tuple[Any, ...]:
        """Return the variables of the marker frame of this kind in the stack whose innermost frame
        is ``frame``; None for missing ones.
        """
        depth, names = self.markers[kind]
        # without codes, forget_codes was called
        if _local_values is not None and depth < len(self.codes):
            values: tuple[Any, ...] = _local_values(self.codes[depth], names)
            return values
        for _ in range(depth):
            frame = frame.f_back if frame is not None else None
        return values_of(frame, names) if frame is not None else (None,) * len(names)


class StackInfos:
    """The stacks seen so far."""

    def __init__(self) -> None:
        self._known: dict[Any, StackInfo] = {}
        self._count = 0

    def find(self, frame: FrameType | None, op: str) -> StackInfo:
        """Return the facts of the calling stack, for a call of dispatcher op ``op``.

        The op is in the key, because ``packet`` is read from a variable: one line may call several
        functional ops, as in a loop over them.

        Args:
            frame: the innermost frame that counts. The native engine's key is of all frames, but
                those of commlens inside it are the same each time.
            op: the op.
        """
        key = (op, _stack_key()) if _stack_key is not None else _key_of(frame, op)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _CACHE_LIMIT:
                self._known = {}
            known = self._known[key] = self._read(frame)
        return known

    def forget_codes(self) -> None:
        """Release the program's code objects, to which dynamo attaches compiled code."""
        for info in self._known.values():
            info.codes = []
        self._known = {}

    def _read(self, frame: FrameType | None) -> StackInfo:
        source = user_frame(frame)
        through = _through(frame, called_by_user=source is not None)
        info = StackInfo(self._count, source, through, _is_called_by_engine(frame))
        self._count += 1
        while frame is not None:  # from the innermost one outwards
            info.codes.append(frame.f_code)
            if info.phase is None and recomputes(frame.f_code):
                info.phase = Phase.RECOMPUTATION
            if inside := _file_in_torch(frame):
                _read_torch_frame(info, inside, frame)
            frame = frame.f_back
        is_c10d = bool(info.codes) and info.codes[0].co_filename.endswith(_C10D)
        info.may_be_functional = info.packet is not None or not is_c10d
        info.returns_work = info.packet is None and not info.engine_calls and bool(info.codes)
        return info


def _read_torch_frame(info: StackInfo, file: str, frame: FrameType) -> None:
    """Note the facts in a frame, whose code is the last of ``info.codes`` so far. The frames inside
    it have been read before.
    """
    function = frame.f_code.co_name
    _note_markers(info, file, frame.f_code)
    if file == _OPS:
        is_near = len(info.codes) <= _PACKET_DEPTH
        if info.packet is None and is_near and function == "__call__":
            info.packet = _packet_name(frame)
    elif _runs_engine(frame) or (file == _STAGE and _runs_backward(frame.f_code)):
        info.phase = info.phase or Phase.BACKWARD
    elif _wraps_step(frame):
        info.phase = info.phase or Phase.OPTIMIZER
    elif file == _REDISTRIBUTE and function in ("forward", "backward"):
        # The program asked if no DTensor op did inside of this function. The frames outside of it
        # have not been read yet, so a DTensor op there does not count.
        info.explicit = info.explicit or (
            "redistribution" in info.markers and "DTensor op" not in info.markers
        )


def _key_of(frame: FrameType | None, op: str) -> tuple[Any, ...]:
    """Return a key that the stacks of one place share: code and instruction of each frame."""
    key: list[Any] = [op]
    add = key.append
    while frame is not None:
        add(id(frame.f_code))
        add(frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


def _note_markers(info: StackInfo, file: str, code: CodeType) -> None:
    """Note for which kinds the frame that was read last is the innermost marker frame."""
    for marker in _MARKERS:
        if marker.kind not in info.markers and marker.fits(file, code):
            info.markers[marker.kind] = len(info.codes) - 1, marker.variables


def _runs_backward(code: CodeType) -> bool:
    """Return whether a stage's method belongs to the backward pass: FSDP's work after it is done
    outside of the engine.
    """
    arguments = code.co_varnames[: code.co_argcount]
    return _BACKWARD_CHUNK in arguments or code.co_name == "perform_reduce_grad"


def _file_in_torch(frame: FrameType) -> str:
    """Return the path of a frame's file in torch; empty for any other file."""
    file = frame.f_code.co_filename
    return file[len(_TORCH) :] if file.startswith(_TORCH) else ""


def _runs_engine(frame: FrameType) -> bool:
    """Return whether a frame runs a backward pass."""
    return frame.f_code.co_name == "_engine_run_backward" and _file_in_torch(frame) == _GRAPH


def _wraps_step(frame: FrameType) -> bool:
    """Return whether a frame runs an optimizer's step."""
    return frame.f_code.co_name == "wrapper" and _file_in_torch(frame) == _OPTIMIZER


def _is_called_by_engine(frame: FrameType | None) -> bool:
    """Return whether the engine's C++ issues the collective, and no Python inside it."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OWN) or _file_in_torch(frame) in _DISPATCHING
    ):
        frame = frame.f_back
    return frame is not None and _runs_engine(frame)


def running_steps(frame: FrameType | None) -> int:
    """Count the optimizer steps on a stack: two if one wraps another (ZeRO) or calls its base
    class's.
    """
    count = 0
    while frame is not None:
        count += _wraps_step(frame)
        frame = frame.f_back
    return count


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
    """Return the functional op that a frame of ``torch.ops`` calls; None for any other op."""
    (operator,) = values_of(frame, ("self",))
    name = str(
        getattr(operator, "_qualified_op_name", "") or getattr(operator, "_name", "")
    ).replace("::", ".")
    return name if name.startswith(("_c10d_functional.", "c10d_functional.", "_dtensor.")) else None


def _through(frame: FrameType | None, *, called_by_user: bool) -> str | None:
    """Return torch's function that the line of the user or of a library called, such as
    ``clip_grad_norm_``; None if that is the collective's own, such as ``all_reduce``.
    """
    outermost: FrameType | None = None  # of torch's frames
    while frame is not None:
        file = _file_in_torch(frame)
        if file == _MODULE:
            outermost = None  # do not name functions that a module calls
        elif file and not (
            file in _WRAPPERS or frame.f_code.co_name == "_no_grad_wrapper" or _wraps_step(frame)
        ):
            outermost = frame
        elif not file and kind_of_file(frame.f_code.co_filename) in _PROGRAM:
            break
        frame = frame.f_back
    file = _file_in_torch(outermost) if outermost is not None else ""
    if outermost is None or file.startswith(_NOT_CALLED_BY_NAME):
        return None
    if not called_by_user and file.startswith(_DCP):
        return "async_save"  # in its thread or process, in which no user's line runs
    name: str = getattr(outermost.f_code, "co_qualname", outermost.f_code.co_name)
    return name.replace(".<locals>", "").removesuffix(".__init__")
