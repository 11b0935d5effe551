"""Switches recording on in a process, and off again at its end.

Nothing is recorded, and no dispatch kernel installed, before the process's first ``init_process_group``: data-loader workers,
inductor's workers and torchrun's agent import torch with a rank in their environment and are no ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import platform
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from commlens import config
from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.errors import DistributedOperationException
from commlens.text import ranks_phrase

log = logging.getLogger("commlens")

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")


class Session:
    """Recording in this process, from the first ``init_process_group`` to the end."""

    def __init__(self, settings: config.Settings, make_verifier: Callable[..., Any], dump: Callable[[str, Path], Path]) -> None:
        self.settings = settings
        self.make_verifier = make_verifier
        self.dump = dump
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.writer: Any = None
        self.recorder: Any = None
        self.watchdog: Any = None
        self.job_dir: Path | None = None
        self.given_up = False
        self.exception_seen = False
        self.expecting: list[str] = []
        self.began_late = False  # a process group was there before recording was switched on
        self.regions = 0  # of `commlens.verify()` that the program is in

    @property
    def is_recording(self) -> bool:
        """Whether a box is open in this very process (not in the parent that it was forked from)."""
        return self.recorder is not None and self.pid == os.getpid()


_session: Session | None = None


def session() -> Session | None:
    """The process's session, once switched on."""
    return _session


def is_started() -> bool:
    """Return whether :func:`start` has been called in this very process (not in the parent that it was forked from)."""
    return _session is not None and _session.pid == os.getpid()


def start(settings: config.Settings, *, make_verifier: Callable[..., Any], dump: Callable[[str, Path], Path]) -> None:
    """Record from the first ``init_process_group`` on; at once if it has already run.

    A second call may change the settings of a session that has not begun to record, and may switch verification on in one that has.

    Args:
        settings: the settings.
        make_verifier: makes the :class:`commlens.tap.token.Verifier`, with the job's folder, the rank and keyword arguments.
        dump: dumps into a directory the job whose boxes are in a folder, and returns the dump's folder.
    """
    global _session
    if _session is not None and _session.pid == os.getpid():
        if _session.recorder is None:
            _session.settings = settings
        elif settings.debug and not _session.settings.debug:
            _session.settings = dataclasses.replace(_session.settings, debug=True, verify_timeout=settings.verify_timeout)
            enter_verification()
        return
    import torch.distributed as dist

    if settings.box_entries == 0 or not dist.is_available():
        return
    _session = Session(settings, make_verifier, dump)
    _hook_init()
    if dist.is_initialized():
        _session.began_late = True
        _safely(_begin, _session, dist.get_rank(), dist.get_world_size())
        if _session.is_recording:
            _session.recorder.groups.started_again()
            _safely(_initialised, _session)
            if _session.recorder.verifier is not None:
                _safely(_meet, _session, _session.recorder.verifier.meet)


def stop() -> None:
    """Stop recording and close the box. The job goes on."""
    if _session is not None:
        if _session.is_recording and _session.recorder.verifier is not None:
            _session.recorder.verifier.stop()  # the process may go on
        _close(_session, L.PHASE_CLOSED)


# --- init_process_group


_hooked = False


