"""Reads a node's hardware as commlens does, and keeps what NVIDIA's own tools print beside it.

    python benchmarks/_gpu_health.py read|release SETTINGS
    python benchmarks/_gpu_health.py load cuda|cpu

The first prints JSON in its last line; SETTINGS is JSON, as _gpu_rank.py takes it. It imports no
torch, as the watcher does not. The second keeps the device busy until its standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _gpu_machine import ended

Finds = dict[str, Any]

APPS = "--query-compute-apps=pid,process_name,used_memory"
LOAD_STARTS_S = 25.0
QUERY = "nvidia-smi --query-gpu"
TOOLS = {
    "nvidia-smi -q": (["nvidia-smi", "-q"], 9000),
    "nvidia-smi topo -m": (["nvidia-smi", "topo", "-m"], 1500),
    "nvidia-smi": (["nvidia-smi"], 3000),
    "dmesg, the end": (["sh", "-c", "dmesg | tail -n 40"], 4000),
    "dmesg, of NVIDIA": (
        ["sh", "-c", "dmesg | grep -i -E 'nvidia|nvrm|xid|pcie' | tail -n 30"],
        4000,
    ),
    "dmesg -T, the end": (["sh", "-c", "dmesg -T | tail -n 3"], 600),
    "files of the driver": (
        ["sh", "-c", "ls -l /dev/nvidia* /dev/kmsg; ls -R /proc/driver/nvidia | head -40"],
        2500,
    ),
    "the driver's version": (["cat", "/proc/driver/nvidia/version"], 600),
    "PCI": (
        [
            "sh",
            "-c",
            "for d in /sys/bus/pci/devices/*; do echo $(readlink $d) $(cat $d/class); done",
        ],
        2500,
    ),
    "PCI lanes": (
        ["sh", "-c", "grep . /sys/bus/pci/devices/*/*_link_* 2>/dev/null | tail -n 24"],
        2500,
    ),
}


def said(command: list[str], most: int = 2000, limit_s: float = 15.0) -> str:
    """Return what a command prints, shortened in its middle; its error if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    text = ended.stdout + (
        f"[status {ended.returncode}] {ended.stderr}" if ended.returncode else ""
    )
    return text if len(text) <= most else f"{text[: most * 2 // 3]}\n[...]\n{text[-most // 3 :]}"


def own_devices() -> list[str]:
    """Return the devices of GPUs that this process holds open."""
    from _gpu_rank import open_devices

    return open_devices(os.getpid())


def costs(read: Callable[[], Any], times: int) -> Finds:
    """Return what a reading takes, in ms: wall, CPU time of this process, and of its children."""
    walls, cpus, children = [], [], []
    for _ in range(times):
        began, cpu, child = time.perf_counter(), time.process_time(), children_s()
        read()
        walls.append((time.perf_counter() - began) * 1000)
        cpus.append((time.process_time() - cpu) * 1000)
        children.append((children_s() - child) * 1000)
    return {
        "times": times,
        "wall_ms": statistics.median(walls),
        "most_wall_ms": max(walls),
        "cpu_ms": statistics.median(cpus),
        "children_cpu_ms": statistics.median(children),
    }


def children_s() -> float:
    """Return the CPU time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def load(device: str) -> Iterator[int]:
    """Keep the device busy from another process. Yields its pid; 0 if it did not start in time."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, "load", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    started = threading.Event()

    def wait(stream: Any) -> None:
        if stream.readline():
            started.set()

    threading.Thread(target=wait, args=(process.stdout,), daemon=True).start()
    with ended(process):
        yield process.pid if started.wait(LOAD_STARTS_S) else 0
        process.stdin.close()


def be_busy(device: str) -> None:
    """Multiply matrices until the standard input closes, one minute at most."""
    import torch

    size = 8192 if device == "cuda" else 64
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    one = torch.randn(size, size, device=device, dtype=kind)
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    print("busy", flush=True)
    until = time.monotonic() + 60
    while not over.is_set() and time.monotonic() < until:
        for _ in range(8):
            one @ one
        if device == "cuda":
            torch.cuda.synchronize()
        else:
            time.sleep(0.01)
    os._exit(0)


