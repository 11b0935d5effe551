"""torchrun with commlens in every worker: torchrun's own parser and agent in this process, with a
watcher in a thread.

Uses ``torch.distributed.run.get_args_parser`` and ``run`` (torch 2.6 to 2.15), which ``torchrun``
itself calls.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from commlens import error_file
from commlens.blackbox import job_dirs
from commlens.config import SWITCH, Settings, settings_environment
from commlens.errors import CommandError, CommlensError, MissingDependency
from commlens.launch import autoload, background_build, torch_recorder
from commlens.launch.new_warnings import new_warnings
from commlens.launch.options import (
    add_optional_value,
    add_settings,
    own_options,
    program_from,
    refuse_value,
    settings_from,
    usage_error,
)
from commlens.launch.worker import check_program, show_from_program
from commlens.model.verdict import Do
from commlens.processes.senders import senders_remembered
from commlens.watch.roster import children_workers
from commlens.watch.watcher import STOP_NUMBERS, Watcher

_OF_A_RENDEZVOUS = ("store-unreachable", "store-lost", "rendezvous", "not-all-joined", "port-taken")
_ANSWERS_WITHIN_S = 2.0
EXIT_STATUSES: Final[Mapping[Do, int]] = MappingProxyType(
    {"retry": 75, "exclude-node": 76, "stop": 77}
)
"""With ``--exit-by-action``. 75 is what sysexits.h calls a temporary failure."""
FINISH_S = 10.0
"""How long the end of the job may wait for the watcher's final report."""


def torchrun_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with commlens's settings added.

    Raises:
        MissingDependency: torch is not installed.
    """
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise MissingDependency.torch("commlens launch", error) from None
    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "commlens launch"
    # with abbreviations, argparse refuses a script's --metric: it could be --metrics-file or
    # --metrics-port
    parser.allow_abbrev = False
    torchruns = own_options(parser)

    def refuse(message: str) -> NoReturn:
        raise usage_error(parser, message)

    parser.error = refuse  # type: ignore[method-assign]
    parser.description = (
        "Run torchrun with commlens in every worker. All of torchrun's options are accepted and"
        " work as in torchrun."
    )
    add_settings(parser)
    group = parser.add_argument_group("tracing")
    add_optional_value(
        parser,
        group,
        "--trace",
        "all",
        "trace every worker's collectives in all optimizer steps; --trace=FIRST:LAST in these only"
        " (2:4 is steps 2 and 3)",
    )
    group.add_argument(
        "--trace-dir",
        dest="commlens_trace_dir",
        metavar="DIR",
        help="save the traces here (default commlens-trace)",
    )
    parser.add_argument_group("restarts").add_argument(
        "--exit-by-action",
        dest="commlens_exit_by_action",
        action="store_true",
        help=(
            "after a verdict, end with 75 (retry), 76 (retry without the named nodes) or 77 (stop)"
            " in place of 1"
        ),
    )
    parser.set_defaults(commlens_options=own_options(parser) - torchruns)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return torchrun's options, commlens's settings, and the program with all that stands after
    it.

    Raises:
        CommandError: there is no program, or an option is wrong.
    """
    parser = torchrun_parser()
    for action in parser._actions:
        # otherwise argparse drops a "--" from the script's arguments
        if action.dest == "training_script":
            action.nargs = argparse.REMAINDER
    arguments = parser.parse_args(argv)
    program = program_from(
        arguments.training_script, arguments.commlens_options, module=arguments.module
    )
    if not program:
        raise CommandError(
            "Which program? For example: commlens launch --nproc-per-node 8 train.py --lr 0.1"
        )
    arguments.training_script, *arguments.training_script_args = program
    return arguments


def check_counts(arguments: argparse.Namespace) -> None:
    """Refuse numbers of nodes and of workers that torchrun cannot use: it would say so with a
    traceback.

    Raises:
        CommandError: one is wrong.
    """
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    workers, nodes = str(arguments.nproc_per_node), str(arguments.nnodes)
    try:
        if determine_local_world_size(workers) < 1:
            raise CommandError(
                f"--nproc-per-node takes a number of workers from 1 on, not {workers}."
            )
    except ValueError as error:
        if not str(error).startswith("Unsupported"):  # there is no such device here
            raise CommandError(f"--nproc-per-node {workers}: {str(error).rstrip('.')}.") from None
        raise CommandError(
            f"--nproc-per-node takes a number of workers, auto, cpu, gpu or xpu, not {workers!r}."
        ) from None
    try:
        fewest, most = parse_min_max_nnodes(nodes)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 0 < fewest <= most:
        raise CommandError(
            f"--nnodes takes a number of nodes, such as 2, or MIN:MAX, such as 2:4, not {nodes!r}."
        )


