"""What all tests share: a clean environment, hard timeouts (pyproject.toml), and a look for
processes that were left behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from forked_calls import OnRanks
    from harness import Harness
    from zygote_client import Zygote

# The same examples each time, so that a run says something of the change that it tests. `make
# test-all` draws three times as many, `make explore` new ones.
# On a busy machine, no time that an example takes says anything of the code.
_PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("same", _PATIENT, derandomize=True, max_examples=35)
hypothesis.settings.register_profile("all", _PATIENT, derandomize=True)
hypothesis.settings.register_profile("explore", _PATIENT, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "same")
if "HYPOTHESIS_PROFILE" not in os.environ:
    # Hypothesis draws from the constants of our modules, too: to parse them takes each worker
    # seconds, and the examples would be others after any change, and for any selection of tests.
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants

# torch's stores look up the name of each client in DNS before they answer anybody: 5 s where DNS
# drops the question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell ignores these in what it starts in the background, and nohup the last: tests send them.
for _ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_ignored) == signal.SIG_IGN:
        signal.signal(
            _ignored, signal.default_int_handler if _ignored == signal.SIGINT else signal.SIG_DFL
        )

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
MARK = "PYTEST_COMMLENS_SESSION"  # every process that a test starts inherits this variable
GRACE_S = 10.0  # watchers end by themselves, with the job


@pytest.fixture(autouse=True)
def clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No setting of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if (
            name.startswith("COMMLENS") and name not in ("COMMLENS_TEST_DATA", NATIVE)
        ) or name.startswith(("TORCH_NCCL_", "TORCH_FR_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    # no launched job builds the native engine, except in the tests of that
    monkeypatch.setenv("COMMLENS_AUTO_BUILD", "0")
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(tmp_path_factory.getbasetemp() / "no-native"))


class _OldObjects:
    """Keeps what was there before the tests, torch and all test modules, from the collection of
    garbage: a million objects, which took half of the tests' time. Who asks for all objects gets
    all; the emptying of DTensor's caches, which asks in every fake world, gets those among the old
    objects from a list.
    """

    def __init__(self) -> None:
        self.are_left_out = False
        self._caches: list[Any] = []
        self._get_objects, self._get_referrers = gc.get_objects, gc.get_referrers

    def leave_out(self) -> None:
        if not self.are_left_out:
            self._caches = []
            gc.freeze()
            self.are_left_out = True

    def _take_back(self) -> None:
        gc.unfreeze()
        self.are_left_out = False

    def get_objects(self, *arguments: Any, **options: Any) -> list[Any]:
        self._take_back()
        return self._get_objects(*arguments, **options)

    def get_referrers(self, *asked: Any) -> list[Any]:
        if asked == (_CACHE,) and self.are_left_out:
            if not self._caches:
                gc.unfreeze()
                found = self._get_referrers(_CACHE)
                self._caches = [each for each in found if type(each) is _CACHE]
                gc.freeze()
            return [*self._caches, *self._get_referrers(_CACHE)]
        self._take_back()
        return self._get_referrers(*asked)


_CACHE = type(functools.cache(len))
_old_objects = _OldObjects()
gc.set_threshold(700, 10, 100)  # and rarely at all that the tests have made
gc.get_objects, gc.get_referrers = _old_objects.get_objects, _old_objects.get_referrers


@pytest.fixture(autouse=True)
def quick_collection_of_garbage() -> None:
    _old_objects.leave_out()


@pytest.fixture(autouse=True)
def no_caches_of_dtensor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the unit tests whose fake worlds use no DTensor, no world empties DTensor's caches: it
    looks for them among all objects, of which torch's late imports make more and more.
    """
    if request.path.parent.name in WITHOUT_DTENSOR and "torch" in sys.modules:
        monkeypatch.setattr("commlens.tracing.preview.world.clear_caches", lambda: None)


WITHOUT_DTENSOR = ("check", "in_flight")  # folders of tests/unit


@pytest.fixture
def shared_data() -> Path:
    """The folder of real dumps that are too large for the repository."""
    folder = os.environ.get("COMMLENS_TEST_DATA")
    if not folder:
        pytest.skip("COMMLENS_TEST_DATA does not name the folder of real dumps")
    return Path(folder)


