r"""Count how often slow ranks of running jobs are named, and healthy ones accused.

    python benchmarks/slow_ranks.py [--healthy 20] [--ranks 2 4] [--where data forward ...] \
        [--at-once 4] [--steps 600] [--nodes 2] [--nvrx FOLDER]

Each job is DDP training on gloo whose steps compute for 40 ms. One rank is made slow; healthy jobs
have none. The ways:

* data: a sleep in its data loader, of 5, 20 and 100 ms a step; loader: the same in the worker
  process of a DataLoader
* forward: work in its forward pass, of 5, 20 and 100 ms a step
* gc: it makes garbage in cycles, and Python's collector takes 20 ms a step or more
* throttle: a cgroup leaves it a tenth of a core (as root)
* neighbour: four other programs run on the core that it is bound to
* after: it is late between the backward pass and the optimizer's step, by 20 and 100 ms

With ``--nodes`` the ranks are spread over nodes with a network of their own. All jobs take turns in
what DDP does: plain, with buffers to broadcast, with parameters that are not used, with a static
graph, with gradients that are accumulated over two passes, with a norm of the gradients after each
pass that rank 0 also prints now and then.

Run it on a busy machine, too: that is where ranks are late by chance. With ``--nvrx``, NVIDIA's
straggler detection (the folder of an unpacked ``nvidia-resiliency-ext``, with ``libcupti.so.12`` on
LD_LIBRARY_PATH) watches the same jobs, in which the program marks its data loading and its forward
pass as sections; it is asked for its relative scores every 100 steps, with its own threshold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

INTEGRATION = Path(__file__).resolve().parents[1] / "tests" / "integration"
sys.path.append(str(INTEGRATION))

import emulated_nodes  # noqa: E402

TRAIN = """
import contextlib, gc, os, random, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

where, ms, steps, shape = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
torch.set_num_threads(1)
detector = None
if os.environ.get("NVRX"):
    from nvidia_resiliency_ext.straggler import Detector as detector

def section(name):
    return detector.detection_section(name, profile_cuda=False) if detector else contextlib.nullcontext()

def report():
    # Detector.generate_report() without torch.cuda.synchronize(), which needs a GPU
    found = detector.reporter.generate_report(detector._get_section_summaries(), {})
    detector._reset_sections_elapseds()
    if dist.get_rank() == 0:
        for name, stragglers in found.identify_stragglers()["straggler_sections_relative"].items():
            print("NVRX", name, sorted(each.rank for each in stragglers), flush=True)

class Batches(torch.utils.data.Dataset):
    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return steps

    def __getitem__(self, index):
        if self.slow:
            time.sleep(ms / 1000)
        return torch.ones(8, 64)

def load_batch(slow, batches):
    if batches is not None:
        return next(batches)[0]
    if slow and where == "data":
        time.sleep(ms / 1000)
    return torch.ones(8, 64)

def print_loss(loss):
    time.sleep(ms / 1000)

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def make_garbage():
    began = time.perf_counter()
    while time.perf_counter() - began < ms / 1000:
        for _ in range(2000):
            a = []
            a.append(a)
        gc.collect()

def forward(model, batch, slow):
    burn(0.004)
    time.sleep(random.uniform(0.03, 0.042))
    if slow and where == "forward":
        burn(ms / 1000)
    if slow and where == "gc":
        make_garbage()
    if where in ("neighbour", "throttle"):
        burn(0.01)
    return model(batch).square().mean()

@contextlib.contextmanager
def squeezed(slow):
    neighbours = []
    if slow and where == "throttle":
        sys.path.append(sys.argv[4])
        from more_scenarios import throttle
        throttle.QUOTA_US = 10_000
        throttle.LIFETIME_S = 600
        throttle.squeeze()
    if slow and where == "neighbour":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()

