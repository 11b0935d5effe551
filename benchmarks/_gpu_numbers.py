"""What comparing numbers does with tensors on a device, for gpu_check.py.

    python benchmarks/_gpu_numbers.py digests|waits SETTINGS
    commlens launch --check-numbers=... benchmarks/_gpu_numbers.py train CASE cuda|cpu BACKEND
    torchrun --nproc-per-node 2 benchmarks/_gpu_numbers.py cost cuda|cpu ROUNDS

SETTINGS is JSON, as _gpu_rank.py takes it. The last line of the output of all but ``train`` is the
result as JSON.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Finds = dict[str, Any]

KERNEL_S = 1.5
FAULT_STEP, DRAW_STEP, FAULTY_RANK, ELEMENT = 4, 6, 1, 37
STEPS = 8
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8"),
    *("uint8", "bool", "uint16", "uint32", "complex64"),
)
SPECIAL = (0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), 1e-45, 6e-8, 3e38, 65504.0)


# --- the same bytes give the same hash


def digests(given: Finds) -> Finds:
    """Hash the same bytes on the device and on the CPU."""
    import torch

    from commlens.numbers.measuring import Named, Unread, hash_without_nan, reason_to_skip

    device, errors, wrong = given["device"], {}, []
    compared: list[str] = []
    for name, make in cases(torch, big=device == "cuda" and not given["quick"]).items():
        try:
            here = make(device)
            there = here.detach().cpu().clone(memory_format=torch.preserve_format)
            reasons = reason_to_skip(here), reason_to_skip(there)
            if reasons[0] != reasons[1]:
                wrong.append(f"{name}: left out there {reasons[1]}, here {reasons[0]}")
            if reasons[0] is not None:
                errors[name] = f"left out: {reasons[0]}"
                continue
            one, other = (
                Unread([Named("parameter", name, tensor)]).read()[0] for tensor in (here, there)
            )
            compared.append(name)
            if one.digest != other.digest or (one.nans, one.infs) != (other.nans, other.infs):
                wrong.append(f"{name}: {one} here, {other} on the CPU")
            elif not close(one.norm, other.norm) or not close(
                one.mean, other.mean, slack=1e-3 * max(1.0, abs(other.norm))
            ):
                wrong.append(f"{name}: statistics {one} here, {other} on the CPU")
            if int(hash_without_nan(here)) != int(hash_without_nan(there)):
                wrong.append(f"{name}: another hash without NaN")
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"
    finds = {"compared": compared, "wrong": wrong, "errors": errors}
    return {**finds, "lone": lone_element(torch, device), "speed": speed(torch, given)}


def close(one: float, other: float, slack: float = 0.0) -> bool:
    """Return whether two statistics are the same but for rounding."""
    if one != one or other != other:
        return one != one and other != other
    return one == other or abs(one - other) <= slack + 1e-3 * max(abs(one), abs(other))


def cases(torch: Any, *, big: bool) -> dict[str, Callable[[str], Any]]:
    """Return functions that make a tensor on a device, by name."""

    def filled(dtype: Any, numel: int) -> Callable[[str], Any]:
        def make(device: str) -> Any:
            size = torch.empty(1, dtype=dtype).element_size()
            generator = torch.Generator().manual_seed(numel)
            if dtype == torch.bool:
                return torch.randint(0, 2, (numel,), generator=generator).bool().to(device)
            raw = torch.randint(0, 256, (numel * size,), dtype=torch.uint8, generator=generator)
            return raw.to(device).view(dtype)

        return make

    def special(dtype: Any) -> Callable[[str], Any]:
        return lambda device: torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).to(device)

    def normal(dtype: Any, *shape: int) -> Callable[[str], Any]:
        generator = torch.Generator().manual_seed(1)
        return lambda device: torch.randn(shape, generator=generator).to(dtype).to(device)

    def viewed(make: Callable[[str], Any], view: Callable[[Any], Any]) -> Callable[[str], Any]:
        return lambda device: view(make(device))

    made: dict[str, Callable[[str], Any]] = {}
    for name in DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        for numel in (1, 5, 65_537):
            made[f"{name} of {numel} random bytes"] = filled(dtype, numel)
        if dtype.is_floating_point:
            made[f"{name} of special values"] = special(dtype)
    for name in ("float32", "bfloat16", "float16"):
        dtype = getattr(torch, name)
        made[f"{name} normal"] = normal(dtype, 300, 700)
        made[f"{name} transposed"] = viewed(normal(dtype, 300, 701), lambda it: it.t())
        made[f"{name} from an odd place"] = viewed(normal(dtype, 100_003), lambda it: it[1:])
        made[f"{name} every third"] = viewed(normal(dtype, 1000), lambda it: it[::3])
        made[f"{name} scalar"] = normal(dtype)
    made["float32 channels last"] = viewed(
        normal(torch.float32, 2, 3, 8, 8), lambda it: it.to(memory_format=torch.channels_last)
    )
    made["complex64 conjugated"] = viewed(filled(torch.complex64, 100), lambda it: it.conj())
    made["float32 negated view"] = viewed(filled(torch.complex64, 100), lambda it: it.conj().imag)
    made["float32 of 9 million"] = normal(torch.float32, 9_000_001)
    if big:
        made["bfloat16 of 200 million"] = lambda device: (
            torch.arange(200_000_001, device=device, dtype=torch.float32).sin().bfloat16()
        )
    return made


def lone_element(torch: Any, device: str) -> Finds:
    """Change one bit of a large tensor, and return what the two hashes tell of it."""
    from commlens.numbers.measuring import Named, Unread
    from commlens.numbers.weights import MASK, lone_word

    tensor = torch.randn(1_000_003, device=device)
    before = Unread([Named("parameter", "it", tensor)]).read()[0].digest
    tensor.view(torch.int32)[654_321] ^= 1 << 20
    after = Unread([Named("parameter", "it", tensor)]).read()[0].digest
    word = lone_word((after - before) & MASK, tensor.numel())
    return {"position": word.position, "bit": word.bit} if word is not None else {}


def speed(torch: Any, given: Finds) -> Finds:
    """Measure the hash of parameters of several sizes: time, and memory of the device."""
    from commlens.numbers.measuring import Named, Unread

    on_gpu = given["device"] == "cuda"
    finds = {}
    for numel in (1_000, 1_000_000, 100_000_000) if on_gpu and not given["quick"] else (1_000,):
        tensors = [torch.randn(numel, device=given["device"]).bfloat16() for _ in range(4)]
        named = [Named("parameter", str(number), each) for number, each in enumerate(tensors)]
        Unread(named).read()
        before, taken, called = memory(torch, on_gpu), [], []
        for _ in range(5):
            sync(torch, on_gpu)
            began = time.perf_counter()
            unread = Unread(named)
            called.append(time.perf_counter() - began)
            unread.read()
            taken.append(time.perf_counter() - began)
        finds[f"4 of {numel}"] = {
            "call_ms": statistics.median(called) * 1000,
            "all_ms": statistics.median(taken) * 1000,
            "gb_per_s": numel * 8 / statistics.median(taken) / 1e9,
            "peak_mb": (memory(torch, on_gpu, peak=True) - before) / 1e6,
            "left_mb": (memory(torch, on_gpu) - before) / 1e6,
        }
    return finds


def memory(torch: Any, on_gpu: bool, *, peak: bool = False) -> int:
    """Return the bytes that torch has allocated on the device. Without ``peak``, the peak begins
    anew.
    """
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    if peak:
        return int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def sync(torch: Any, on_gpu: bool) -> None:
    """Wait for the device."""
    if on_gpu:
        torch.cuda.synchronize()


# --- the launching thread waits for nothing


def waits(given: Finds) -> Finds:
    """Begin checks behind a long kernel, in a process that has made none before, and time the calls
    and the thread that reads.

    The driver takes about a thousand kernels ahead: a call that launches more waits for room. The
    small model stays below that; of the large one it is only told.
    """
    import torch

    on_gpu, nn = given["device"] == "cuda", torch.nn
    small = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1000))
    large = transformer(torch, 2, 64 if on_gpu else 32)
    finds: Finds = {}
    for size, model in {"small": small, "large": large}.items():
        model = model.to(given["device"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        inputs = torch.randint(0, 1000, (8, 64 if on_gpu else 8), device=given["device"])

        def step(model: Any = model, optimizer: Any = optimizer, inputs: Any = inputs) -> None:
            model(inputs).square().mean().backward()
            optimizer.step()

        step()
        busy = kernel(torch, on_gpu)
        finds[size] = {
            name: wait_once(torch, model, optimizer, step, busy, on_gpu)
            for name in ("first", "second", "third")
        }
        finds[size]["bare"] = bare_step(torch, step, busy, on_gpu)
        if size == "small":
            finds["alone"] = after_step_alone(torch, step, optimizer, busy, on_gpu)
        finds[size]["launches"] = launches(torch, model, optimizer, on_gpu)
    return finds


def wait_once(torch: Any, model: Any, optimizer: Any, step: Any, busy: Any, on_gpu: bool) -> Finds:
    """Begin a check behind a kernel, then launch another step."""
    from commlens.numbers.inspection import Inspection, tensors_to_check
    from commlens.numbers.replicas import Model

    whole = Model([model], (0, 1))
    sync(torch, on_gpu)
    busy(KERNEL_S)
    began, cpu = time.perf_counter(), time.thread_time()
    with sync_warnings(torch, on_gpu) as heard:
        inspection = Inspection(tensors_to_check(whole, optimizer))
    call_s, call_cpu_s = time.perf_counter() - began, time.thread_time() - cpu
    read = Reading(inspection)
    step()
    step_s = time.perf_counter() - began
    sync(torch, on_gpu)
    done_s = time.perf_counter() - began
    read.join(20)
    return {
        "call_s": call_s,
        "call_cpu_s": call_cpu_s,
        "step_called_s": step_s,
        "done_s": done_s,
        "read_s": read.wall_s,
        "read_cpu_s": read.cpu_s,
        "tensors": read.tensors,
        "warnings": heard[:8],
    }


def launches(torch: Any, model: Any, optimizer: Any, on_gpu: bool) -> Finds:
    """Count the kernels and copies that a check launches, by torch's profiler."""
    from commlens.numbers.inspection import Inspection, tensors_to_check
    from commlens.numbers.replicas import Model

    if not on_gpu:
        return {}
    try:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            Inspection(tensors_to_check(Model([model], (0, 1)), optimizer)).read()
            torch.cuda.synchronize()
        return {
            each.key: each.count for each in profiled.key_averages() if each.key.startswith("cu")
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class Reading(threading.Thread):
    """The thread that reads the results of a check, as the one that sends them does."""

    def __init__(self, inspection: Any) -> None:
        super().__init__(daemon=True)
        self._inspection = inspection
        self.wall_s = self.cpu_s = -1.0
        self.tensors = 0
        self.start()

    def run(self) -> None:
        """Read them."""
        began, cpu = time.perf_counter(), time.thread_time()
        tables, _ = self._inspection.read()
        self.tensors = sum(len(table.measures) for table in tables)
        self.wall_s, self.cpu_s = time.perf_counter() - began, time.thread_time() - cpu


def bare_step(torch: Any, step: Callable[[], None], busy: Any, on_gpu: bool) -> Finds:
    """Time the launch of a step behind a kernel without any check: what the others compare to."""
    sync(torch, on_gpu)
    busy(KERNEL_S)
    began = time.perf_counter()
    step()
    called_s = time.perf_counter() - began
    sync(torch, on_gpu)
    return {"step_called_s": called_s, "done_s": time.perf_counter() - began}


def after_step_alone(torch: Any, step: Any, optimizer: Any, busy: Any, on_gpu: bool) -> Finds:
    """Time the hook after a step that is not checked, behind a kernel."""
    from commlens.model.number_checks import NumberChecks
    from commlens.numbers import sampling

    sampler = sampling.TensorSampler(NumberChecks(every=1000))
    step()
    sampler.after_step(optimizer)
    taken = []
    sync(torch, on_gpu)
    busy(KERNEL_S)
    began = time.perf_counter()
    with sync_warnings(torch, on_gpu) as heard:
        for _ in range(100):
            once = time.perf_counter_ns()
            sampler.after_step(optimizer)
            taken.append((time.perf_counter_ns() - once) / 1000)
    called_s = time.perf_counter() - began
    sync(torch, on_gpu)
    return {
        "hook_us": statistics.median(taken),
        "all_s": called_s,
        "done_s": time.perf_counter() - began,
        "warnings": heard[:4],
    }


@contextlib.contextmanager
def sync_warnings(torch: Any, on_gpu: bool) -> Iterator[list[str]]:
    """Collect what torch says of calls that wait for the device."""
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield heard
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    heard += [f"{one.filename}:{one.lineno}: {str(one.message)[:120]}" for one in caught]


def kernel(torch: Any, on_gpu: bool) -> Callable[[float], None]:
    """Return a function that keeps the device busy for that many seconds."""
    if not on_gpu:
        return lambda _: None
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    clock = 200_000_000 / (time.perf_counter() - began)
    return lambda seconds: torch.cuda._sleep(int(clock * seconds))


def transformer(torch: Any, layers: int, width: int) -> Any:
    """Return a small transformer without dropout."""
    torch.manual_seed(0)
    nn = torch.nn
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(nn.Embedding(1000, width), *blocks, nn.Linear(width, 1000))


# --- what it costs: two ranks, which take turns on the device


def cost(device: str, rounds: int) -> None:
    """Train on rank 1, then on rank 0, each step without a hook, with one that has nothing to
    compare, and with a check; rank 1 prints the medians.
    """
    import torch
    import torch.distributed as dist

    from commlens.model.number_checks import NumberChecks
    from commlens.numbers import checks, sampling

    on_gpu = device == "cuda"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers, width, batch = (12, 768, (8, 256)) if on_gpu else (1, 32, (2, 8))
    model = transformer(torch, layers, width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randint(0, 1000, batch, device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed() -> Finds:
        sync(torch, on_gpu)
        began = time.perf_counter()
        step()
        called = time.perf_counter() - began
        sync(torch, on_gpu)
        return {"called_ms": called * 1000, "all_ms": (time.perf_counter() - began) * 1000}

    for _ in range(3):
        step()
    sampling.start(NumberChecks(every=2))
    sampler = sampling._sampler
    assert sampler is not None
    seen: dict[str, list[Finds]] = {"bare": [], "not due": [], "check": []}
    peaks: dict[str, list[float]] = {name: [] for name in seen}
    step()  # the first step has a check
    for turn in range(rounds + 2):
        if rank == 0:
            dist.barrier()
        for name, times in seen.items():
            sampler.off = name == "bare"
            while not sampler.off and (sampler._steps % 2 == 1) != (name == "check"):
                step()  # checks come at even numbers
            before = memory(torch, on_gpu)
            found = timed()
            if turn >= 2:
                times.append(found)
                peaks[name].append((memory(torch, on_gpu, peak=True) - before) / 1e6)
        if rank == 1:
            dist.barrier()
    medians = {
        name: {figure: statistics.median(one[figure] for one in times) for figure in times[0]}
        for name, times in seen.items()
    }
    pairs = {
        name: statistics.median(
            one["all_ms"] - bare["all_ms"] for one, bare in zip(times, seen["bare"], strict=True)
        )
        for name, times in seen.items()
    }
    finds = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "rounds": rounds,
        "medians": medians,
        "added_ms": pairs,
        "peak_mb": {name: max(values) for name, values in peaks.items()},
        "is_off": sampler.off,
        "steps": sampler._steps,
    }
    dist.barrier()
    checks.finish()
    dist.destroy_process_group()
    if rank == 1:
        print(json.dumps(finds), flush=True)


# --- a job of two ranks


def train(case: str, device: str, backend: str) -> None:
    """Train with DDP; in the case ``fault`` one element of rank 1's becomes another in step 4."""
    from _gpu_pair import ready

    torch = ready(device, backend, timeout_s=60.0)
    import torch.distributed as dist

    rank = dist.get_rank()
    plain = transformer(torch, 2, 64).to(device)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    weight = plain[1].linear1.weight
    for step in range(1, STEPS + 1):
        inputs = torch.randint(0, 1000, (4, 16), device=device)
        loss = model(inputs).square().mean()
        loss.backward()
        if case == "fault" and step == FAULT_STEP and rank == FAULTY_RANK:
            weight.data.view(-1)[ELEMENT] += 0.25
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # an output that is compared
        if rank == 0:
            print(f"step {step} loss {mean.item() / 2:.4f}", flush=True)
        time.sleep(0.2)
    sync(torch, device == "cuda")
    print(f"rank {rank} ended well", flush=True)
    dist.destroy_process_group()


def train_tensor_parallel(device: str, backend: str) -> None:
    """Train with tensor parallel and dropout; rank 1 draws one random number more in a step."""
    from _gpu_pair import ready

    torch = ready(device, backend, timeout_s=60.0)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(model.to(device), init_device_mesh(device, (2,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 64, device=device)
    for step in range(1, STEPS + 1):
        if step == DRAW_STEP and dist.get_rank() == FAULTY_RANK:
            torch.rand(1, device=device)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
    sync(torch, device == "cuda")
    print(f"rank {dist.get_rank()} ended well", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Do what the first argument names."""
    what = sys.argv[1]
    if what == "train" and sys.argv[2] == "generator":
        train_tensor_parallel(*sys.argv[3:5])
    elif what == "train":
        train(*sys.argv[2:5])
    elif what == "cost":
        cost(sys.argv[2], int(sys.argv[3]))
    else:
        print(
            json.dumps({"digests": digests, "waits": waits}[what](json.loads(sys.argv[2]))),
            flush=True,
        )


if __name__ == "__main__":
    main()
