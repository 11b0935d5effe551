"""More checks of gpu_check.py: training jobs of two ranks with one fault, on one GPU.

Their program is _gpu_program.py. What the ranks and the library printed is kept, since nobody can
look at the machine afterwards.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shlex
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _gpu_checks import HERE, Bench, Check, Finds, Judged, NoResultError, SkippedError
from _gpu_machine import REPOSITORY, Ended
from _gpu_rank import open_devices

PROGRAM = HERE / "_gpu_program.py"
USER_PROGRAM = HERE / "_gpu_user_program.py"
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
KEPT = 3000  # characters of each end of an output
OUR_LINES = re.compile(r"^(commlens: .*|VERDICT .*)", re.MULTILINE)
VERDICT_PARTS = (
    "kind",
    "why",
    "culprits",
    "victims",
    "confidence",
    "certain",
    "summary",
    "explanation",
    "source",
    "group",
    "collective",
    "evidence",
    "missing_evidence",
    "looked_at",
)


def shortened(text: str) -> str:
    """Return both ends of a long text."""
    if len(text) <= 2 * KEPT:
        return text
    return f"{text[:KEPT]}\n[... {len(text) - 2 * KEPT} characters ...]\n{text[-KEPT:]}"


def line_of(mark: str) -> str:
    """Return the place of a marked line of the program, as a verdict names it."""
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# LINE {mark}")]
    return f"{PROGRAM.name}:{found[0]}"


def need_two_ranks(bench: Bench) -> None:
    """Skip the check where two ranks cannot share the GPU."""
    if bench.pair:
        raise SkippedError(f"two ranks do not share this GPU: {bench.pair}")


def parts(verdict: Finds) -> Finds:
    """Return what is kept of a verdict."""
    return {name: verdict.get(name) for name in VERDICT_PARTS}


def texts_of(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the text files in a folder, shortened."""
    return {
        str(path.relative_to(folder)): shortened(path.read_text("utf-8", "replace"))
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size
    }


# --- under commlens launch


