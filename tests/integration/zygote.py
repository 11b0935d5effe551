"""A process that has imported torch and forks ranks on request, so that a job of 4 ranks does not
pay for 4 imports.

Lines of JSON in on stdin, one line of JSON back for each on stdout:

    {"do": "start", "folder": ..., "store": true,
     "ranks": [{"environment": {...}, "arguments": [...]}, ...]}
        ->  {"pids": [...], "store": pid}
    {"do": "reap", "pids": [...]}
        ->  {"ended": {pid: status}}

The statuses are those of ``waitpid``; a rank that was not reaped stays a zombie.
``arguments`` is a script with its arguments, or ``-m``, a module and its arguments. The ranks are
ordinary processes in all that matters: their own pid, real gloo, exit handlers. With ``store`` a
further process serves the job's store, as torchrun's agent does.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import forked_python
import torch
import torch._dynamo  # the first optimizer step would import it
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.optim

GIVEN = os.environ.get("PYTHONPATH", "")
BASE_PATH = sys.path[1 + len(GIVEN.split(os.pathsep)) * bool(GIVEN) :]
SOURCE = str(Path(__file__).parents[2] / "src")
sys.path.insert(1, SOURCE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, GIVEN]))  # for what ranks start


def answer(**fields):
    os.write(1, json.dumps(fields).encode() + b"\n")


def serve_store(port_pipe: int) -> None:
    """In a child: the job's store, until it is killed."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    os.write(port_pipe, f"{store.port}\n".encode())
    signal.pause()


def redirect(folder: Path, name: str) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def start_store(folder: Path) -> tuple[int, str]:
    """Fork the process that serves the job's store; its pid and port."""
    read, write = os.pipe()
    store = os.fork()
    if store == 0:
        os.setsid()
        redirect(folder, "store")
        os.close(read)
        serve_store(write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return store, pipe.readline().strip()


def start(request):
    """Fork the job. Returns (environment, arguments) in a rank, None in the zygote."""
    folder = Path(request["folder"])
    store, rendezvous = None, {}
    if request["store"]:
        store, port = start_store(folder)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = []
    for number, rank in enumerate(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            redirect(folder, f"rank{number}")
            return {**rank["environment"], **rendezvous}, rank["arguments"]
        pids.append(pid)
    answer(pids=pids, store=store)
    return None


def reap(request):
    ended = {}
    for pid in request["pids"]:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended[str(pid)] = status
    answer(ended=ended)


def keep_native_dumps(folder: str) -> None:
    """Have torch's own recorder of gloo dumped into this folder whenever there is more in it: the
    last dump is what is left.

    The file's time of writing is when the recorder was last looked at. A rank that hangs writes
    nothing more: a rank that writes would look as if it worked.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    path = Path(folder) / f"gloo_{os.environ['RANK']}"
    new = Path(folder) / f"new_{os.environ['RANK']}"

    last = b""

    def write() -> None:
        nonlocal last
        looked_at = time.time()
        data = dump()
        if data != last:
            last = data
            new.write_bytes(data)
            new.replace(path)
        os.utime(path, (looked_at, looked_at))

    def again() -> None:
        while not stop.wait(0.3):
            write()
        write()

    if dump is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        thread = threading.Thread(target=again, name="native dumps", daemon=True)
        thread.start()
        atexit.register(thread.join)
        atexit.register(stop.set)


def serve():
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the forks share these pages for as long as nobody counts references in them
    with socket.socket(fileno=int(sys.argv[1])) as forks:
        if os.fork() == 0:
            forked_python.serve(forks, BASE_PATH)
    answer(ready=True, threads=len(list(Path("/proc/self/task").iterdir())))
    buffer = b""
    while True:
        while b"\n" not in buffer:
            chunk = os.read(0, 65536)
            if not chunk:
                os._exit(0)
            buffer += chunk
        line, buffer = buffer.split(b"\n", 1)
        request = json.loads(line)
        if request["do"] == "reap":
            reap(request)
        elif request["do"] == "start":
            job = start(request)
            if job is not None:
                return job


# What follows runs in a rank only.
environment, arguments = serve()
for key, value in environment.items():
    os.environ[key] = value
if os.environ.get("NCCL_LIKE") == "1":
    sys.path.append(str(Path(__file__).parents[1]))
    import nccl_like  # torch's entry point would have called it, too, before that of commlens

    nccl_like.register(take_over=True)
if "ZYGOTE_RUNS_FIRST" in os.environ:  # a script that prepares the rank
    runpy.run_path(os.environ["ZYGOTE_RUNS_FIRST"])
if os.environ.get("COMMLENS") == "1":
    # torch's entry point would have done this at the end of `import torch`
    import commlens_autoload

    commlens_autoload.start()
if "PYTEST_NATIVE_DUMPS" in os.environ:
    keep_native_dumps(os.environ["PYTEST_NATIVE_DUMPS"])
code = 0
try:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
except SystemExit as error:
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
except BaseException as error:
    sys.excepthook(type(error), error, error.__traceback__)
    code = 1
forked_python.end(code)
