"""What a rank that is not where the others wait for it does: a class, and whether it visibly works.

A pure function of its stacks, of what was observed of its process, and of its log.
"""

from __future__ import annotations

import re

import msgspec

from commlens.diagnosis.process_exit import Fate
from commlens.diagnosis.select_job import last_moment
from commlens.model.collective import Frame, FrameKind, Stack
from commlens.model.ranklog import Observation, RankLog
from commlens.model.verdict import Why
from commlens.text import duration, frame_phrase

CPU_WORKING = 0.10  # of one core over the window; a rank that waits uses below 0.02, watchdog thread included
IO_WORKING = 64 * 1024  # bytes within the window
_WINDOW_S = 0.4  # observations over less than this say nothing of movement
_STILL_S = 5.0  # over which a checkpoint must not move before it is called stuck
_THROTTLED = 0.5
_STOPPED = 0.5
_LEAVING_NS = 10_000_000_000  # an interpreter with torch in it may take seconds to shut down
_PRESSURE = 20.0  # percent of the last 10 s in which every task of its cgroup waited for memory

# Only files that are on the stack while a graph is compiled: eval_frame.py and runtime_wrappers.py stay on it when it runs.
_COMPILING = re.compile(
    r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_transformation|variables/)|"
    r"torch/_inductor/(graph|scheduler|lowering|async_compile|cpp_builder|codegen/|compile_worker/|fx_passes/)|"
    r"torch/_functorch/(_aot_autograd/(dispatch_and_compile_graph|jit_compile_runtime|graph_compile|traced_function)|partitioners)|"
    r"triton/(compiler|runtime/(jit|build|autotuner))|torch/utils/cpp_extension|torch/export/"
)
_CHECKPOINT_FILES = re.compile(r"torch/serialization\.py|torch/distributed/checkpoint/|/safetensors/|/orbax/|/tensorstore/")
_CHECKPOINT_NAMES = re.compile(
    r"(save|write|load|restore|dump|store|read|upload|resume).*(checkpoint|ckpt|state_dict)|(checkpoint|ckpt).*(save|write|load|restore)|"
    r"^_?(save|load)_(model|state|pretrained|weights|training_state)$",
    re.IGNORECASE,
)
_DATA_FILES = re.compile(
    r"torch/utils/data/|/datasets/|/webdataset/|/torchdata/|/streaming/base/|/nvidia/dali/|/ffcv/|/torchvision/datasets/"
)
_DATA_NAMES = re.compile(
    r"^_*(load|get|read|fetch|next|prepare|make|sample|build|draw|collate|iter)?_?(next|the|a)?_?(train|val|eval|test)?(ing)?_?"
    r"(mini|micro)?_?(batch(es)?|data(set)?|samples?|examples?|shards?|items?|records?)(_iter(ator)?|_fn|_index|_async)?$|"
    r"data_?loader|dataset|^__getitem__$|collate|^_?tokeni[sz]e",
    re.IGNORECASE,
)
_INIT_NAMES = frozenset(
    {"init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper", "new_subgroups", "new_subgroups_by_enumeration",
     "split_group", "init_device_mesh", "_store_based_barrier", "rendezvous", "_init_process_groups", "_tcp_rendezvous_handler",
     "_env_rendezvous_handler", "_create_c10d_store", "_create_store_from_options"}
)  # fmt: skip
_LEAVE_NAMES = frozenset({"destroy_process_group", "_shutdown_backend"})


class Doing(msgspec.Struct):
    """What a rank does."""

    why: Why
    works: bool  # visibly: then nobody claims a fault
    phrase: str  # "has been in train.py:57 load_batch for 31 s"
    frame: Frame | None = None  # the user's innermost line
    signs: list[str] = []  # what supports it, in sentences
    observed: bool = False  # movement was looked for


