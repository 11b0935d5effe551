r"""Run scenarios on emulated nodes with random kills of launchers, nodes and cables, and count
right, wrong and missing verdicts.

    python benchmarks/nodes_soak.py [--minutes 30] [--nodes 4] [--per-node 2] [--seed 1] \
        [--keep FOLDER] [--write]
    python benchmarks/nodes_soak.py --each --nodes 2 --per-node 4

With ``--each``, every scenario runs once and nothing is killed.

A verdict is wrong if it blames a rank that is not at fault: of the scenario, or of a node that was
killed. Nobody is at fault for a cable that was pulled. Needs root, for network namespaces. The runs
that are not right keep their folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from _report import machine, write_section

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "integration"))

from emulated_nodes import Node, launch, nodes, wait  # noqa: E402
from more_scenarios import SCENARIOS  # noqa: E402

from commlens.scenarios.registry import Scenario  # noqa: E402

LEFT_OUT = {"throttled"}  # needs a cgroup
EVENTS = ("none", "none", "none", "node", "launcher", "reporter", "cable")
JOB_S = 100.0
STALL_S = 3


class Outcome(NamedTuple):
    """What became of one run."""

    word: str  # right, wrong, none
    why: str
    left: list[str]  # processes and black boxes that are left


def verdicts(made: list[Node]) -> list[dict[str, object]]:
    """Return all verdicts that a node printed."""
    found = []
    for node in made:
        log = node.folder / "verdicts.jsonl"
        found += (
            [
                {**json.loads(line)["verdict"], "node": node.number}
                for line in log.read_text().splitlines()
            ]
            if log.exists()
            else []
        )
    return found


def judge(
    scenario: Scenario, event: str, hit: Node | None, made: list[Node], per_node: int
) -> tuple[str, str]:
    """Return the outcome, and the reason unless it is right."""
    truth = scenario.truth(len(made) * per_node)
    lost = (
        set(range(hit.number * per_node, (hit.number + 1) * per_node))
        if hit is not None and event != "cable"
        else set()
    )
    told = [
        each
        for each in verdicts(made)
        if each["kind"] not in ("waiting", "healthy", "undetermined")
    ]
    blamed = [(each["node"], each["kind"], each["culprits"], each["summary"]) for each in told]
    for each in told:
        if set(each["culprits"]) - set(truth.culprits) - lost:  # type: ignore[call-overload]
            return "wrong", f"blamed: {blamed}"
    right = any(
        each["culprits"] == list(truth.culprits)
        and str(each["kind"]).split("/")[0] in kinds(scenario, truth)
        for each in told
    )
    if scenario.fault is None and event == "none":
        return ("right", "") if not told else ("wrong", f"healthy, but {blamed}")
    if event == "none":
        return ("right", "") if right else ("none", f"{blamed}")
    survivors = [node for node in made if node is not hit]
    words = " ".join(" ".join(node.output.split()) for node in survivors)
    spoke = bool(told) or any(text in words for text in ("commlens: ", "VERDICT"))
    # A launcher may still wait for one that was killed when all ranks had ended.
    ended = all(process.poll() == 0 for node in survivors for process in node.processes) or all(
        node.output.count("ends with parameters") >= per_node for node in survivors
    )
    return ("right", "") if spoke or ended else ("none", "the survivors said nothing")


def kinds(scenario: Scenario, truth: object) -> set[str]:
    """Return the first words of the expected kinds."""
    return {kind.split("/")[0] for kind in truth.kinds}  # type: ignore[attr-defined]


def leftovers(made: list[Node], hit: Node | None) -> list[str]:
    """Return what is left of a job that has ended, on the nodes that nothing was done to."""
    left = []
    for node in made:
        if node is hit or any(process.poll() is None for process in node.processes):
            continue
        pids = subprocess.run(
            ["ip", "netns", "pids", node.namespace], capture_output=True, text=True, check=False
        ).stdout.split()
        left += [f"node {node.number}: process {pid} {command_of(pid)}" for pid in pids]
        left += [f"node {node.number}: {path.name}" for path in node.box_dir.rglob("*.box")]
    return left


def command_of(pid: str) -> str:
    """Return a process's command line."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:120]
        )
    except OSError:
        return ""


