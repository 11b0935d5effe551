"""``commlens preview``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.commands import add_program, program_of
from commlens.errors import CommandError, OutputError, needs_torch

if TYPE_CHECKING:
    from commlens.model.network import Network
    from commlens.traces.trace import Trace

EXIT_PROGRAM_FAILED = 1


class PreviewCommand:
    """Trace one rank of a job of any size, in one process, without GPUs or a network.

    The script runs unchanged on torch's fake backend, which sends nothing; every collective is
    traced. For example: commlens preview --world-size 1024 --rank 3 --fake-tensors --network
    h100-ib train.py --lr 0.1
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from commlens.traces.network import PRESETS

        parser.usage = "commlens preview --world-size N [options] script.py ... | -m module ..."
        parser.add_argument(
            "--world-size", type=int, required=True, metavar="N", help="number of ranks"
        )
        parser.add_argument(
            "--rank", type=int, default=0, metavar="R", help="the rank to preview (default 0)"
        )
        parser.add_argument(
            "--fake-tensors",
            action="store_true",
            help="tensors without memory, for models that do not fit here",
        )
        parser.add_argument("--steps", type=int, metavar="N", help="stop after N optimizer steps")
        parser.add_argument(
            "--depth",
            choices=("collectives", "ops"),
            default="collectives",
            help="ops: also trace tensor ops",
        )
        parser.add_argument(
            "-o",
            "--output",
            metavar="FILE",
            help="save the trace, for commlens view and commlens compare",
        )
        parser.add_argument("--force", action="store_true", help="overwrite an existing file")
        parser.add_argument(
            "--network",
            metavar="PRESET",
            help=f"also estimate the time on this network: {', '.join(PRESETS)}",
        )
        parser.add_argument(
            "--ranks-per-node",
            type=int,
            metavar="N",
            help="ranks per node (default: the preset's, else 8)",
        )
        add_program(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        program = program_of(arguments, "preview --world-size 64 train.py --lr 0.1")
        if arguments.steps is not None and arguments.steps < 1:
            raise CommandError(f"--steps {arguments.steps} would run nothing: give 1 or more.")
        if arguments.output and not arguments.force and Path(arguments.output).exists():
            raise OutputError(
                f"File already exists, will not overwrite without --force: {arguments.output}"
            )
        network = _network(arguments)
        ranks_per_node = network.ranks_per_node if network else arguments.ranks_per_node or 8
        with hidden_gpus():  # before torch is imported
            trace, error = _preview(program, arguments, ranks_per_node)
        if arguments.output:
            trace.data.script = " ".join(program)
            trace.save(arguments.output)
        _print(trace, network)
        if arguments.output:
            print(f"\nSaved in {arguments.output}: commlens view {arguments.output}")
        if error is None:
            return 0
        if isinstance(error, KeyboardInterrupt):
            from commlens.launch import worker

            worker.show_from_program_at_exit(error)
            raise error
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            return code if isinstance(code, int) else EXIT_PROGRAM_FAILED
        print(
            "\ncommlens: the program failed; the trace covers the time before the failure.",
            file=sys.stderr,
        )
        return EXIT_PROGRAM_FAILED


@contextlib.contextmanager
def hidden_gpus() -> Iterator[None]:
    """Hide the machine's GPUs from torch's own code, for a process that needs none afterwards: the
    driver remembers what it saw when it was started.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _preview(
    program: list[str], arguments: argparse.Namespace, ranks_per_node: int
) -> tuple[Trace, BaseException | None]:
    from commlens.launch import worker

    worker.check_program(program, module=arguments.module)
    with needs_torch("commlens preview"):
        from commlens.tracing.preview.preview import Preview, check_world
    check_world(arguments.world_size, arguments.rank)

    def run_program() -> None:
        with _fresh_imports(program, arguments.module):
            worker.execute(program, module=arguments.module)

    runner = Preview(
        run_program,
        arguments.world_size,
        ranks_per_node=ranks_per_node,
        fake_tensors=arguments.fake_tensors,
        depth=arguments.depth,
        steps=arguments.steps,
        report=lambda text: print(f"commlens: {text}", file=sys.stderr),
    )
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        trace = runner.run(arguments.rank)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
    error = runner.error
    if isinstance(error, CommandError) and not trace.events:
        raise error
    if isinstance(error, CommandError):
        print(f"commlens: {error}", file=sys.stderr)
    elif isinstance(error, Exception):
        worker.show_from_program(error)
        sys.__excepthook__(type(error), error, error.__traceback__)
    elif (
        isinstance(error, SystemExit) and error.code is not None and not isinstance(error.code, int)
    ):
        print(error.code, file=sys.stderr)
    return trace, error


@contextlib.contextmanager
def _fresh_imports(program: list[str], is_module: bool) -> Iterator[None]:
    """Remove the program's own modules afterwards, so that a run as another rank imports them
    again.
    """
    folder = str(Path.cwd() if is_module else Path(program[0]).resolve().parent)
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(folder) and "site-packages" not in file:
                del sys.modules[name]


def _network(arguments: argparse.Namespace) -> Network | None:
    from msgspec.structs import replace

    from commlens.traces.network import preset

    each = arguments.ranks_per_node
    if each is not None and each < 1:
        raise CommandError("--ranks-per-node must be at least 1.")
    if arguments.network is None:
        return None
    network = preset(arguments.network)
    if each is None:
        return network
    return replace(network, ranks_per_node=each, name=f"{network.name}, changed")


def _print(trace: Trace, network: Network | None) -> None:
    trace.summary()
    if network is not None:
        from commlens.reports.trace_terminal import print_estimate
        from commlens.traces.network import estimate

        print_estimate(estimate(trace.data, network))
