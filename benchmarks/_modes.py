"""The modes in which a benchmark's ranks run: bare, with commlens, or with another tool, switched
on as a user would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def recorder_variable() -> str:
    """Return the variable that sizes torch's own recorder, under the name for which this torch does
    not warn.
    """
    version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    return "TORCH_FR_BUFFER_SIZE" if version >= (2, 9) else "TORCH_NCCL_TRACE_BUFFER_SIZE"


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run the ranks.

    Args:
        name: in the tables.
        environment: set before anything is created.
        settings: of commlens; None: without commlens.
        around: the context in which a step or a block of ops runs: ``dispatch mode``, ``trace``,
            ``torch CommDebugMode``, ``DebugMode``.
        accelerate_debug: Accelerate's own check of its operations.
    """

    name: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] | None = None
    around: str = ""
    accelerate_debug: bool = False

    @property
    def watched(self) -> bool:
        """Whether the job has a watcher of its own."""
        return self.settings is not None and not self.settings.get("watched", False)


def recorded(engine: str = "python", **settings: Any) -> dict[str, Any]:
    """Return the settings of a job that an engine records. It has no watcher unless
    ``watched=False`` is given.
    """
    return {"watched": True, **engine_setting(engine), **settings}


def engine_setting(engine: str) -> dict[str, str]:
    """Return the setting that selects an engine; empty if this commlens has only one."""
    from commlens.config import Settings

    return (
        {"engine": engine}
        if any(field.name == "engine" for field in dataclasses.fields(Settings))
        else {}
    )


OFF = Mode("off")
PYTHON = Mode("Python engine", settings=recorded("python"))
NATIVE = Mode("native engine", settings=recorded("native"))
TORCH_RECORDER = Mode("torch's recorder", {recorder_variable(): "2000"})
DISPATCH_MODE = Mode("TorchDispatchMode", around="dispatch mode")
WATCHED = Mode("recorded and watched", settings=recorded("auto", watched=False))
TRACED = Mode("traced", around="trace")
VERIFIED_PYTHON = Mode("verified, Python engine", settings=recorded("python", debug=True))
VERIFIED_NATIVE = Mode("verified, native engine", settings=recorded("native", debug=True))
COMM_DEBUG_MODE = Mode("torch CommDebugMode", around="torch CommDebugMode")
DEBUG_MODE = Mode("torch DebugMode", around="DebugMode")
DETAIL = Mode("TORCH_DISTRIBUTED_DEBUG=DETAIL", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
ACCELERATE = Mode("Accelerate's debug mode", {"ACCELERATE_DEBUG_MODE": "1"}, accelerate_debug=True)


def native_engine() -> str:
    """Return why the native engine cannot be measured here; empty if it can."""
    if not engine_setting("native"):
        return "this version of commlens has none"
    try:
        from commlens import native

        return "" if native.load() is not None else str(native.NOT_BUILT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def available(modes: list[Mode]) -> tuple[list[Mode], list[str]]:
    """Return the modes that can be measured here, and a sentence for each that cannot."""
    there, left_out = [], []
    for mode in modes:
        why = ""
        if mode.name.startswith(("native", "verified, native")):
            why = native_engine()
        elif (
            mode.around == "DebugMode"
            and importlib.util.find_spec("torch.utils._debug_mode") is None
        ):
            why = "this torch has none"
        elif mode.accelerate_debug and importlib.util.find_spec("accelerate") is None:
            why = "accelerate is not installed"
        if why:
            left_out.append(f"{mode.name} was not measured: {why}.")
        else:
            there.append(mode)
    return there, left_out


def set_up(mode: Mode, box_dir: str, job: str) -> None:
    """Apply a mode in a rank, before its process group is created."""
    import torch.distributed as dist

    os.environ[recorder_variable()] = "0"
    os.environ.update(mode.environment)
    dist.set_debug_level_from_env()
    if mode.settings is not None:
        from commlens import config
        from commlens.launch import recording

        recording.start(
            config.Settings(
                box_dir=box_dir, job=job, dump_dir=box_dir, stall_timeout=600.0, **mode.settings
            )
        )


def confirm(mode: Mode, backend: str) -> None:
    """Check that a rank runs in its mode, because a figure of another mode is worse than none.

    Raises:
        RuntimeError: the wrong engine records, or torch's recorder is on or off against the mode.
    """
    import torch
    import torch.distributed as dist

    if mode.settings is not None and (wanted := mode.settings.get("engine", "auto")) != "auto":
        from commlens.capture import session

        recorder = (
            type(session._recording.recorder).__name__ if session._recording is not None else "none"
        )
        if recorder != {"python": "Recorder", "native": "NativeRecorder"}[wanted]:
            raise RuntimeError(f"{mode.name}: the recorder is {recorder}")
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is not None and backend == "gloo" and mode in (OFF, TORCH_RECORDER):
        dist.all_reduce(torch.ones(1))
        entries = len(json.loads(dump()).get("entries", ()))
        if bool(entries) is not (mode is TORCH_RECORDER):
            raise RuntimeError(f"{mode.name}: torch's recorder has {entries} entries")


def around(mode: Mode) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context for a step or a block of ops; CommDebugMode and
    DebugMode are made anew each time.
    """
    if mode.around == "dispatch mode":
        from torch.utils._python_dispatch import TorchDispatchMode

        class PassOn(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return func(*args, **(kwargs or {}))

        return PassOn
    if mode.around == "torch CommDebugMode":
        from torch.distributed.tensor.debug import CommDebugMode

        return CommDebugMode
    if mode.around == "DebugMode":
        from torch.utils._debug_mode import DebugMode

        return DebugMode
    if mode.around == "trace":
        from commlens.model.trace import Depth
        from commlens.tracing.tracer import Tracer

        tracer = Tracer(Depth.COLLECTIVES)  # one for all steps, as `commlens launch --trace` has

        @contextlib.contextmanager
        def traced() -> Any:
            tracer.start()
            try:
                yield
            finally:
                tracer.stop()

        return traced
    return contextlib.nullcontext