def launched(case: str, model: str, *options: str, **environ: str) -> Callable[[Bench], Finds]:
    """Return the check of a job under ``commlens launch``."""

    def measure(bench: Bench) -> Finds:
        need_two_ranks(bench)
        folder = bench.folder()
        verdicts, moments, logs = folder / "verdicts", folder / "moments", folder / "logs"
        noted = f"cat >> {shlex.quote(str(verdicts))}; date +%s.%N >> {shlex.quote(str(moments))}"
        given: dict[str, str] = {
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
            "COMMLENS_BOX_DIR": str(folder / "boxes"),
            "COMMLENS_DUMP_DIR": str(folder / "dumps"),
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        command = ["launch", "--standalone", "--nproc-per-node", "2", "--on-verdict", noted]
        # Each rank's output goes to a file of its own, too.
        command += ["--log-dir", str(logs), "--tee", "3", *options]
        program = [str(PROGRAM), case, model, bench.device, bench.backend, str(folder)]
        ended = bench.commlens(*command, *program, limit_s=None, **given)
        finds = {
            "status": ended.status,
            "seconds": ended.seconds,
            "ended_well": ended.out.count("ended well"),
            "verdicts": read_verdicts(verdicts),
            "after_s": after_s(folder / "struck", moments),
            "our_lines": OUR_LINES.findall(unprefixed(ended.err)),
            "out": shortened(ended.out),
            "err": shortened(ended.err),
            "ranks": texts_of(logs, "**/stderr.log"),
        }
        if "--nccl-profiler" in options:
            finds["told_by_nccl"] = told_by_nccl(bench, folder / "dumps")
        if case == "healthy" and finds["ended_well"] != 2:
            raise NoResultError(ended.reason, hung=ended.status is None)
        return finds

    return measure


def with_plugin(measure: Callable[[Bench], Finds]) -> Callable[[Bench], Finds]:
    """Return a check for which NCCL's plugin is built first, where it was not."""

    def build_and_measure(bench: Bench) -> Finds:
        folder = REPOSITORY / "src" / "commlens" / "native"
        if not list(folder.glob("_nccl_profiler*.so")):
            source, library = folder / "_nccl_profiler.c", folder / "_nccl_profiler.abi3.so"
            flags = ["-O2", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden"]
            command = ["cc", *flags, "-Wl,-z,nodelete", str(source), "-o", str(library), "-ldl"]
            ended = bench.processes.run(command, 30)
            if ended.status != 0:
                raise SkippedError(f"the plugin could not be built: {ended.reason}")
        return measure(bench)

    return build_and_measure


READ_NCCL = """
import json, sys
from commlens.diagnosis.select.communicators import with_communicators
from commlens.dumps.read import read_evidence

found = []
for log in with_communicators(read_evidence(sys.argv[1]).logs):
    told = log.nccl
    found.append({
        "rank": log.rank,
        "level": told.level if told else None,
        "nccl": told.nccl_version if told else None,
        "other_nccl": bool(told and told.is_other_nccl),
        "lost": told.lost if told else 0,
        "communicators": [
            [each.name, each.hash, each.size, each.collectives, each.finished]
            for each in (told.communicators if told else ())
        ],
        "records": len([op for op in log.collectives if op.channel.runs_ahead]),
        "joined": len([op for op in log.collectives if op.nccl]),
        "past_torch": len([op for op in log.collectives if op.channel.library]),
    })
print(json.dumps(found))
"""


def told_by_nccl(bench: Bench, dumps: Path) -> list[Finds]:
    """Return what NCCL told each rank, and how much of it joined torch's records."""
    ended = bench.processes.run([sys.executable, "-c", READ_NCCL, str(dumps)], 30)
    with contextlib.suppress(ValueError):
        return list(json.loads(ended.out))
    return []


def judge_told_by_nccl(finds: Finds) -> Judged:
    """Return whether rank 1 is named, and NCCL's calls are part of torch's records, and no more."""
    is_named, words = judge_named("asleep")(finds)
    ranks = finds.get("told_by_nccl", [])
    whole = bool(ranks) and all(
        each["communicators"] and each["joined"] and not each["past_torch"] and not each["lost"]
        for each in ranks
    )
    told = "; ".join(
        f"rank {each['rank']}: {each['joined']} of {each['records']} records, NCCL {each['nccl']}"
        for each in ranks
    )
    return is_named and whole, f"{told or 'NCCL told nothing'}. {words}"


def unprefixed(text: str) -> str:
    """Return torchrun's output without ``[rank0]:`` before each line."""
    return re.sub(r"^\[\w+\]:", "", text, flags=re.MULTILINE)


def read_verdicts(path: Path) -> list[Finds]:
    """Return the verdicts that the hook wrote down."""
    with contextlib.suppress(OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [parts(json.loads(line)["verdict"]) for line in lines if line.strip()]
    return []


def after_s(struck: Path, moments: Path) -> float | None:
    """Return the seconds between the fault and the first verdict."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = float(moments.read_text(encoding="utf-8").split()[0])
        return first - float(struck.read_text(encoding="utf-8"))
    return None


def judge_healthy(finds: Finds) -> Judged:
    """Return whether the job ended well, and commlens said nothing."""
    said = "; ".join(finds["our_lines"]) or "nothing"
    return (
        finds["ended_well"] == 2
        and finds["status"] == 0
        and not finds["verdicts"]
        and not finds["our_lines"],
        f"ended well in {finds['seconds']:.0f} s; commlens said: {said}",
    )


def judge_named(mark: str | None) -> Callable[[Finds], Judged]:
    """Return the judge of a verdict that must name rank 1, and its marked line if there is one."""

    def judge(finds: Finds) -> Judged:
        if not finds["verdicts"]:
            return False, f"no verdict; status {finds['status']} after {finds['seconds']:.0f} s"
        first, place = finds["verdicts"][0], line_of(mark) if mark else ""
        late = f"{finds['after_s']:.1f} s" if finds["after_s"] is not None else "unknown"
        words = (
            f"after {late}: {first['kind']} ({first['why']}), culprits {first['culprits']}, at"
            f" {first['source']}, confidence {first['confidence']}: {first['summary']}"
        )
        return first["culprits"] == [1] and place in str(first["source"]), words

    return judge


ABORT = ("--abort-on", "stall,mismatch")
# torchrun then leaves the other rank some seconds to meet the failure, so that we see its error.
PATIENT = ("--monitor-interval", "6")

MODELS = [
    Check(
        "model, DDP",
        "A transformer trains with DDP on two ranks, and commlens says nothing",
        60,
        launched("healthy", "ddp"),
        judge_healthy,
        "jobs",
    ),
    Check(
        "model, FSDP2",
        "A transformer trains with fully_shard on two ranks, and commlens says nothing",
        60,
        launched("healthy", "fsdp"),
        judge_healthy,
        "jobs",
    ),
    Check(
        "model, FSDP2, skipped",
        "A rank that skips a layer's forward under fully_shard is named",
        80,
        launched("skipped", "fsdp", *ABORT),
        judge_named("backward"),
        "jobs",
    ),
    Check(
        "model, FSDP2, asleep",
        "A rank that sleeps in its data loader is named, with the line",
        60,
        launched("asleep", "fsdp", *ABORT, "--stall-timeout", "5"),
        judge_named("asleep"),
        "jobs",
    ),
    Check(
        "NCCL's plugin, healthy",
        "A job of two ranks in which NCCL tells of everything ends well, and commlens says nothing",
        60,
        with_plugin(launched("healthy", "ddp", "--nccl-profiler", "transfers")),
        judge_healthy,
        "jobs",
    ),
    Check(
        "NCCL's plugin, asleep",
        "What NCCL tells of its calls and kernels is part of torch's records",
        60,
        with_plugin(
            launched(
                *("asleep", "ddp", *ABORT, "--stall-timeout", "5"), "--nccl-profiler", "kernels"
            )
        ),
        judge_told_by_nccl,
        "jobs",
    ),
]

ERRORS = [
    Check(
        "error, killed",
        "A rank that is killed in the middle of a job is named",
        70,
        launched("killed", "fsdp", *PATIENT),
        judge_named(None),
        "jobs",
    ),
    Check(
        "error, out of memory",
        "A rank that runs out of the device's memory is named, with the line",
        70,
        launched("oom", "ddp"),
        judge_named("oom"),
        "jobs",
    ),
    Check(
        "error, assert",
        "A rank with a device-side assert is named",
        70,
        launched("assert", "fsdp", *PATIENT),
        judge_named(None),
        "jobs",
    ),
]


# --- trace, preview, check


def watched(bench: Bench, run: Callable[[], Ended]) -> tuple[Ended, Finds]:
    """Run something, and look meanwhile what its processes hold open and have loaded."""
    held: dict[str, list[str]] = {}
    loaded: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for pid in bench.processes.pids():
                if found := open_devices(pid):
                    held[str(pid)] = found
                with contextlib.suppress(OSError):
                    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
                    loaded.update(name for name in ("libcuda.so", "libnvidia-ml") if name in maps)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        ended = run()
    finally:
        over.set()
        thread.join(5)
    return ended, {"devices": held, "loaded": sorted(loaded)}


def calls_of(bench: Bench, trace: Path) -> Finds:
    """Return the calls by op in a trace, as ``commlens view`` counts them."""
    viewed = bench.commlens("view", str(trace), "--json", limit_s=30)
    with contextlib.suppress(ValueError, KeyError):
        return {one["name"]: one["calls"] for one in json.loads(viewed.out)["by_op"]}
    return {"no summary": viewed.reason}


def check_trace(bench: Bench) -> Finds:
    """Trace one rank, show its trace in each form, and print CommDebugMode's tables."""
    folder = bench.folder()
    ended = bench.processes.run(
        [
            *TORCHRUN,
            *("--nproc-per-node", "1", "-m", "commlens", "trace"),
            *("-o", str(folder / "traces"), str(USER_PROGRAM), "tables"),
        ],
        bench.limit_s - 15,
        OMP_NUM_THREADS="1",
    )
    trace, page = folder / "traces" / "trace-rank0.json", folder / "page.html"
    shown = bench.commlens("view", str(trace), limit_s=30)
    paged = bench.commlens("view", str(trace), "-o", str(page), limit_s=30)
    return {
        "status": ended.status,
        "out": shortened(ended.out),
        "err": shortened(ended.err),
        "total": re.findall(r"--- total (\d+)", ended.out),
        "calls": calls_of(bench, trace),
        "view": shortened(shown.out or shown.reason),
        "page": page.stat().st_size if page.exists() else paged.reason,
        "first_events": trace.read_text(encoding="utf-8")[:4000] if trace.exists() else "",
    }


def judge_trace(finds: Finds) -> Judged:
    """Return whether the program ended well, and the counts are right."""
    is_right = (
        finds["status"] == 0
        and "ended well" in finds["out"]
        and finds["calls"].get("all_reduce") == 7
        and isinstance(finds["page"], int)
    )
    return is_right, f"status {finds['status']}; {finds['calls']}; page of {finds['page']} bytes"


def check_preview(bench: Bench) -> Finds:
    """Preview two ranks of eight: the first, and one with a GPU that the machine does not have; and
    this one with all GPUs hidden.
    """
    finds: Finds = {}
    for name, environ in (("0", {}), ("3", {}), ("3, hidden", {"CUDA_VISIBLE_DEVICES": ""})):
        trace = bench.folder() / "trace.json"
        command = ["preview", "--world-size", "8", "--rank", name[0], "-o", str(trace)]
        run = partial(bench.commlens, *command, str(USER_PROGRAM), limit_s=30, **environ)
        ended, seen = watched(bench, run)
        finds[name] = {
            "status": ended.status,
            "seconds": ended.seconds,
            "calls": calls_of(bench, trace),
            "out": shortened(ended.out),
            "err": shortened(ended.err),
            **seen,
        }
    return finds


def judge_preview(finds: Finds) -> Judged:
    """Return whether all previews counted right."""
    words = "; ".join(
        f"rank {rank}: status {one['status']}, {one['calls']}, held"
        f" {'devices' if one['devices'] else 'no device'}"
        for rank, one in finds.items()
    )
    is_right = all(
        one["status"] == 0 and one["calls"].get("all_reduce") == 6 for one in finds.values()
    )
    return is_right, words


def check_check(bench: Bench) -> Finds:
    """Check a world of four ranks."""
    command = ["check", "--world-size", "4", "--steps", "3", "--json", str(USER_PROGRAM)]
    ended, seen = watched(bench, lambda: bench.commlens(*command))
    finds = {
        "status": ended.status,
        "seconds": ended.seconds,
        "out": shortened(ended.out),
        "err": shortened(ended.err),
        "verdict": {},
        **seen,
    }
    with contextlib.suppress(ValueError):
        finds["verdict"] = parts(json.loads(ended.out))
    return finds


def judge_check(finds: Finds) -> Judged:
    """Return whether nothing was found, and the GPU was left alone."""
    words = (
        f"status {finds['status']}: {finds['verdict'].get('summary')},"
        f" {finds['verdict'].get('looked_at')}; held {finds['devices'] or 'no device'}, loaded"
        f" {finds['loaded'] or 'no driver'}"
    )
    is_right = finds["status"] == 0 and finds["verdict"].get("kind") == "healthy"
    return is_right and not finds["devices"], words


TOOLS = [
    Check(
        "preview",
        "A preview of a program for GPUs counts right, also of a rank whose GPU the machine lacks",
        90,
        check_preview,
        judge_preview,
        "tools",
    ),
    Check(
        "check",
        "commlens check proves a program for GPUs, and does not open the GPU",
        60,
        check_check,
        judge_check,
        "tools",
    ),
    Check(
        "trace",
        "commlens trace of one rank on CUDA counts right",
        60,
        check_trace,
        judge_trace,
        "tools",
    ),
]


# --- jobs without commlens


def attached(*, dumps: bool) -> Callable[[Bench], Finds]:
    """Return the check of a job under plain torchrun that hangs.

    Args:
        dumps: torch's recorder has a pipe by which it is asked for a dump. Otherwise NCCL's RAS
            service is asked, before the hang and in it.
    """

    def measure(bench: Bench) -> Finds:
        need_two_ranks(bench)
        folder = bench.folder()
        port = free_port()
        environ = {"OMP_NUM_THREADS": "1", "NCCL_RAS_ADDR": f"localhost:{port}"}
        if dumps:
            environ |= recorder_environ(folder)
            environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(folder / "pipe")
        command = [*TORCHRUN, "--nproc-per-node", "2", str(PROGRAM), "attach", "fsdp"]
        command += [bench.device, bench.backend, str(folder)]
        ended: list[Ended] = []
        job = threading.Thread(
            target=lambda: ended.append(bench.processes.run(command, bench.limit_s, **environ)),
            daemon=True,
        )
        job.start()
        finds: Finds = {}
        try:
            look(bench, folder, None if dumps else port, finds)
        finally:
            bench.processes.end_all()
            job.join(10)
        if dumps:
            finds["diagnosed"] = diagnosed(bench, folder / "dumps")
            finds["dumps"] = packed(folder / "dumps")
        finds["err"] = shortened(ended[0].err) if ended else ""
        return finds

    return measure


def look(bench: Bench, folder: Path, port: int | None, finds: Finds) -> None:
    """Look at the job before it hangs and in the hang."""
    for rank in (0, 1):
        wait_for(folder / f"ready-{rank}", 40)
    pid = (folder / "ready-0").read_text(encoding="utf-8")
    if port is not None:
        finds["ras_healthy"] = ask_ras(bench, port)
    (folder / "go").touch()
    wait_for(folder / "struck", 20)
    time.sleep(3)
    if port is not None:
        finds["ras_hung"] = ask_ras(bench, port)
        finds["stacks"] = shortened(said(bench, "stacks", pid))
        finds["stacks_native"] = shortened(said(bench, "stacks", "--native", pid))
    shown = bench.commlens("attach", "--json", "--stacks", pid, limit_s=25)
    finds["attach_status"], finds["attach_out"] = shown.status, shortened(shown.out or shown.reason)
    finds["verdict"] = {}
    with contextlib.suppress(ValueError):
        # --stacks prints more behind the JSON
        finds["verdict"] = parts(json.JSONDecoder().raw_decode(shown.out.lstrip())[0])


def said(bench: Bench, *arguments: str) -> str:
    """Return the output of the command line."""
    ended = bench.commlens(*arguments, limit_s=20)
    return str(ended.out or ended.reason)


def wait_for(path: Path, limit_s: float) -> None:
    """Wait until a file exists and is not empty.

    Raises:
        NoResultError: it does not appear.
    """
    until = time.monotonic() + limit_s
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > until:
            raise NoResultError(f"{path.name} did not appear within {limit_s:.0f} s", hung=True)
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that was free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ASK_AS_COMMLENS = """
import json, msgspec
from commlens.health import ras
print(json.dumps(msgspec.to_builtins(ras.ask())))
"""


def ask_ras(bench: Bench, port: int) -> Finds:
    """Return what NCCL's RAS service answers in text and in JSON, and what commlens reads in it."""
    read = bench.processes.run(
        [sys.executable, "-W", "ignore", "-c", ASK_AS_COMMLENS],
        20,
        NCCL_RAS_ADDR=f"localhost:{port}",
    )
    return {
        "text": shortened(ras_answer(port, as_json=False)),
        "json": shortened(ras_answer(port, as_json=True)),
        "read": read.result or read.reason,
    }


def ras_answer(port: int, *, as_json: bool) -> str:
    """Return NCCL's raw answer, with its greetings, or why there is none."""
    asked = ["CLIENT PROTOCOL 2", "TIMEOUT 2"]
    asked += ["SET FORMAT json"] if as_json else []
    answer = b""
    try:
        with socket.create_connection(("localhost", port), timeout=2) as connection:
            for line in asked:
                connection.sendall(f"{line}\n".encode())
                answer += connection.recv(4096)
            connection.sendall(b"VERBOSE STATUS\n")
            connection.settimeout(9)
            while received := connection.recv(65536):
                answer += received
    except OSError as error:
        return f"{answer.decode('utf-8', 'replace')}[{type(error).__name__}: {error}]"
    return answer.decode("utf-8", "replace")


def judge_attached(finds: Finds) -> Judged:
    """Return whether rank 1 and its line were named."""
    verdict, ras = finds["verdict"], finds.get("ras_hung", {}).get("read", "not asked")
    if isinstance(ras, dict):
        behind = [rank["rank"] for each in ras["communicators"] for rank in each["behind"]]
        ras = f"behind: rank {', '.join(map(str, behind))}" if behind else "no rank is behind"
    words = (
        f"{verdict.get('kind')} ({verdict.get('why')}), culprits {verdict.get('culprits')}, at"
        f" {verdict.get('source')}, confidence {verdict.get('confidence')}:"
        f" {verdict.get('summary')}; RAS: {ras}"
    )
    if "diagnosed" in finds:
        words += f"; torch's dumps: {finds['diagnosed'].get('summary')}"
    is_named = verdict.get("culprits") == [1]
    return is_named and (
        "diagnosed" in finds or line_of("asleep") in str(verdict.get("source"))
    ), words


# --- torch's own dumps


def recorder_environ(folder: Path) -> dict[str, str]:
    """Return the variables with which torch's recorder dumps into a folder."""
    (folder / "dumps").mkdir()
    target = str(folder / "dumps" / "nccl_trace_rank_")
    return {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": target,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": target,
    }


def diagnosed(bench: Bench, folder: Path) -> Finds:
    """Return the verdict on dumps."""
    ended = bench.commlens("diagnose", str(folder), "--json", limit_s=30)
    with contextlib.suppress(ValueError):
        return parts(json.loads(ended.out))
    return {"summary": ended.reason}


def packed(folder: Path) -> dict[str, str]:
    """Return the files of a folder, each packed by zlib and base64."""
    return {
        path.name: base64.b64encode(zlib.compress(path.read_bytes(), 9)).decode()
        for path in sorted(folder.glob("*"))
        if path.is_file()
    }


def check_timeout(bench: Bench) -> Finds:
    """Let NCCL's own timeout end a job, and diagnose what torch's recorder dumped."""
    folder = bench.folder()
    environ = recorder_environ(folder)
    finds = launched("timeout", "fsdp", "--stall-timeout", "300", *PATIENT, **environ)(bench)
    finds["diagnosed"] = diagnosed(bench, folder / "dumps")
    finds["dumps"] = packed(folder / "dumps")
    return finds


def judge_timeout(finds: Finds) -> Judged:
    """Return whether the dumps name rank 1."""
    verdict = finds["diagnosed"]
    words = (
        f"dumps {', '.join(finds['dumps']) or 'none'}: {verdict.get('kind')}, culprits"
        f" {verdict.get('culprits')}: {verdict.get('summary')}; the job"
        f" ended with {finds['status']} after {finds['seconds']:.0f} s"
    )
    return verdict.get("culprits") == [1], words


OUTSIDE = [
    Check(
        "attach",
        "commlens attach names the rank that sleeps in a job that it does not record",
        95,
        attached(dumps=False),
        judge_attached,
        "tools",
    ),
    Check(
        "attach, dumps",
        "commlens attach asks torch's recorder through its pipe, and the dumps name the rank",
        80,
        attached(dumps=True),
        judge_attached,
        "tools",
    ),
    Check(
        "torch's dumps, timeout",
        "After NCCL's timeout, the dumps of torch's recorder name the rank that did not come",
        75,
        check_timeout,
        judge_timeout,
        "jobs",
    ),
]


CHECKS: list[Check] = [*MODELS, *OUTSIDE, *ERRORS, *TOOLS]
"""Those of one lane run in this order."""
