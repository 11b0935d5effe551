"""``commlens check``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.commands import add_program, program_of
from commlens.commands.verdict_output import add_html, add_json, show_verdict, write_page
from commlens.errors import CommandError, needs_torch
from commlens.text import printable

if TYPE_CHECKING:
    from commlens.check.judge import Checked

_CPU_S = 60.0
_RANKS_AT_MOST = 16  # of a larger world, some of each kind are run
_TIMEOUT_S = 300.0
_OUTPUT_LINES = 12


class CheckCommand:
    """Find the mismatches and deadlocks of a script before it runs, on one CPU.

    The script runs once as each rank, alone, on torch's fake backend, which sends nothing. Then
    the calls of all ranks are put together by the rules of a backend. For example: commlens check
    --world-size 8 --fake-tensors train.py --lr 0.1

    Exit status: 0 no fault was found, 1 a fault was found (with --strict also a latent one), 2
    wrong usage, 3 it is not proven whether there is one.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "commlens check --world-size N [options] script.py ... | -m module ..."
        parser.add_argument(
            "--world-size", type=int, required=True, metavar="N", help="number of ranks"
        )
        parser.add_argument(
            "--steps",
            type=int,
            metavar="N",
            help="stop each rank after N optimizer steps (default: at the program's end, or when"
            f" this check has taken about {_CPU_S:g} s)",
        )
        parser.add_argument(
            "--backend",
            choices=("gloo", "nccl"),
            help="the backend whose rules count (default: the one that the script asks for)",
        )
        parser.add_argument(
            "--fake-tensors",
            action="store_true",
            help="tensors without memory, for models that do not fit here",
        )
        parser.add_argument(
            "--ranks-per-node", type=int, default=8, metavar="N", help="ranks per node (default 8)"
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=_TIMEOUT_S,
            metavar="S",
            help=f"end the run of a rank after S seconds (default {_TIMEOUT_S:g})",
        )
        parser.add_argument(
            "--ranks",
            choices=("auto", "all"),
            default="auto",
            help="auto: of more than 16 ranks, run a few of each kind; all: run every rank"
            " (default auto)",
        )
        parser.add_argument(
            "--branch",
            action="append",
            default=[],
            metavar="FILE:LINE=VALUES",
            help="try these answers where the line asks for a value of a tensor:"
            " train.py:81=true,false, or =0,1 where it reads a number; repeatable",
        )
        parser.add_argument(
            "--strict", action="store_true", help="exit with 1 for latent faults, too"
        )
        add_json(parser)
        add_html(parser, "with the calls of all ranks")
        parser.add_argument(
            "--sarif",
            type=Path,
            metavar="FILE",
            help="also write the findings as SARIF, which code hosts show at the lines",
        )
        add_program(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.commands.diagnose import EXIT_FAULT, exit_status

        program = program_of(arguments, "check --world-size 8 train.py --lr 0.1")
        for name in ("steps", "ranks_per_node", "timeout"):
            value = getattr(arguments, name)
            if value is not None and value <= 0:
                option = "--" + name.replace("_", "-")
                raise CommandError(f"{option} must be more than 0, not {value}.")
        checked, outputs = _check(program, arguments)
        verdict = checked.verdict
        show_verdict(verdict, as_json=arguments.json)
        if not arguments.json:
            _print_output(checked, outputs)
        _write(checked, arguments, program[0])
        status = exit_status(verdict)
        return status or (EXIT_FAULT if arguments.strict and verdict.findings else status)


def _check(program: list[str], arguments: argparse.Namespace) -> tuple[Checked, dict[int, str]]:
    from commlens.commands.progress import ProgressBar
    from commlens.launch import worker

    worker.check_program(program, module=arguments.module)
    with needs_torch("commlens check"):
        from commlens.check.api import check_plan
        from commlens.check.branches import parse_branch
        from commlens.check.run_rank import Plan
    ranks = min(max(arguments.world_size, 1), _RANKS_AT_MOST)
    at_once = min(len(os.sched_getaffinity(0)), ranks)
    plan = Plan(
        lambda: worker.execute(program, module=arguments.module),
        arguments.world_size,
        steps=arguments.steps,
        cpu_s=None if arguments.steps else _CPU_S * at_once / ranks,
        fake_tensors=arguments.fake_tensors,
        ranks_per_node=arguments.ranks_per_node,
        timeout_s=arguments.timeout,
    )
    with ProgressBar("running ranks") as seen:
        return check_plan(
            plan,
            backend=arguments.backend or "",
            script=printable(" ".join(program)),
            seen=seen,
            branches=[parse_branch(text) for text in arguments.branch],
            all_ranks=arguments.ranks == "all",
        )


def _print_output(checked: Checked, outputs: dict[int, str]) -> None:
    """Print the end of the output of a rank that failed."""
    for rank, state in checked.outcome.ranks.items():
        if outputs.get(rank) and (state.sequence.exception or state.sequence.problem):
            lines = outputs[rank].rstrip().splitlines()[-_OUTPUT_LINES:]
            print(f"\nThe last lines of rank {rank}'s output:", *lines, sep="\n  ", file=sys.stderr)
            return


def _write(checked: Checked, arguments: argparse.Namespace, program: str) -> None:
    if arguments.html is not None:
        write_page(arguments.html, checked.examined, has_times=False)
    if arguments.sarif is not None:
        from commlens.atomic_write import write_whole
        from commlens.reports.sarif import sarif

        file = Path(f"{program.replace('.', '/')}.py" if arguments.module else program)
        write_whole(arguments.sarif, sarif(checked.verdict, file if file.is_file() else None))
        print(f"commlens: Wrote {arguments.sarif}.", file=sys.stderr)
