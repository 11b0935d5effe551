"""The README's table of figures: what people use today, and commlens, from the results of ``make
bench``.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- make bench writes this -->\n", "<!-- end -->\n"


def write(figures: dict[str, Any]) -> None:
    """Put the table into the README."""
    README.write_text(with_table(README.read_text(encoding="utf-8"), figures), encoding="utf-8")


def with_table(readme: str, figures: dict[str, Any]) -> str:
    """Return the README with this table in the place of its own."""
    return re.sub(
        f"{BEGIN}.*?{END}", lambda _: BEGIN + table(figures) + END, readme, flags=re.DOTALL
    )


def table(figures: dict[str, Any]) -> str:
    """Return the table, from the content of results/performance.json."""
    rows = {
        name: figures[name]["rows"]
        for name in ("diagnose_score", "diagnose_cost", "record_cost", "step_time", "verify_cost")
    }
    score = {
        tool: Counter(row[tool] for row in rows["diagnose_score"] if tool in row)
        for tool in ("torchfrtrace", "commlens")
    }
    right = {tool: f"{found['right']} of {sum(found.values())}" for tool, found in score.items()}
    largest = max(
        (row for row in rows["diagnose_cost"] if "torchfrtrace" in row),
        key=lambda row: row["ranks"],
    )
    read = {
        tool: f"{largest[tool]['cpu_s']:.1f} s of CPU, {largest[tool]['peak_mb']:,.0f} MB"
        for tool in ("torchfrtrace", "commlens")
    }
    call = calls_on_a_gpu(figures)["all_reduce 4 kB"]
    small = [
        row for row in rows["verify_cost"] if (row["ranks"], row["case"]) == (2, "all_reduce 4 B")
    ]
    verified = {row["mode"]: f"{row['ratio']:.1f} times as long" for row in small}
    traced, theirs = (
        _ratios(rows["step_time"], mode) for mode in ("traced", "torch CommDebugMode")
    )
    watched = _ratios(rows["step_time"], "recorded and watched")
    detail = verified["TORCH_DISTRIBUTED_DEBUG=DETAIL"]
    lines = [
        (
            "find the rank that stopped a job",
            f"torchfrtrace: right for {right['torchfrtrace']} generated jobs",
            f"right for {right['commlens']}",
        ),
        (
            f"read the dumps of {largest['ranks']} ranks",
            f"torchfrtrace: {read['torchfrtrace']}",
            read["commlens"],
        ),
        (
            "issue an `all_reduce` on one H200",
            f"not recorded: {call['bare']}",
            (
                f"recorded: {call['native']} with the [native engine](docs/native.md),"
                f" {call['python']} without it"
            ),
        ),
        (
            "record and watch a training step",
            "",
            f"{watched} times as long, on two shared cores",
        ),
        (
            "refuse a bad `all_reduce` in time",
            f"`TORCH_DISTRIBUTED_DEBUG=DETAIL`: {detail}",
            f"{verified['verified, native engine']}, with the native engine",
        ),
        (
            "see what a step communicates",
            f"CommDebugMode: {theirs} times as long",
            f"{traced} times as long",
        ),
    ]
    return (
        "\n".join(
            [
                "| | today | commlens |",
                "|---|---|---|",
                *(f"| {' | '.join(line)} |" for line in lines),
            ]
        )
        + "\n"
    )


def answers(figures: dict[str, Any]) -> list[str]:
    """Return the answers at the top of the page of measurements, from the same figures as the
    README's table; nothing while some are not measured.
    """
    try:
        step = figures["step_time"]["rows"]
        alone = _ratios([row for row in step if row["alone"]], "recorded and watched")
        call = calls_on_a_gpu(figures)["all_reduce 4 kB"]
        score = Counter(row["commlens"] for row in figures["diagnose_score"]["rows"])
        read = max(figures["diagnose_cost"]["rows"], key=lambda row: row["ranks"])
        memory = figures["memory_cost"]["rows"][-1]["box_bytes"][0]
        gpu = [goal["met"] for goal in figures["gpu_check"]["goals"]]
    except (KeyError, ValueError, IndexError):
        return []
    rows = [
        (
            "How much longer is a training step?",
            f"Lost in the noise: {alone} times as long, in turns with the bare job only;"
            f" {_ratios(step, 'recorded and watched')} if the shorter measurements count that take"
            " turns with other tools, too. Two shared cores, gloo",
            "what-commlens-adds-to-a-training-step",
        ),
        (
            "How much longer is a call on a GPU?",
            f"An `all_reduce` takes {call['bare']} bare, {call['native']} with the native engine,"
            f" {call['python']} with the Python engine. One H200",
            "on-a-gpu",
        ),
        (
            "How much memory does a rank need?",
            f"{memory / 1e6:.1f} MB of shared memory, and it does not grow",
            "memory-of-a-recorded-process",
        ),
        (
            "What does `--debug` cost?",
            "Of a small all_reduce on 2 ranks "
            f"{_small(figures, 'verified, native engine')} times as long;"
            f" `TORCH_DISTRIBUTED_DEBUG=DETAIL` {_small(figures, 'TORCH_DISTRIBUTED_DEBUG=DETAIL')}"
            " times. Nothing measurable from 1 MB on. Never tried on a GPU",
            "what-strict-verification-costs",
        ),
        (
            "What does tracing cost?",
            f"A step takes {_ratios(step, 'traced')} times as long, CommDebugMode's"
            f" {_ratios(step, 'torch CommDebugMode')}",
            "what-commlens-adds-to-a-training-step",
        ),
        (
            "How long does a diagnosis take?",
            f"{read['commlens']['cpu_s']:.0f} s of CPU for dumps of {read['ranks']:,} ranks",
            "what-a-diagnosis-costs",
        ),
        (
            "How soon is the verdict of a running job?",
            "By the [stall timeout](watch.md): 60 s, about 10 s where the fault is certain, at once"
            " when a process dies",
            "",
        ),
        (
            "How often is it right?",
            f"In {score['right']} of {sum(score.values())} generated dumps; in random jobs, see"
            " [reliability](reliability.md)",
            "how-often-a-diagnosis-is-right",
        ),
        (
            "Does it hold on a GPU?",
            f"{gpu.count(True)} of {len(gpu)} claims do, on one H200; [what failed, and"
            " why](nccl.md#what-ran-over-nccl)",
            "on-a-gpu",
        ),
    ]
    return [
        "| question | answer | |",
        "|---|---|---|",
        *(f"| {ask} | {said} | {f'[table](#{at})' if at else ''} |" for ask, said, at in rows),
        "",
    ]


def _small(figures: dict[str, Any], mode: str) -> str:
    (row,) = (
        row
        for row in figures["verify_cost"]["rows"]
        if (row["ranks"], row["case"], row["mode"]) == (2, "all_reduce 4 B", mode)
    )
    return f"{row['ratio']:.1f}"


def calls_on_a_gpu(figures: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return how long a call takes on the GPU, by op and by way to record."""
    (cost,) = (row for row in figures["gpu_check"]["rows"] if row["check"] == "cost")
    found: dict[str, dict[str, str]] = {}
    for way, cases in cost["finds"]["figures"].items():
        for case, times in cases.items():
            found.setdefault(case, {})[way] = f"{times['p50_us']:.0f} us"
    return found


def _ratios(rows: list[dict[str, Any]], mode: str) -> str:
    ratios = [row["ratio"] for row in rows if row["mode"] == mode]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