def launch(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        torchrun's exit status. An exception of torchrun is printed as torchrun prints it, without
        the frames of commlens, and its report on failed workers without frames.
    """
    arguments = parse(argv)
    check_counts(arguments)
    _check_program(arguments)
    by_action = arguments.commlens_exit_by_action
    settings = _take_settings(arguments)
    tracing = settings.trace is not None and _trace_workers(arguments, settings)
    started = time.time()
    try:
        return _run(arguments, settings, by_action=by_action, tracing=tracing)
    finally:
        if tracing:
            _print_trace_summary(settings.trace_dir, since=started)


class _JobEnd:
    """Ends the workers because of a verdict, as torchrun does on SIGTERM. The verdict says why, so
    torchrun's own report is left out.
    """

    def __init__(self) -> None:
        self.is_running = True  # torchrun
        self.has_begun = False
        self.why = ""

    def __call__(self, why: str) -> None:
        # once the workers have ended by themselves, the signal would interrupt the watcher's last
        # words
        if self.is_running:
            self.has_begun, self.why = True, why
            logging.disable(logging.WARNING)
            os.kill(os.getpid(), signal.SIGTERM)


def _run(
    arguments: argparse.Namespace, settings: Settings, *, by_action: bool, tracing: bool
) -> int:
    """Run torchrun with a watcher beside it. Returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import run

    end_job = _JobEnd()
    failures: dict[int, tuple[int, int]] = {}  # (pid, exit code) by rank, for the watcher
    watching: contextlib.AbstractContextManager[Watcher | None] = contextlib.nullcontext()
    watcher = None
    if settings.box_entries:
        _switch_on_recording(arguments, settings, tracing=tracing)
        watching = _watching(settings, failures, end_job)
    try:
        with watching as watcher:
            try:
                record(run)(arguments)
            except ChildFailedError as error:
                for rank, failure in error.failures.items():
                    failures[rank] = failure.pid, failure.exitcode
                raise
            finally:
                end_job.is_running = False
    except Exception as error:
        if end_job.has_begun:
            # torchrun has written that it was ended by SIGTERM
            error_file.write(os.environ, end_job.why, overwrite=True)
            return _exit_status(watcher, by_action=by_action)
        show_from_program(error)
        if isinstance(error, ChildFailedError):
            error.__traceback__ = None
        sys.excepthook(type(error), error, error.__traceback__)
        if not isinstance(error, ChildFailedError) and (advice := _advice(error)):
            print(f"commlens: this launcher did not join the job: {advice}.", file=sys.stderr)
        # ended from outside, by Ctrl-C, scancel or a scheduler: that says nothing of a restart
        return _exit_status(watcher, by_action=by_action and not isinstance(error, SignalException))
    return 0


def _switch_on_recording(
    arguments: argparse.Namespace, settings: Settings, *, tracing: bool
) -> None:
    """Set what the workers inherit: the settings, and the switches of commlens and of torch's
    recorder. Workers that are traced load commlens anyway.
    """
    if not tracing:
        _record_workers(arguments)
    os.environ.update(settings_environment(settings))
    os.environ[SWITCH] = "1"
    torch_recorder.switch_on(timing=settings.timing)
    if building := background_build.start(settings):
        print(f"commlens: {building}", file=sys.stderr)


def _check_program(arguments: argparse.Namespace) -> None:
    if Path(arguments.training_script).name in ("torchrun", "torch.distributed.run"):
        rest = shlex.join(arguments.training_script_args)
        raise CommandError(
            "commlens launch takes the place of torchrun: leave it out, as in `commlens launch"
            f" {rest}`."
        )
    if not arguments.no_python:
        refuse_value(arguments, arguments.training_script, module=arguments.module)
    check_program([arguments.training_script], module=arguments.module, command=arguments.no_python)


def _take_settings(arguments: argparse.Namespace) -> Settings:
    """Return the job's settings, and leave only torchrun's own arguments."""
    resolved = settings_from(
        arguments, trace=arguments.commlens_trace, trace_dir=arguments.commlens_trace_dir
    )
    for warning in new_warnings(resolved.warnings):
        print(f"commlens: {warning}", file=sys.stderr)
    settings = dataclasses.replace(
        resolved.settings, job=resolved.settings.job or job_name(arguments), watched=True
    )
    for name in [name for name in vars(arguments) if name.startswith("commlens_")]:
        delattr(arguments, name)
    return settings


def _advice(error: BaseException) -> str:
    """Return what to do about a rendezvous that has failed; empty for other errors. If its address
    does not answer, that is tried once more, since torch does not say why.
    """
    from commlens.diagnosis.words.error_steps import known_step
    from commlens.matching.errors import known_error

    text = "\n".join(
        f"{type(each).__name__}: {each}" for each in (error, error.__cause__) if each is not None
    )
    known = known_error(text)
    if known is None or known.kind not in _OF_A_RENDEZVOUS:
        return ""
    host, _, port = known.detail.strip("()").rpartition(", ")
    if known.kind == "store-unreachable" and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S).close()
        except OSError as again:
            text += f"\n{again}"
    return known_step(text)