class Readings:
    """The two ways to read NVIDIA's GPUs, each if it works here."""

    def __init__(self) -> None:
        from commlens.health import gpus

        self.nvml: Any = None
        self.smi: Any = None
        self.problems: dict[str, str] = {}
        self.start_ms: dict[str, float] = {}
        for name, make in {"nvml": gpus._nvml, "smi": gpus._smi}.items():
            began = time.perf_counter()
            try:
                made: Any = make()
                if made is None:
                    self.problems[name] = why_no_nvml()
                setattr(self, name, made)
            except Exception as error:
                self.problems[name] = f"{type(error).__name__}: {error}"
            self.start_ms[name] = (time.perf_counter() - began) * 1000

    def both(self) -> Finds:
        """Read in both ways, one right after the other."""
        return {name: way() for name, way in {"nvml": self.nvml, "smi": self.smi}.items() if way}

    def costs(self) -> Finds:
        """Return the cost of a reading in each way."""
        found = {}
        if self.nvml:
            found["nvml"] = costs(self.nvml, 20)
            found["nvml, processes"] = costs(self.nvml.processes, 10)
        if self.smi:
            found["smi"] = costs(self.smi, 4)
        return found

    def processes(self) -> Finds:
        """Return the GPU of each process, in each way."""
        return {
            name: {str(pid): gpu for pid, gpu in way.processes().items()}
            for name, way in {"nvml": self.nvml, "smi": self.smi}.items()
            if way
        }


def why_no_nvml() -> str:
    """Return why NVML cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no reason"


def nvml_fields() -> Finds:
    """Return what each function of NVML that is asked really answers, or its error."""
    try:
        import pynvml
    except ImportError as error:
        return {"import": str(error)}
    found: Finds = {"package": getattr(pynvml, "__version__", "")}
    with contextlib.suppress(Exception):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        for name, more in {
            "nvmlDeviceGetName": (),
            "nvmlDeviceGetTemperature": (0,),
            "nvmlDeviceGetPowerUsage": (),
            "nvmlDeviceGetClockInfo": (1,),
            "nvmlDeviceGetCurrentClocksThrottleReasons": (),
            "nvmlDeviceGetCurrentClocksEventReasons": (),
            "nvmlDeviceGetTotalEccErrors": (1, 0),
            "nvmlDeviceGetRemappedRows": (),
            "nvmlDeviceGetCurrPcieLinkGeneration": (),
            "nvmlDeviceGetMaxPcieLinkGeneration": (),
            "nvmlDeviceGetCurrPcieLinkWidth": (),
            "nvmlDeviceGetMaxPcieLinkWidth": (),
            "nvmlDeviceGetNvLinkState": (0,),
            "nvmlDeviceGetPersistenceMode": (),
        }.items():
            try:
                found[name] = str(getattr(pynvml, name)(gpu, *more))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def read(given: Finds) -> Finds:
    """Read all, idle and under load. Each part stands alone: an error of one is kept in its place."""
    finds: Finds = {"pid": os.getpid(), "devices": {}, "errors": {}}
    devices = finds["devices"]

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            finds["errors"][name] = f"{type(error).__name__}: {error}"
        devices[f"after {name}"] = own_devices()

    devices["before"] = own_devices()
    readings = Readings()
    devices["begun"] = own_devices()
    finds |= {"problems": readings.problems, "start_ms": readings.start_ms}
    with part("idle"):
        time.sleep(1.0)
        finds["idle"] = readings.both()
        finds["idle_costs"] = readings.costs()
        finds["nvml_fields"] = nvml_fields()
    with part("load"), load(given["device"]) as pid:
        finds["load_pid"] = pid
        time.sleep(2.0 if given["device"] == "cuda" else 0.1)
        finds["load"] = readings.both()
        finds["load_costs"] = readings.costs()
        finds["processes"] = readings.processes()
        finds["apps"] = said(["nvidia-smi", APPS, "--format=csv,noheader"])
        finds["apps_as_read"] = said(
            ["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid", "--format=csv"]
        )
        finds["reason"] = said(["nvidia-smi", "-q", "-d", "PERFORMANCE,POWER,CLOCK"], 5000)
        finds["node"] = node(pid)
    with part("sampler"):
        finds["sampler"] = sampler()
    with part("kernel log"):
        finds["kernel_log"] = kernel_log()
    with part("raw"):
        finds["raw"] = raw()
    with part("end"):
        devices["closed"] = own_devices()
        shut_down()
    devices["shut down"] = own_devices()
    finds["torch_loaded"] = "torch" in sys.modules
    finds["libraries"] = loaded()
    return finds


def shut_down() -> None:
    """End NVML. It counts how often it was begun."""
    with contextlib.suppress(Exception):
        import pynvml

        for _ in range(20):
            pynvml.nvmlShutdown()


def release(_: Finds) -> Finds:
    """Read the GPUs once as the watcher does, and look which devices stay open after the end."""
    from commlens.health.monitor import Monitor, NodeSampler

    finds: Finds = {"before": own_devices()}
    sampler = NodeSampler()
    sampler.look(thorough=True)
    finds["reading"] = own_devices()
    finds["apps"] = said(["nvidia-smi", APPS, "--format=csv,noheader"])
    sampler.close()
    finds["closed"] = own_devices()
    monitor = Monitor()
    monitor.report([], wait_s=8.0)
    monitor.close()
    finds["monitor_closed"] = own_devices()
    shut_down()
    return {**finds, "pid": os.getpid(), "shut_down": own_devices(), "libraries": loaded()}


def loaded() -> list[str]:
    """Return the libraries of CUDA that this process has loaded."""
    mapped = Path("/proc/self/maps").read_text()
    return [name for name in ("libcuda.so", "libcudart", "libnvidia-ml") if name in mapped]


def node(load_pid: int) -> Finds:
    """Return what the watcher's monitor reports of this node, with the busy process as rank 0."""
    import msgspec

    from commlens.health.monitor import Monitor
    from commlens.health.places import RankOfNode

    began = time.perf_counter()
    monitor = Monitor(past=True)
    try:
        monitor.look_now()
        monitor.learn_places(dict(os.environ))
        health = monitor.report([RankOfNode(0, load_pid, 0, {})], wait_s=8.0)
    finally:
        monitor.close()
    return {
        "wall_ms": (time.perf_counter() - began) * 1000,
        "devices": own_devices(),
        "health": msgspec.to_builtins(health),
    }


