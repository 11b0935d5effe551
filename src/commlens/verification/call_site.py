"""Name an operation for the user: the library function that the user's line called, and that line.

The parts of torch and Accelerate that communicate are known by their files (torch 2.6 to 2.15,
Accelerate 1.15). On another version the name may be that of an inner function; the line is right in
any case.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import NamedTuple

from commlens.model.collective import FrameKind
from commlens.tap import backward_caller
from commlens.tap.running_frames import kind_of_file

_MAX_FRAMES = 400  # of a deeper stack, only the innermost frames are read
_WRAPPERS = frozenset(
    {
        "wrapper",
        "wrapped",
        "inner",
        "_fn",
        "<lambda>",
        "decorate_context",
        "__call__",
        "_wrapped_call_impl",
        "_call_impl",
        "_no_grad_wrapper",
        "__enter__",
        "__exit__",
        "compile_wrapper",
        "apply",
    }
)
_DDP = "torch.nn.parallel.distributed"
_DDP_BACKWARD = "torch.nn.parallel.DistributedDataParallel (backward)"
_FSDP = {
    "torch.distributed.fsdp.fully_shard": ("torch.distributed.fsdp._fully_shard",),
    "torch.distributed.fsdp.FullyShardedDataParallel": (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch.distributed.fsdp._runtime_utils",
        "torch.distributed.fsdp._flat_param",
    ),
}
_ACCELERATE = "accelerate.utils.operations"


class _Step(NamedTuple):
    """A frame of a library."""

    kind: FrameKind
    module: str
    function: str  # with its class, if any: "Accelerator.gather"
    frame: FrameType

    @property
    def plain(self) -> str:
        return self.function.rpartition(".")[2]


def call_site(frame: FrameType | None, op: str) -> tuple[str, str]:
    """Return the name and the line of an operation, such as
    ``("accelerate.utils.operations.broadcast", "train.py:21 in main")``.

    The name is ``torch.distributed.<op>`` if the user's line issued the op directly. The line is
    empty if no frame is the user's.

    Args:
        frame: the innermost frame; None in a C++ thread.
        op: the op that was issued.
    """
    steps: list[_Step] = []
    without_frames = frame is None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        kind = kind_of_file(file)
        if kind is FrameKind.USER and not file.startswith("<"):
            return _name(steps, op), _place(file, frame.f_lineno, function)
        if kind in (FrameKind.TORCH, FrameKind.LIBRARY) and (module := _module(file)):
            steps.append(_Step(kind, module, function, frame))
        frame = frame.f_back
    # DDP's reducer issues all_reduce in a C++ thread (autograd's, on an accelerator).
    name = _DDP_BACKWARD if without_frames and op == "all_reduce" else _name(steps, op)
    # in a thread of autograd: the line that called backward()
    for file, line, function in backward_caller.frames(backward_caller.number()):
        if kind_of_file(file) is FrameKind.USER and not file.startswith("<"):
            return name, _place(file, line, function)
    return name, ""


def _place(file: str, line: int, function: str) -> str:
    return f"{os.path.basename(file)}:{line} in {function}"  # noqa: PTH119


def _name(steps: list[_Step], op: str) -> str:
    """Return the name of the part of torch that communicates, else of the library closest to
    torch, else of the outermost public torch.distributed function.

    Args:
        steps: innermost first.
        op: the op that was issued.
    """
    if steps and (name := _sharding(steps) or _library(steps)):
        return name
    for step in reversed(steps):
        if (
            step.kind is FrameKind.TORCH
            and _is_public(step)
            and step.module.startswith(("torch.distributed", "torch.nn.utils"))
        ):
            return _full_name(step)
    return f"torch.distributed.{op}"


def _sharding(steps: list[_Step]) -> str:
    """Return the name of DDP, FSDP, DTensor or tensor parallelism; "" for none."""
    for name, modules in _FSDP.items():
        if inside := [step.plain for step in steps if step.module.startswith(modules)]:
            return f"{name}{_phase(inside)}"
    phase = next((step.plain for step in steps if step.module == _DDP), None)
    if phase is not None:
        return (
            f"torch.nn.parallel.DistributedDataParallel{' (forward)' if 'forward' in phase else ''}"
        )
    if steps[0].module == "torch.autograd.graph":
        return _DDP_BACKWARD  # C++ calls DDP's reducer
    if any(step.module.startswith("torch.distributed.tensor") for step in steps):
        return _dtensor(steps)
    return ""


def _phase(names: list[str]) -> str:
    """Return " (forward)" or " (backward)" by the innermost function whose name says so."""
    phase = next((word for name in names for word in ("backward", "forward") if word in name), "")
    return f" ({phase})" if phase else ""


def _dtensor(steps: list[_Step]) -> str:
    for step in steps:
        if step.module == "torch.distributed.tensor._dispatch":
            op = step.frame.f_locals.get("op_call")
            if op is not None:
                return f"{op} of DTensors"
    inside = [step for step in steps if step.module.startswith("torch.distributed.tensor")]
    outermost = next((step for step in reversed(inside) if _is_public(step)), inside[0])
    if outermost.module == "torch.distributed.tensor.parallel.style":
        outermost = next((step for step in inside if _is_public(step)), outermost)
    return _full_name(outermost)


def _library(steps: list[_Step]) -> str:
    """Return the name of the outermost function of the package closest to torch; "" if there is
    none. This is Accelerate's function, not that of a trainer built on it.
    """
    nearest = next((step for step in steps if step.kind is FrameKind.LIBRARY), None)
    if nearest is None:
        return ""
    package = nearest.module.partition(".")[0]
    name = ""
    for step in steps[steps.index(nearest) :]:
        if step.kind is FrameKind.LIBRARY and step.module.partition(".")[0] != package:
            break
        # In the wrapper of Accelerate's decorator, whose own check may communicate, the name is
        # that of the decorated function.
        wrapped = (
            step.frame.f_locals.get("function")
            if step.module == _ACCELERATE and step.plain == "wrapper"
            else None
        )
        if wrapped is not None:
            name = f"{wrapped.__module__}.{wrapped.__qualname__}"
        elif step.kind is FrameKind.LIBRARY and _is_public(step):
            name = _full_name(step)
    return name


def _is_public(step: _Step) -> bool:
    name = step.plain
    return (
        name not in _WRAPPERS
        and not name.startswith("<")
        and (not name.startswith("_") or name == "__init__")
    )


def _full_name(step: _Step) -> str:
    """Return the name under which a function can be imported, as far as its file shows."""
    function = _with_class(step)
    module = step.module
    if module == "torch.distributed.distributed_c10d":
        return f"torch.distributed.{function}"
    parts = module.split(".")
    owner = function.split(".")[0]
    while len(parts) > 1 and (
        parts[-1] in ("_api", "api", "clip_grad") or parts[-1].replace("_", "") == owner.lower()
    ):
        parts.pop()
    return ".".join([*parts, function.removesuffix(".__init__")])


def _with_class(step: _Step) -> str:
    """Return a function's name with its class (``self``'s before Python 3.11)."""
    qualified: str = getattr(step.frame.f_code, "co_qualname", "")
    if qualified:
        return qualified.replace(".<locals>", "")
    if step.frame.f_code.co_varnames[:1] == ("self",) and "self" in step.frame.f_locals:
        owner = type(step.frame.f_locals["self"])
        # torch's functional all_reduce, which is no method, calls its tensor self, too
        if hasattr(owner, step.function):
            return f"{owner.__name__}.{step.function}"
    return step.function


def _module(file: str) -> str:
    """Return the module of a file of an installed package or of torch; "" for another file."""
    for marker in ("/site-packages/", "/dist-packages/"):
        _, found, inside = file.rpartition(marker)
        if found:
            return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    _, found, inside = file.rpartition("/torch/")  # a torch that was built in place
    return (
        f"torch.{inside.removesuffix('.py').replace('/', '.')}"
        if found and kind_of_file(file) is FrameKind.TORCH
        else ""
    )