def doing(log: RankLog, fate: Fate, *, quiet_ns: int = 0, stalled_after_ns: int = 1_000_000_000) -> Doing:
    """Classify.

    Args:
        log: the rank's log.
        fate: how its process ended.
        quiet_ns: for how long it has issued nothing and left no collective; 0 where that is not known.
        stalled_after_ns: a rank that was active within it works.
    """
    stack = log.main_stack
    frames: Stack = stack.frames if stack is not None else ()
    frame = stack.source if stack is not None else None
    seen = log.observation
    where = frame_phrase(frame)
    since = f" for {duration(quiet_ns)}" if quiet_ns > stalled_after_ns else ""
    if fate.kind == "clean":
        return Doing("finished", False, "has finished", None, ["its process announced its exit"], True)
    if fate.kind == "leaving":
        signs, moves, looked = _movement(seen)
        recently = 0 < (log.captured_ns or last_moment(log)) - log.heartbeat_ns < _LEAVING_NS
        return Doing("finished", moves or recently, "has finished and is shutting down", None, signs, looked)
    if fate.kind in ("own", "gone", "peer"):
        return Doing(fate.why, False, fate.text, fate.source or frame, [], True)
    fraction = seen.stopped_fraction or 0.0
    if seen.proc_state in ("T", "t") or fraction > _STOPPED:
        return Doing("stopped", False, "is stopped (by SIGSTOP or a debugger)", frame, ["its process is in state T"], True)
    if seen.holds_gil:
        return Doing("holding-gil", False, f"holds the GIL{_in(where)}{since}", frame, ["its other threads have not run since"], True)
    if (seen.throttled_fraction or 0.0) >= _THROTTLED:
        signs = [f"its CPU quota was used up {seen.throttled_fraction:.0%} of the time"]
        return Doing("throttled", False, f"is starved of CPU by its cgroup's quota{_in(where)}", frame, signs, True)
    why, named = _by_frames(log, frames)
    signs, moves, looked = _movement(seen)
    if log.expecting is not None:
        return Doing(why or "user-code", True, f"is in a block marked as slow ({log.expecting})", frame, signs, looked)
    phrase = _phrase(why, where, since)
    if fate.kind == "told":
        # It was ended by the launcher after the fact: what counts is where it was before.
        return Doing(
            why or ("user-code" if frame else "unknown"),
            False,
            f"was {(where and f'in {where}') or 'elsewhere'}",
            frame,
            [fate.text],
            looked,
        )
    if moves:
        return Doing(why or ("user-code" if frame else "unknown"), True, phrase, frame, signs, looked)
    if why == "compilation" or why == "initialising":
        return Doing(why, True, phrase, frame, [*signs, named], looked)
    still = looked and seen.window_s >= _STILL_S
    if why == "checkpoint-io" and not still:
        return Doing(why, True, phrase, frame, [*signs, named], looked)
    if 0 < quiet_ns < stalled_after_ns:
        return Doing(why or "user-code", True, phrase, frame, [*signs, f"it was active {duration(quiet_ns)} before"], looked)
    if seen.proc_state == "D":
        return Doing(
            "uninterruptible-io", False, f"is in uninterruptible I/O{_in(where)}{since}", frame, ["its process is in state D", *signs], True
        )
    if (seen.memory_pressure or 0.0) >= _PRESSURE:
        pressure = f"its cgroup waited for memory {seen.memory_pressure:.0f} % of the time"
        return Doing("memory-pressure", False, phrase, frame, [pressure, *signs], looked)
    return Doing(why or ("user-code" if frame is not None else "unknown"), False, phrase, frame, signs, looked)


def quiet_ns(log: RankLog) -> int:
    """For how long the rank has issued nothing and come out of no collective; 0 where that is not known."""
    now = log.captured_ns or last_moment(log)
    latest = 0
    for op in reversed(log.collectives[-8:]):
        latest = max(latest, op.announced_ns, op.returned_ns, op.wait_ended_ns, op.wait_began_ns)
    return max(0, now - latest) if latest else 0


def torch_is_innermost(stack: Stack) -> bool:
    """Whether the thread is inside torch (or nothing is known of it): it may be waiting there for a collective in C++."""
    innermost = next((frame for frame in stack if frame.kind not in (FrameKind.NATIVE, FrameKind.COMMLENS)), None)
    return innermost is None or innermost.kind is FrameKind.TORCH


def _by_frames(log: RankLog, frames: Stack) -> tuple[Why | None, str]:
    """The class of the innermost frame that has one, and that frame in words."""
    for frame in frames:
        file = frame.file.replace("\\", "/")
        named = f"{frame_phrase(frame)} is on its stack"
        if frame.kind is not FrameKind.USER:
            if _COMPILING.search(file):
                return "compilation", named
            if frame.function in _INIT_NAMES and "torch/" in file:
                return "initialising", named
            if _CHECKPOINT_FILES.search(file):
                return "checkpoint-io", named
            if _DATA_FILES.search(file):
                return "data-loading", named
            continue
        if _CHECKPOINT_NAMES.search(frame.function):
            return "checkpoint-io", named
        if _DATA_NAMES.search(frame.function) or _DATA_FILES.search(file):
            return "data-loading", named
        if frame.function in _INIT_NAMES:
            return "initialising", named
    if not log.initialised and not log.collectives and not frames:
        return "initialising", "it has not returned from init_process_group"
    return None, ""


def _movement(seen: Observation) -> tuple[list[str], bool, bool]:
    """What moved within the window: signs in words, whether it works, and whether anybody looked."""
    signs: list[str] = []
    works = looked = False
    window = seen.window_s
    if seen.stack_moved is not None and window >= _WINDOW_S:
        looked = True
        works = works or seen.stack_moved
        signs.append("its stack moves" if seen.stack_moved else "its stack does not move")
    if seen.cpu_s is not None and window >= _WINDOW_S:
        looked = True
        share = seen.cpu_s / window
        works = works or share >= CPU_WORKING
        signs.append(f"it used {seen.cpu_s:.1f} s of CPU in {window:.0f} s" if share >= CPU_WORKING else "it uses no CPU")
    if seen.io_bytes is not None and window >= _WINDOW_S and seen.io_bytes >= IO_WORKING:
        works = looked = True
        signs.append(f"it read or wrote {seen.io_bytes / 1e6:.1f} MB in {window:.0f} s")
    return signs, works, looked


def _phrase(why: Why | None, where: str, since: str) -> str:
    if why == "compilation":
        return f"has been compiling{_in(where)}{since}" if since else f"is compiling{_in(where)}"
    if why == "initialising":
        return f"is still initialising{_in(where)}{since}"
    if not where:
        return f"has been outside any collective{since}" if since else "is outside any collective"
    return f"has been in {where}{since}" if since else f"is in {where}"


def _in(where: str) -> str:
    return f" in {where}" if where else ""