def _hook_init() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    original_init, original_destroy, original_new = c10d.init_process_group, c10d.destroy_process_group, c10d._new_process_group_helper

    @functools.wraps(original_init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        current = _session
        if current is not None and not current.given_up:
            _safely(_begin, current, *_rank_and_world(args, kwargs))
        result = original_init(*args, **kwargs)
        if current is not None and current.is_recording:
            _safely(_initialised, current)
        return result

    @functools.wraps(original_destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        current = _session
        verifier = current.recorder.verifier if current is not None and current.is_recording else None
        if current is not None and current.is_recording:
            from commlens.tap import torch_patches

            _safely(current.recorder.sweep)
            # gloo's thread may be waiting for the GIL to free the last op's tensors, and torch 2.6 joins that thread with the GIL
            # held: a deadlock of its own (4 of 24 bare runs), to which what we do before would add.
            time.sleep(0.2 if torch_patches.torch_version() < (2, 7) else 0.01)
        result = original_destroy(*args, **kwargs)
        if verifier is not None:
            verifier.before_end()
        return result

    @functools.wraps(original_new)
    def _new_process_group_helper(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        # The way past init_process_group above: a program that imported its name before commlens was switched on.
        current = _session
        late = current is not None and current.recorder is None and not current.given_up
        if current is not None and late:
            _safely(_begin, current, group_rank, group_size)
        if current is not None and current.is_recording and not dist.is_initialized():
            # A default group is being made. Not told by calls of init_process_group: one may be refused, and init_device_mesh has
            # imported its name before commlens was switched on.
            current.recorder.groups.started_again()
            if current.recorder.verifier is not None:
                current.recorder.verifier.group_destroyed()
        result = original_new(group_size, group_rank, *args, **kwargs)
        if current is not None and late and current.is_recording:
            current.writer.word(L.PHASE, L.PHASE_INITIALISED)
        return result

    c10d._new_process_group_helper = _new_process_group_helper
    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group


def _safely(function: Any, *args: Any) -> None:
    try:
        function(*args)
    except Exception as error:
        log.warning("commlens: %s failed, the job goes on without it: %s: %s", function.__name__, type(error).__name__, error)


def _rank_and_world(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rank and world size as ``init_process_group(backend, init_method, timeout, world_size, rank, ...)`` will find them."""
    world_size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
    rank = kwargs.get("rank", args[4] if len(args) > 4 else -1)
    if not isinstance(rank, int) or rank < 0:
        rank = _number(os.environ, "RANK")
    if not isinstance(world_size, int) or world_size < 0:
        world_size = max(_number(os.environ, "WORLD_SIZE"), 0)
    return rank, world_size


def _number(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(environ[name])
    return -1


def _begin(session: Session, rank: int, world_size: int) -> None:
    """Make the box and attach the recorder, once per process."""
    with session.lock:
        if session.recorder is not None or session.given_up:
            return
        session.pid = os.getpid()  # perhaps forked from a process that was switched on and never became a rank
        if rank < 0:
            return  # not known yet: when init_process_group has returned
        session.given_up = True  # until all of it has worked
        # The heavy half is imported here, so that a process which never becomes a rank does not pay for it.
        from commlens.capture import engine
        from commlens.capture.watchdog import Watchdog
        from commlens.tap import torch_patches

        made = engine.choose(session.settings.engine)
        writer = _make_box(session, rank, world_size, made.box_writer)
        if writer is None:
            return
        session.writer = writer
        session.recorder = made.recorder(writer, cpp_stack=session.settings.cpp_stack, timing=session.settings.timing)
        session.recorder.on_unreadable_reduce_op = torch_patches.tap_reduce_ops
        if depth := int(session.settings.debug) + session.regions:
            _safely(_verify, session, rank, depth)
        torch_patches.set_recorder(session.recorder)
        session.recorder.attach()
        pipe = Path(f"{session.settings.dump_pipe}{rank}.commlens.pipe") if session.settings.dump_pipe else None
        session.watchdog = Watchdog(session.recorder, pipe=pipe, on_pipe=dump_now)
        session.watchdog.start()
        session.given_up = False
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _hook_excepthook(session)
        atexit.register(_at_exit, session)
        if session.settings.dump_signal:
            _safely(_install_signal, session.settings.dump_signal)
        if not session.settings.watched:
            _safely(_start_watcher, session)


def _initialised(session: Session) -> None:
    import torch.distributed as dist

    if session.recorder is None:
        _begin(session, dist.get_rank(), dist.get_world_size())
    if session.writer is None:
        return
    session.writer.word(L.RANK_WORLD, (dist.get_rank() + 1) << 32 | dist.get_world_size())
    session.writer.word(L.TIMEOUT_MS, _timeout_ms())
    session.writer.word(L.PHASE, L.PHASE_INITIALISED)


def _verify(session: Session, rank: int, depth: int) -> None:
    """Let every collective be compared with the peers' before it is issued; with depth 0, once that is entered."""
    from commlens.tap import torch_patches

    settings = session.settings
    assert session.job_dir is not None  # a box was made there
    timeout_s = functools.lru_cache(maxsize=1)(lambda: settings.verify_timeout or _timeout_ms() / 1000)
    late = _ranks_of_this_node(rank) if session.began_late else ()
    recorder = session.recorder
    verifier = session.make_verifier(
        session.job_dir, rank, timeout_s=timeout_s, active=depth > 0, late=late, make_exchange=recorder.make_exchange
    )
    for _ in range(depth - 1):
        verifier.enter()
    recorder.verifier = verifier
    torch_patches.listen()


def _ranks_of_this_node(rank: int) -> range:
    """As far as the environment tells; all, where it does not."""
    import torch.distributed as dist

    local, size = _number(os.environ, *_LOCAL_RANK_VARIABLES), _number(os.environ, "LOCAL_WORLD_SIZE")
    return range(rank - local, rank - local + size) if local >= 0 and size > 0 else range(dist.get_world_size())


def enter_verification() -> None:
    """Verify from here on, as the other ranks do at the same point of the program. Waits for them for a while."""
    current = _session
    if current is None or current.pid != os.getpid():
        return
    current.regions += 1
    if current.is_recording:
        _safely(_enter, current)


def leave_verification() -> None:
    """Undo one :func:`enter_verification`."""
    current = _session
    if current is None or current.pid != os.getpid():
        return
    current.regions -= 1
    if current.is_recording and current.recorder.verifier is not None:
        _safely(current.recorder.verifier.leave)


def _enter(session: Session) -> None:
    if session.recorder.verifier is None:
        import torch.distributed as dist

        _verify(session, dist.get_rank(), 0)
    _meet(session, session.recorder.verifier.enter)


def _meet(session: Session, wait: Callable[[], list[int]]) -> None:
    """Begin to verify in the middle of a job. Without the others there is nothing to compare with, and they are named."""
    missing = wait()
    if not missing:
        return
    who = ranks_phrase(missing)
    if session.began_late:
        # Numbers of collectives count from the switching on: they fit those of ranks that did it at the same point.
        session.recorder.verifier.stop()
        log.warning("commlens: collectives are not verified here: %s did not switch that on at the same point of the program", who)
    else:
        log.warning("commlens: %s did not come to where verification begins: nobody compares with it until it does", who)


def _timeout_ms() -> int:
    """The default process group's timeout; 0 where torch does not say."""
    try:
        import torch.distributed.distributed_c10d as c10d

        group = c10d._get_default_group()
        device = group._device_types[0]
        return int(group._get_backend(device).options._timeout.total_seconds() * 1000)
    except Exception:
        return 0


# --- the box


def _make_box(session: Session, rank: int, world_size: int, box_writer: Callable[..., Any]) -> Any:
    if _is_child_of_a_rank(session.settings):
        return None
    problems: list[str] = []
    roots = job_dirs.box_roots(session.settings.box_dir)
    for root in roots:
        try:
            job_dir = job_dirs.user_folder(root) / (session.settings.job or job_dirs.job_identity(os.environ))
            job_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(job_dir):
                _move_stale_boxes(job_dir)
                writer = box_writer(
                    job_dir / job_dirs.box_name(rank, os.getpid()),
                    capacity=session.settings.box_entries,
                    rank=rank,
                    world_size=world_size,
                    local_rank=_number(os.environ, *_LOCAL_RANK_VARIABLES),
                    start_ticks=job_dirs.start_ticks(os.getpid()),
                    about=_about(job_dir.name),
                )
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
            continue
        session.job_dir = job_dir
        return writer
    where = "; ".join(problems) or "no memory-backed folder found (set COMMLENS_BOX_DIR to name one)"
    log.warning("commlens: rank %d is not recorded: %s", rank, where)
    return None


@contextlib.contextmanager
def _locked(job_dir: Path) -> Iterator[None]:
    with (job_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_child_of_a_rank(settings: config.Settings) -> bool:
    """Whether an ancestor has a box: then this is a worker of a rank, however it was started."""
    owners = {job_dirs.box_pid(box) for job in job_dirs.live_jobs(settings.box_dir) for box in job_dirs.boxes(job)}
    pid = os.getppid()
    for _ in range(64):
        if pid <= 1:
            return False
        if pid in owners:
            return True
        pid = job_dirs.parent_of(pid)
    return False


def _move_stale_boxes(job_dir: Path) -> None:
    """Boxes that a former job of the same name left: their processes ended before this one began."""
    started = time.time() - _age_s()
    for box in job_dirs.boxes(job_dir):
        with contextlib.suppress(OSError):
            if job_dirs.start_ticks(job_dirs.box_pid(box)) == 0 and box.stat().st_mtime < started - 1:
                aside = job_dir.with_name(f"{job_dir.name}.before-{int(box.stat().st_mtime)}")
                aside.mkdir(mode=0o700, exist_ok=True)
                box.rename(aside / box.name)


def _age_s() -> float:
    """Seconds since this process began."""
    try:
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - job_dirs.start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return 0.0


def _about(job: str) -> dict[str, Any]:
    import torch

    from commlens.version import __version__

    def text(path: str) -> str:
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="ascii", errors="replace").strip()
        return ""

    def namespace() -> str:
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/ns/pid").readlink())
        return ""

    coverage = ["replays of CUDA graphs, symmetric memory and custom all-reduce kernels are not seen"] if torch.cuda.is_available() else []
    return {
        "job": job,
        "host": platform.node(),
        "boot_id": text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": namespace(),
        "restart": max(_number(os.environ, "TORCHELASTIC_RESTART_COUNT"), 0),
        "script": " ".join(sys.argv)[:300],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commlens": __version__,
        "prefixes": {
            "torch": str(Path(torch.__file__).parent),
            "commlens": str(Path(__file__).parents[1]),
            "python": sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}),
        },
        "coverage": coverage,
    }


# --- the watcher


def _start_watcher(session: Session) -> None:
    """One small process per node, started by the lowest local rank, which outlives this process's SIGKILL."""
    local_rank = _number(os.environ, *_LOCAL_RANK_VARIABLES)
    if session.job_dir is None or local_rank > 0:
        return
    if local_rank < 0 and not _first_to_claim(session.job_dir / ".watcher"):
        return
    environ = {**os.environ, **config.settings_environment(session.settings), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environ.pop("COMMLENS", None)
    # Through a shell that ends at once: it must be no child of ours, which a program that waits for its children would meet.
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-m", "commlens.watch", str(session.job_dir)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
        timeout=10,
        check=True,
    )


def _first_to_claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


# --- the end


def _after_fork_in_child() -> None:
    """A forked child is no rank: it must write nothing into its parent's box."""
    from commlens.tap import tap, torch_patches

    tap.detach_all()
    torch_patches.set_recorder(None)
    if _session is not None:
        _session.given_up = True
        _session.recorder = None


def _hook_excepthook(session: Session) -> None:
    previous = sys.excepthook

    def commlens_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if session.is_recording:
            _safely(_record_exception, session, kind, error, trace)
        previous(kind, error, trace)

    sys.excepthook = commlens_excepthook


def _record_exception(session: Session, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    session.exception_seen = True
    first_line = str(error).strip().splitlines()[:1]
    frames = [[f.filename, f.lineno or 0, f.name] for f in reversed(traceback.extract_tb(trace))]
    text = f"{kind.__name__}: {first_line[0][:500]}" if first_line else kind.__name__
    session.writer.word(L.EXCEPTION, session.writer.add_blob({"k": "exception", "text": text, "f": frames[:64]}))
    refusal = _refusal_in(error)
    if refusal is not None:
        _tell_torchelastic(str(refusal))


def _refusal_in(error: BaseException) -> BaseException | None:
    """The refusal that an exception is, or that it was raised from: ours, or Accelerate's own of the same name."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None or (isinstance(seen, DistributedOperationException) and seen.kind):
            return seen
        if type(seen).__name__ == "DistributedOperationException" and seen.__cause__ is None:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _tell_torchelastic(text: str) -> None:
    """Its summary of what failed shows this file, which otherwise only a decorated ``main`` writes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def _at_exit(session: Session) -> None:
    if session.pid == os.getpid():
        _safely(_close, session, L.PHASE_CLOSED_BY_EXCEPTION if session.exception_seen else L.PHASE_CLOSED)


def _close(session: Session, phase: int) -> None:
    if not session.is_recording:
        return
    from commlens.tap import torch_patches

    session.watchdog.stop()
    session.watchdog.tick()
    session.writer.word(L.PHASE, phase)
    session.recorder.detach()
    torch_patches.set_recorder(None)
    if session.recorder.verifier is not None:
        session.recorder.verifier.close()
    session.recorder.release()
    session.recorder = None
    session.given_up = True


# --- on demand


def dump_now(directory: str | None = None) -> Path | None:
    """Dump this job's boxes on this node; None and one log line where that failed."""
    if _session is None or _session.job_dir is None:
        return None
    try:
        return _session.dump(directory or _session.settings.dump_dir, _session.job_dir)
    except Exception as error:
        log.warning("commlens: could not dump: %s: %s", type(error).__name__, error)
        return None


def _install_signal(name: str) -> None:
    import signal

    number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    previous = signal.getsignal(number)

    def handler(signum: int, frame: Any) -> None:
        threading.Thread(target=dump_now, name="commlens-dump", daemon=True).start()
        if callable(previous):
            previous(signum, frame)

    signal.signal(number, handler)


@contextlib.contextmanager
def expect_slow(label: str) -> Iterator[None]:
    """Say that what follows takes long, so that the ranks which wait for it are not called stuck.

    Args:
        label: what it is, for the report ("checkpoint").
    """
    current = _session
    if current is None or not current.is_recording:
        yield
        return
    current.expecting.append(label)
    _safely(_write_expecting, current)
    try:
        yield
    finally:
        current.expecting.pop()
        _safely(_write_expecting, current)


def _write_expecting(session: Session) -> None:
    if session.is_recording:  # a child that was forked inside leaves, too, and the box is its parent's
        label = session.expecting[-1] if session.expecting else None
        session.writer.word(L.EXPECTING, session.writer.add_blob({"k": "text", "text": label[:200]}) if label else 0)
