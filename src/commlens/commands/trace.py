"""``commlens trace``."""

from __future__ import annotations

import argparse

from commlens.commands import add_program, program_of

DIRECTORY = "commlens-trace"


class TraceCommand:
    """Run a script and trace its collectives: when, why, and how many bytes.

    Under torchrun, write one file per rank: torchrun --nproc-per-node 2 -m commlens trace train.py;
    or: commlens launch --trace.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = (
            "commlens trace [options] script.py ... | commlens trace [options] -m module ..."
        )
        parser.add_argument(
            "--steps",
            metavar="FIRST:LAST",
            help="trace only these optimizer steps, counted from 0; 2:4 for steps 2 and 3",
        )
        parser.add_argument(
            "--depth",
            choices=("collectives", "ops"),
            default="collectives",
            help=(
                "ops: also trace tensor ops, which slows training noticeably (default collectives)"
            ),
        )
        parser.add_argument(
            "-o",
            "--output",
            metavar="DIR",
            default=DIRECTORY,
            help=f"folder for trace-rank0.json, ... or trace.json (default {DIRECTORY})",
        )
        parser.add_argument("--no-summary", action="store_true", help="print no summary at the end")
        add_program(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.launch import trace_worker

        trace_worker.run(
            program_of(arguments, "trace train.py --lr 0.1"),
            module=arguments.module,
            directory=arguments.output,
            steps=arguments.steps,
            depth=arguments.depth,
            summary=not arguments.no_summary,
        )