def sampler() -> Finds:
    """Return what each source of the hardware costs, in ms of CPU time, and which are not read."""
    from commlens.health.monitor import NodeSampler

    open_before = own_devices()
    made = NodeSampler(past=True)
    finds: Finds = {"open_before": open_before, "looks": []}
    try:
        for _ in range(3):
            began, cpu = time.perf_counter(), time.thread_time()
            values, events = made.look(thorough=True)
            finds["looks"].append(
                {
                    "wall_ms": (time.perf_counter() - began) * 1000,
                    "cpu_ms": (time.thread_time() - cpu) * 1000,
                    "events": len(events),
                    "cost_ms": {each.name: each.cost_s * 1000 for each in made._sources},
                }
            )
        finds["values"] = values
        finds["not_read"] = [[each.source, each.reason] for each in made.not_read]
        finds["way"] = type(made.gpus._nvidia).__name__ if made.gpus is not None else ""
    finally:
        made.close()
    finds["open_after"] = own_devices()
    return finds


def kernel_log() -> Finds:
    """Read all of the kernel's log, and then what is new."""
    from commlens.health.kernel_log import KernelLog

    opened = KernelLog(past=True)
    try:
        began, cpu = time.perf_counter(), time.thread_time()
        events = opened.read_new()
        first = (time.perf_counter() - began) * 1000, (time.thread_time() - cpu) * 1000
        again = costs(opened.read_new, 5)
        way = "kmsg" if opened._kmsg >= 0 else opened._journal or "a file"
    finally:
        opened.close()
    import msgspec

    return {
        "way": way,
        "first_wall_ms": first[0],
        "first_cpu_ms": first[1],
        "again": again,
        "events": msgspec.to_builtins(events[-20:]),
    }


def raw() -> Finds:
    """Return what NVIDIA's tools and the kernel print."""
    from commlens.health.gpus import _SMI_NAMES

    fields = ",".join(_SMI_NAMES)
    found = {name: said(command, most) for name, (command, most) in TOOLS.items()}
    found[QUERY] = said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"])
    renamed = fields.replace("clocks_throttle_reasons.active", "clocks_event_reasons.active")
    found[f"{QUERY}, the new name"] = said(["nvidia-smi", f"--query-gpu={renamed}", "--format=csv"])
    if shutil.which("nvidia-smi"):
        known = said(["nvidia-smi", "--help-query-gpu"], 200_000)
        found["fields that it does not list"] = [
            field for field in _SMI_NAMES if f'"{field}"' not in known
        ]
    return found


def main() -> None:
    """Read, or be the load."""
    if sys.argv[1] == "load":
        be_busy(sys.argv[2])
        return
    what = {"read": read, "release": release}[sys.argv[1]]
    print(json.dumps(what(json.loads(sys.argv[2])), default=str), flush=True)


if __name__ == "__main__":
    main()