def job_name(arguments: argparse.Namespace) -> str:
    """Return a name for the job, which is also that of its dump folder.

    On one node, it combines the program, the time, Slurm's id, which tells the tasks of an array on
    several nodes apart, and this pid. On several nodes the launchers must agree on it, so it
    combines the program and the rendezvous, which they share.
    """
    nodes = str(getattr(arguments, "nnodes", "1")).split(":")[-1]
    program = job_dirs.safe_name(Path(str(arguments.training_script)).stem, 40)
    slurm = os.environ.get("SLURM_JOB_ID", "")
    if nodes == "1":
        return f"{program}-{time.strftime('%Y%m%d-%H%M%S')}-{slurm and slurm + '-'}{os.getpid()}"
    rendezvous = [
        str(getattr(arguments, name, "") or "")
        for name in ("rdzv_id", "rdzv_endpoint", "master_addr", "master_port")
    ]
    shared = [part for part in (slurm, *rendezvous) if part not in ("none", "")]
    return job_dirs.safe_name("-".join([program, *shared]), 120)


def _trace_workers(arguments: argparse.Namespace, settings: Settings) -> bool:
    """Start ``-m commlens trace script.py`` instead of ``script.py``. Return whether that is
    possible.
    """
    if arguments.no_python or arguments.run_path:
        print(
            "commlens: the workers are not traced: only a program that is started as a Python"
            " script can be traced.",
            file=sys.stderr,
        )
        return False
    steps = [] if settings.trace == "all" else [f"--steps={settings.trace}"]
    folder = os.path.abspath(settings.trace_dir)  # noqa: PTH100
    options = [*steps, f"--output={folder}", "--no-summary"]
    _start_through(arguments, ["trace", *options])
    return True


def _record_workers(arguments: argparse.Namespace) -> None:
    """Start ``-m commlens run script.py`` instead of ``script.py`` if torch will not load
    commlens.
    """
    reason = autoload.obstacle()
    if reason is None:
        return
    if arguments.no_python or arguments.run_path:
        print(
            f"commlens: the workers are not recorded: {reason}, and only a program that is started"
            " as a Python script can be recorded in another way.",
            file=sys.stderr,
        )
        return
    _start_through(arguments, ["run"])


def _start_through(arguments: argparse.Namespace, command: list[str]) -> None:
    """Make torchrun start a command of commlens, which starts the program."""
    module = ["-m"] if arguments.module else []
    arguments.training_script_args = [
        *command,
        *module,
        "--",
        arguments.training_script,
        *arguments.training_script_args,
    ]
    arguments.training_script = "commlens"
    arguments.module = True


def _exit_status(watcher: Watcher | None, *, by_action: bool) -> int:
    """Return the exit status of a job that failed: 1, or what its verdict says to do."""
    if watcher is None or not by_action or not watcher.reporter.verdict_stands:
        return 1
    verdict = watcher.reporter.verdict
    if verdict is None or verdict.action is None:
        return 1
    return EXIT_STATUSES.get(verdict.action.do, 1)


@contextlib.contextmanager
def _watching(
    settings: Settings, failures: Mapping[int, tuple[int, int]], end_job: Callable[[str], None]
) -> Iterator[Watcher]:
    """Run a watcher in a thread while the job runs, and let it report before torchrun does."""
    roots = job_dirs.box_roots(settings.box_dir)
    folders = [job_dirs.user_folder(root) / str(settings.job) for root in roots]
    watcher = Watcher(folders, settings, workers=children_workers(os.getpid()), end_job=end_job)
    thread = threading.Thread(target=watcher.run, name="commlens-watcher", daemon=True)
    # The watcher is also notified of this process's signals, one byte each. torchrun's handlers
    # stay installed.
    previous: Any = None
    with contextlib.suppress(ValueError):  # not in the main thread
        previous = signal.set_wakeup_fd(watcher.wake_fileno, warn_on_full_buffer=False)
    thread.start()
    try:
        with senders_remembered(STOP_NUMBERS):
            yield watcher
    finally:
        if previous is not None:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(previous)
        watcher.stop(failures)
        thread.join(FINISH_S)


def _print_trace_summary(directory: str, *, since: float) -> None:
    """Print a short summary of the first rank's trace, and where the traces are, on standard error.

    Args:
        directory: where the workers saved their traces.
        since: Unix time of the job's start; older files belong to other jobs.
    """
    from commlens.reports.trace_short import short_summary
    from commlens.traces.trace import Trace

    try:
        files = [
            path
            for path in Path(directory).glob("trace*.json")
            if path.stat().st_mtime >= since - 1
        ]
        if not files:
            print(f"commlens: no worker saved a trace in {directory}.", file=sys.stderr)
            return
        files.sort(key=lambda path: (len(path.name), path.name))
        print(short_summary(Trace.load(files[0]).to_summary()), file=sys.stderr)
        shown = os.path.relpath(directory)
        if len(files) == 1:
            print(
                f"commlens: commlens view {os.path.relpath(files[0])} shows the whole trace.",
                file=sys.stderr,
            )
        else:
            print(
                f"commlens: {len(files)} traces in {shown}; commlens view {shown} shows where ranks"
                " differ.",
                file=sys.stderr,
            )
    except (CommlensError, OSError) as error:
        print(f"commlens: the traces in {directory} could not be read: {error}", file=sys.stderr)
