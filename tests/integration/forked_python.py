"""Python that has torch already: what ``python script.py``, ``python -m module`` and whatever they
start themselves do, in forks of a process that has imported torch (``zygote.py``).

The fork is as a Python of its own in what others see of a process (parent, session, streams, command
line, environment, exit status) and in what its program sees (``sys.argv``, ``sys.path``, variables,
warnings, buffering, torch's entry points). It differs in what is older than its program: torch's
modules, the seed of hashes, variables that torch reads when it is imported.

A fork gets its parent as an orphan does: the process that asks for it is a reaper of orphans for
that moment, and the one between the zygote and the fork ends at once.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib.machinery
import inspect
import io
import json
import mmap
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import NoReturn

PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER = 35, 14, 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
_C = ctypes.CDLL(None, use_errno=True)
_one_at_a_time = threading.Lock()
_kept: list[object] = []  # memory that the kernel shows to others
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


# -- the process that asks


def arguments_of(command: list[str]) -> list[str]:
    """Return what follows ``python`` and ``-u``: a script or ``-m`` and a module, with arguments.
    Empty for any other command.
    """
    rest = command[2:] if command[1:2] == ["-u"] else command[1:]
    is_program = bool(rest) and (
        not rest[0].startswith("-") or (rest[0] == "-m" and bool(rest[1:]))
    )
    return rest if command[0] == sys.executable and is_program else []


def is_alike(environment: dict[str, str]) -> bool:
    """Return whether this process has read the same values of what Python and torch read at their
    start.
    """
    later = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED")
    early = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "TORCH_LOGS", "TORCH_SHOW")
    names = {
        name for name in {*environment, *os.environ} if name.startswith(early) and name not in later
    }
    return all(environment.get(name) == os.environ.get(name) for name in names)


class ForkedPopen(subprocess.Popen):
    """A ``subprocess.Popen`` whose process is a fork, where that is possible."""

    asks: socket.socket | None = None
    """Leads to a process that serves forks."""
    enters: tuple[str, str] | None = None
    """A network namespace of ``ip netns`` and a host name, which the process has to itself."""

    def _execute_child(self, *positional: object, **named: object) -> None:
        call = inspect.signature(_EXECUTE_CHILD).bind(self, *positional, **named)
        asked = call.arguments
        command = [os.fsdecode(part) for part in asked["args"]]
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        plain = not (asked["preexec_fn"] or asked["pass_fds"] or asked["shell"])
        if self.asks is None or not plain or not arguments_of(command):
            _execute(self, call)
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        request = {
            "do": "fork",
            "command": command,
            "cwd": os.fspath(asked["cwd"] or Path.cwd()),
            "environment": environment,
            "session": bool(asked["start_new_session"]),
            "enters": self.enters,
        }
        with _one_at_a_time:
            _C.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self.asks, [line], streams)
                self.asks.sendall(line[sent:])
                answer = b""
                while not answer.endswith(b"\n"):
                    answer += self.asks.recv(4096) or b"\n"
                pid = json.loads(answer)["pid"]
            finally:
                _C.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if pid is None:  # refused: what it reads early differs
            _execute(self, call)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(
            *(
                asked[name]
                for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            )
        )


_EXECUTE_CHILD = subprocess.Popen._execute_child


def _execute(popen: ForkedPopen, call: inspect.BoundArguments) -> None:
    """Start a Python of its own."""
    call.arguments["args"] = [*inside(popen.enters), *call.arguments["args"]]
    _EXECUTE_CHILD(*call.args, **call.kwargs)


def inside(place: tuple[str, str] | None) -> list[str]:
    """Return the command that runs another one in a network namespace, on a host of that name."""
    if place is None:
        return []
    namespace, host = place
    named = f'hostname {host}; exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", named, "sh"]


# -- the process that forks


def fork(request: dict, streams: list[int]) -> int | None:
    """Fork an orphan. Return its pid, and 0 in the fork; None where it could not be what is asked
    for.
    """
    if not is_alike(request["environment"]):
        return None
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.close(write)
            _take_place(request, streams)
            return 0
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(between, 0)
    return int(told)


def _take_place(request: dict, streams: list[int]) -> None:
    """Be the process that is asked for, as others see it."""
    if request["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    if request["enters"]:
        _enter(*request["enters"])
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show(request["command"], request["environment"])


def _enter(namespace: str, host: str) -> None:
    """Do what ``ip netns exec NAMESPACE unshare --uts hostname HOST`` does."""
    with Path(f"/run/netns/{namespace}").open() as file:
        _require(_C.setns(file.fileno(), CLONE_NEWNET))
    _require(_C.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    _require(_C.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
    _require(_C.umount2(b"/sys", MNT_DETACH))
    _require(_C.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    socket.sethostname(host)
    platform._uname_cache = None  # type: ignore[attr-defined]


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Show this command line and these variables in /proc."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    parts = [b"".join(os.fsencode(each) + b"\0" for each in part) for part in (command, variables)]
    size = sum(map(len, parts))
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(parts))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    stat = Path("/proc/self/stat").read_text()
    field = [0, 0, 0, *stat[stat.rfind(")") + 2 :].split()]  # as proc(5) counts, from 1
    _C.sbrk.restype = ctypes.c_size_t
    numbers = [
        *(int(field[at]) for at in (26, 27, 45, 46, 47)),  # code, data, the start of the heap
        _C.sbrk(0),
        int(field[28]),  # stack
        *(start, start + len(parts[0]), start + len(parts[0]), start + size),
    ]
    layout = (ctypes.c_uint64 * 13)(*numbers, 0, 0xFFFFFFFF << 32)  # neither auxv nor the program
    _require(_C.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0))


def serve(asks: socket.socket, base_path: list[str]) -> None:
    """Fork what is asked for, until nobody can ask any more."""
    try:
        _show(["forks for its parent"], {})
        is_possible = True
    except OSError:  # this kernel was built without CONFIG_CHECKPOINT_RESTORE
        is_possible = False
    buffer, streams = b"", []
    while True:
        while b"\n" not in buffer:
            data, passed, _, _ = socket.recv_fds(asks, 65536, 3)
            if not data:
                os._exit(0)
            buffer, streams = buffer + data, streams + list(passed)
        line, buffer = buffer.split(b"\n", 1)
        request = json.loads(line)
        pid = fork(request, streams) if is_possible else None
        if pid == 0:
            asks.close()
            _run(request, base_path)
        for stream in streams:
            os.close(stream)
        streams = []
        asks.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _run(request: dict, base_path: list[str]) -> NoReturn:
    """Run the program, and end as Python ends."""
    command, code = request["command"], 0
    if "RANK" not in os.environ:
        _fork_what_is_started(base_path)
    arguments = arguments_of(command) or []
    is_module = arguments[0] == "-m"
    paths = os.environ.get("PYTHONPATH", "")
    given = [path or request["cwd"] for path in paths.split(os.pathsep)] if paths else []
    first = request["cwd"] if is_module else str(Path(arguments[0]).resolve().parent)
    sys.path[:] = [first, *dict.fromkeys([*given, *base_path])]
    sys.orig_argv[:] = command
    sys.argv[:] = ["-m", *arguments[2:]] if is_module else arguments
    _renew_streams(is_unbuffered="-u" in command[1:2] or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.warnoptions[:] = [each for each in os.environ.get("PYTHONWARNINGS", "").split(",") if each]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    try:
        _as_torch_is_imported()
        if is_module:
            _new_main()
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            _run_script(arguments[0])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def end(code: int) -> NoReturn:
    """Do what the interpreter does at its end, without taking torch apart object by object: that
    costs half a second of CPU in a fork.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    if code < 0:  # as Python after Ctrl-C
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _fork_what_is_started(base_path: list[str]) -> None:
    """Start a process beside this one that forks what this one starts."""
    asks, served = socket.socketpair()
    if os.fork() == 0:
        asks.close()
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        serve(served, base_path)
    served.close()
    subprocess.Popen.asks, subprocess.Popen.enters = asks, None  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = ForkedPopen._execute_child  # type: ignore[attr-defined]


def _renew_streams(*, is_unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, size = "w" if number else "r", 0 if number and is_unbuffered else -1
        binary = open(number, f"{mode}b", closefd=False, buffering=size)  # noqa: SIM115
        getattr(binary, "raw", binary).name = f"<{name}>"
        stream = io.TextIOWrapper(
            binary,
            encoding=getattr(sys, name).encoding,
            errors=getattr(sys, name).errors,
            write_through=is_unbuffered,
            line_buffering=not is_unbuffered and (number == 2 or os.isatty(number)),
        )
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _as_torch_is_imported() -> None:
    """Do what torch does by the environment when it is imported."""
    import torch

    torch.distributed.set_debug_level_from_env()
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        torch._import_device_backends()


def _new_main() -> types.ModuleType:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main


def _run_script(path: str) -> None:
    file = str(Path(path).absolute())
    main = _new_main()
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    main.__dict__.update(__cached__=None)
    exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)