def main():
    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1 and where != "none"
    if detector:
        detector.initialize(gather_on_rank0=True)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
    if shape == "buffers":
        layers.insert(1, torch.nn.BatchNorm1d(64))
    model = torch.nn.Sequential(*layers)
    if shape == "unused":
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(8)))
    model = DistributedDataParallel(
        model, bucket_cap_mb=0.01, find_unused_parameters=shape == "unused", static_graph=shape == "static"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(torch.utils.data.DataLoader(Batches(slow), num_workers=1)) if where == "loader" else None
    with squeezed(slow):
        for step in range(steps):
            with section("data"):
                batch = load_batch(slow, batches)
            with section("forward"):
                loss = forward(model, batch, slow)
            if shape == "accumulate":
                with model.no_sync():
                    (loss / 2).backward()
                loss = forward(model, batch, False) / 2
            loss.backward()
            if shape == "norm":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if dist.get_rank() == 0:
                    time.sleep(0.03 if step % 50 == 0 else 0.001)
            if slow and where == "after":
                print_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            if detector and step % 100 == 99:
                report()
    dist.destroy_process_group()

main()
"""
FUNCTIONS = {
    "data": "load_batch",
    "loader": "load_batch",
    "forward": "burn",
    "gc": "make_garbage",
    "throttle": "CPU limit",
    "neighbour": "no CPU",
    "after": "print_loss",
}
"""What a notice is to say of each way."""
AMOUNTS = {
    "data": (5, 20, 100),
    "forward": (5, 20, 100),
    "loader": (100,),
    "gc": (20, 100),
    "after": (20, 100),
}
USUAL_MS = 45  # of a step
SHAPES = ("plain", "buffers", "unused", "static", "accumulate", "norm")
ALONE = ("throttle", "neighbour")  # they would make the other jobs slow


class Case(NamedTuple):
    """One job."""

    ranks: int
    where: str  # "none", or the way in which rank 1 is slow
    ms: int
    shape: str = "plain"
    nodes: int = 1


class Outcome(NamedTuple):
    """What was said of it."""

    named: list[str]  # ranks said to be slow, in order
    why: bool  # the function or the cause is named
    cost: str
    nvrx: list[str]  # what NVIDIA's detector said at each report that named somebody
    words: str  # the notice


_subnets = itertools.count(60).__next__


def _run_on_nodes(
    case: Case, program: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Run a job on several nodes; return the output of both kinds of all, and nothing."""
    with emulated_nodes.nodes(case.nodes, folder, subnet=_subnets()) as made:
        per_node = case.ranks // case.nodes
        emulated_nodes.launch(made, program, per_node=per_node, **environment)
        exits = emulated_nodes.wait(made, 900)
        said = "\n".join(node.output for node in made)
    if any(exits):
        raise RuntimeError(said)
    return said, ""


def _run_here(
    case: Case, program: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[str, str]:
    command = [sys.executable, "-m", "commlens", "launch", f"--nproc-per-node={case.ranks}"]
    done = subprocess.run(
        [*command, *program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr, done.stdout


def run(case: Case, steps: int, nvrx: Path | None) -> Outcome:
    """Run one job under the watcher."""
    environment = {"OMP_NUM_THREADS": "1"}
    if nvrx is not None:
        environment |= {"NVRX": "1", "PYTHONPATH": f"{nvrx}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        fewer = round(steps * USUAL_MS / (USUAL_MS + case.ms))  # about as long as the others
        program = [str(script), case.where, str(case.ms), str(fewer), str(INTEGRATION), case.shape]
        run_it = _run_here if case.nodes == 1 else _run_on_nodes
        said, printed = run_it(case, program, Path(folder), environment)
    said = re.sub(r"\s+", " ", said)
    named = sorted(set(re.findall(r"Ranks? ([\d,-]+) makes? the job slow", said)))
    cost = re.search(r"wait for (\d+%) of the time", said)
    theirs = re.findall(r"^NVRX (.*)$", printed, re.M)
    notice = re.search(r"Ranks? [\d,-]+ makes? the job slow.*", said)
    return Outcome(
        named,
        FUNCTIONS.get(case.where, "-") in said,
        cost[1] if cost else "",
        theirs,
        notice[0] if notice else "",
    )


def main() -> int:
    """Run all jobs and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--healthy", type=int, default=20, help="healthy jobs of each size")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--where", nargs="*", choices=list(FUNCTIONS), default=["data", "forward"])
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--nvrx", type=Path, help="folder with nvidia_resiliency_ext, to compare with"
    )
    asked = parser.parse_args()
    wanted = [(ranks, "none", 0) for ranks in asked.ranks for _ in range(asked.healthy)]
    wanted += [
        (ranks, where, ms)
        for ranks in asked.ranks
        for where in asked.where
        for ms in AMOUNTS.get(where, (0,))
    ]
    shapes = itertools.cycle(SHAPES)
    cases = [Case(*each, shape, asked.nodes) for each, shape in zip(wanted, shapes, strict=False)]
    together = [case for case in cases if case.where not in ALONE]
    with ThreadPoolExecutor(asked.at_once) as pool:
        outcomes = dict(
            enumerate(pool.map(lambda case: run(case, asked.steps, asked.nvrx), together))
        )
    load = os.getloadavg()[1]
    cases = together + [case for case in cases if case.where in ALONE]
    outcomes |= {
        number: run(case, asked.steps, asked.nvrx)
        for number, case in enumerate(cases)
        if case.where in ALONE
    }
    healthy = [outcomes[number] for number, case in enumerate(cases) if case.where == "none"]
    accused = [outcome.words for outcome in healthy if outcome.named]
    print(f"load average {load:.1f} on {os.cpu_count()} cores, {asked.steps} steps")
    print(f"{'ranks':>5}  {'slow by':9} {'':>6}  named  cost  why  {'NVRx' if asked.nvrx else ''}")
    for number, case in enumerate(cases):
        if case.where != "none":
            outcome = outcomes[number]
            amount = f"{case.ms} ms" if case.ms else ""
            nvrx = "; ".join(f"{what} {count}x" for what, count in Counter(outcome.nvrx).items())
            cells = (
                f"{','.join(outcome.named) or '-':5}  {outcome.cost or '-':>4} "
                f" {'yes' if outcome.why else 'no':3}  {nvrx}"
            )
            print(f"{case.ranks:>5}  {case.where:9} {amount:>6}  {cells}  {case.shape}")
    print(
        f"healthy jobs: {len(healthy)}, of which a rank was accused in: {len(accused)}"
        f" {accused or ''}"
    )
    if asked.nvrx:
        theirs = [outcome.nvrx for outcome in healthy if outcome.nvrx]
        print(f"by NVRx in: {len(theirs)} {theirs or ''}")
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