# a folder that keeps the native engine from one test run to the next
NATIVE = "COMMLENS_TEST_NATIVE"
_native_cache = pytest.StashKey[tuple[Path, str]]()
_builder = pytest.StashKey["subprocess.Popen[bytes]"]()  # of the emulation of NCCL


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that start processes first: the short ones then even out the workers' ends."""
    starts = {
        item.path
        for item in items
        if item.get_closest_marker("launches") or "unit" not in item.path.parts
    }
    items.sort(key=lambda item: item.path not in starts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the native engine, where a test of this run needs it: before any of them, since it
    takes longer than a test may. Meanwhile, another core builds the emulation of NCCL.
    """
    if session.config.option.collectonly or not any(map(_needs_native, session.items)):
        return
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_first and any(item.path.name.startswith("test_nccl_") for item in session.items):
        session.config.stash[_builder] = subprocess.Popen(
            [sys.executable, "-c", "import nccl_like; nccl_like.why_not()"],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = Path(os.environ.get(NATIVE) or shared / "native-cache")
    session.config.stash[_native_cache] = (cache, _why_not_built(cache))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, of which the tests have waited for what they need."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _needs_native(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "native_cache" in names or parameters.get("engine_environment") == "native"


def _why_not_built(cache: Path) -> str:
    """Build it; words where nothing here can."""
    try:
        import torch  # noqa: F401

        from commlens.errors import NativeEngineError
        from commlens.native import build
    except ImportError as error:
        return str(error)
    try:
        build.build(cache.resolve())
    except NativeEngineError as error:
        can = shutil.which("c++") is not None and not any(
            word in str(error) for word in ("headers", "Killed", "No space", "out of memory")
        )
        return f"!{error}" if can else str(error)
    return ""


@pytest.fixture(scope="session")
def native_cache(request: pytest.FixtureRequest) -> Path:
    """A cache with the native engine in it, built once for a test run. Skips where nothing here can
    build it.
    """
    cache, why_not = request.config.stash[_native_cache]
    assert not why_not.startswith("!"), why_not
    if why_not:
        pytest.skip(f"the native engine cannot be built here: {why_not}")
    return cache.resolve()


@pytest.fixture(scope="module", params=["python", "native"])
def engine_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What makes a process record in Python, and what makes it record natively: a test that asks
    for it runs under both.
    """
    if request.param == "python":
        return {"COMMLENS_ENGINE": "python"}
    return {
        "COMMLENS_ENGINE": "native",
        "COMMLENS_NATIVE_DIR": str(request.getfixturevalue("native_cache")),
    }


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks ranks: one for all tests of a worker, so that torch is imported once."""
    from zygote_client import Zygote

    with contextlib.closing(Zygote()) as made:
        yield made


@pytest.fixture(scope="session")
def jobs(zygote: Zygote) -> Harness:
    """Starts jobs, whose ranks the zygote forks."""
    from harness import Harness

    return Harness(zygote)


@pytest.fixture
def on_ranks(zygote: Zygote, tmp_path: Path) -> OnRanks:
    """Calls a function on several ranks, which the zygote forks."""
    from forked_calls import OnRanks

    return OnRanks(zygote, tmp_path)


RunCommlens = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_commlens(tmp_path: Path) -> RunCommlens:
    """Call the command line in a process of its own: ``run_commlens("config", "show",
    environ={...})``.
    """

    def run(
        *arguments: str, environ: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "commlens", *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCE), **(environ or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def call_commlens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> RunCommlens:
    """Call the command line as ``run_commlens`` does, but in this process, which has imported
    torch: for commands that import it and leave the process as it is.
    """
    from commlens import commands

    def call(
        *arguments: str, environ: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in (environ or {}).items():
                patch.setenv(name, value)
            status = commands.main(list(arguments))
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, out, err)

    return call


def _left_behind(mark: str) -> Iterator[tuple[int, str]]:
    """Processes, other than this one, that a test started: their pids and command lines."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield (
                    int(folder.name),
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip(),
                )


def pytest_sessionstart() -> None:
    os.environ["COMMLENS_AUTO_BUILD"] = "0"  # for fixtures of a module, too
    os.environ[MARK] = uuid.uuid4().hex


@pytest.hookimpl(trylast=True)  # pytest-xdist's workers have ended then
def pytest_sessionfinish(session: pytest.Session) -> None:
    mark = os.environ.pop(MARK, None)
    if mark is None:
        return
    if _builder in session.config.stash:
        _end(session.config.stash[_builder])
    deadline = time.monotonic() + GRACE_S
    while (left := list(_left_behind(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid, command in left:
        print(f"\nleft behind by the tests and ended now: {pid} {command}", file=sys.stderr)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if left and hasattr(session.config, "workeroutput"):
        session.config.workeroutput[LEFT_BEHIND] = [command for _, command in left]
    if (left or _LEFT_BY_WORKERS) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


LEFT_BEHIND = "left behind"
_LEFT_BY_WORKERS: list[str] = []


class _Workers:
    """What pytest-xdist's workers tell the process that started them."""

    def pytest_testnodedown(self, node: object) -> None:
        left = getattr(node, "workeroutput", {}).get(LEFT_BEHIND, [])
        for command in left:
            print(f"\nleft behind by the tests: {command}", file=sys.stderr)
        _LEFT_BY_WORKERS.extend(left)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers())