def disturb(event: str, made: list[Node], rng: random.Random, began: float) -> Node | None:
    """Do what the event says at a random moment; return the node that it hit."""
    if event == "none":
        return None
    hit = made[0] if event == "reporter" else rng.choice(made[1:])
    time.sleep(max(0.0, began + rng.uniform(6, 25) - time.monotonic()))
    if event == "node":
        hit.kill()
    elif event == "cable":
        hit.pull_the_cable()
    else:
        hit.processes[0].kill()
    return hit


def scenarios_of(world: int) -> list[Scenario]:
    """Return the scenarios that run with this many ranks."""
    return [
        each
        for each in SCENARIOS
        if each.name not in LEFT_OUT and world in each.worlds and each.impossible() is None
    ]


def run(
    scenario: Scenario, event: str, rng: random.Random, folder: Path, count: int, per_node: int
) -> Outcome:
    """Run one job, and disturb it at a random moment."""
    with nodes(count, folder) as made:
        began = time.monotonic()
        launch(
            made,
            ["-m", scenario.package, scenario.name],
            per_node=per_node,
            COMMLENS_STALL_TIMEOUT=str(STALL_S),
            COMMLENS_ABORT_ON="stall,mismatch",
            COMMLENS_DUMP_DIR=str(folder / "dumps"),
            COMMLENS_ON_VERDICT="cat >> verdicts.jsonl",  # in the node's folder
        )
        hit = disturb(event, made, rng, began)
        wait([node for node in made if node is not hit], max(1.0, began + JOB_S - time.monotonic()))
        time.sleep(2)
        word, why = judge(scenario, event, hit, made, per_node)
        return Outcome(word, why, leftovers(made, hit))


def main() -> None:
    """Run until the time is over, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--each", action="store_true", help="run every scenario once, and kill nothing"
    )
    parser.add_argument("--only", type=int, help="run this number only, and keep its folder")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("nodes-soak"),
        help="folder of the runs that were not right",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the table into docs/nodes.md, as the sweep or the soak",
    )
    asked = parser.parse_args()
    choices = scenarios_of(asked.nodes * asked.per_node)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    end, number, left = time.monotonic() + 60 * asked.minutes, asked.only or 0, 0
    while number < len(choices) if asked.each else time.monotonic() < end:
        rng = random.Random(asked.seed * 1000 + number)
        scenario, event = (
            (choices[number], "none") if asked.each else (rng.choice(choices), rng.choice(EVENTS))
        )
        folder = (asked.keep / f"run{number}").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        outcome = run(scenario, event, rng, folder, asked.nodes, asked.per_node)
        kind = "a healthy job" if scenario.fault is None else "a fault"
        words = {
            "none": "",
            "launcher": ", a launcher killed",
            "reporter": ", the first launcher killed",
            "node": ", a node killed",
            "cable": ", a cable pulled",
        }
        counts[kind + words[event]][outcome.word] += 1
        left += len(outcome.left)
        print(
            f"{number:3} {outcome.word:5} {scenario.name:24} {event:9} {outcome.why}"
            f" {'; '.join(outcome.left)}",
            flush=True,
        )
        if outcome.word == "right" and not outcome.left and asked.only is None:
            shutil.rmtree(folder, ignore_errors=True)
        if asked.only is not None:
            break
        number += 1
    rows = [
        f"| {name} | {row['right']} | {row['wrong']} | {row['none']} |"
        for name, row in sorted(counts.items())
    ]
    total = sum(counts.values(), Counter())
    table = "\n".join(
        [
            "| run | right | wrong | none |",
            "|---|---:|---:|---:|",
            *rows,
            f"| all | {total['right']} | {total['wrong']} | {total['none']} |",
            "",
            f"{left} processes or black boxes were left. {machine()}",
        ]
    )
    print(table)
    if asked.write:
        write_section(HERE.parent / "docs" / "nodes.md", "sweep" if asked.each else "soak", table)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
