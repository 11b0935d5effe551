"""The hook on imports, and what replaces a library's methods."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.tap import libraries
from commlens.tap.libraries import AdaptedCall, Adapter, LibraryCall, LibraryGroup
from past_torch import adapted

LIBRARY = """
class Buffer:
    def __init__(self):
        self.seen = []

    def dispatch(self, x, *, handle=None):
        self.seen.append((x, handle))
        if x == "bad":
            raise ValueError(x)
        return self.inner(x) if x == "outer" else x

    def inner(self, x):
        return self.combine(x)

    def combine(self, x):
        return "combined"
"""
GROUP = LibraryGroup("lib")
Told = list[tuple[Any, ...]]


def described(_: Any, given: dict[str, Any]) -> LibraryCall | None:
    return None if given["x"] == "quiet" else LibraryCall(GROUP, "dispatch", given["x"])


def adapter(**calls: AdaptedCall) -> Adapter:
    calls = calls or {
        "dispatch": AdaptedCall(described, ("x", "handle")),
        "combine": AdaptedCall(described, ("x",)),
    }
    return Adapter("lib", "some_library", "Buffer", calls)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(f"{__name__}.GROUP", LibraryGroup("lib"))
    (tmp_path / "some_library.py").write_text(LIBRARY)
    return tmp_path


def listening() -> Told:
    told: Told = []

    def begin(call: LibraryCall, number: int, name: str, frame: Any) -> str:
        told.append((name, call.op, call.tensor, number, frame.f_code.co_name))
        return "token"

    libraries.listen(begin, lambda token, error: told.append((token, type(error))))
    return told


def test_a_call_is_announced_and_runs_once(place: Path) -> None:
    with adapted([adapter()], place):
        told, buffer = listening(), importlib.import_module("some_library").Buffer()
        assert buffer.dispatch(3, handle="h") == 3
        assert buffer.dispatch(x=4) == 4
        here = "test_a_call_is_announced_and_runs_once"
        assert told == [
            ("lib.Buffer.dispatch", "dispatch", 3, 1, here),
            ("token", type(None)),
            ("lib.Buffer.dispatch", "dispatch", 4, 2, here),
            ("token", type(None)),
        ]
        assert buffer.seen == [(3, "h"), (4, None)]
        assert libraries.states == {"lib": "applied"}
    assert "some_library" not in sys.modules


def test_its_error_is_passed_on_and_later_calls_have_no_number(place: Path) -> None:
    with adapted([adapter()], place):
        told, buffer = listening(), importlib.import_module("some_library").Buffer()
        with pytest.raises(ValueError, match="bad"):
            buffer.dispatch("bad")
        buffer.dispatch(1)
        assert [each[3] for each in told[::2]] == [1, 0]
        assert told[1] == ("token", ValueError)


def test_a_call_inside_another_is_part_of_it(place: Path) -> None:
    with adapted([adapter()], place):
        told, buffer = listening(), importlib.import_module("some_library").Buffer()
        assert buffer.dispatch("outer") == "combined"
        assert len(told) == 2


def test_calls_are_counted_before_they_are_recorded(place: Path) -> None:
    with adapted([adapter()], place):
        buffer = importlib.import_module("some_library").Buffer()
        buffer.dispatch(1)
        told = listening()
        buffer.dispatch(2)
        assert told[0][3] == 2


def test_a_folder_without_code_is_no_library(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec of a folder without __init__.py has no loader."""
    monkeypatch.setattr(libraries, "_failed", False)
    found = ModuleSpec("some_library", None, is_package=True)
    finder = SimpleNamespace(find_spec=lambda name, *_: found if name == found.name else None)
    with adapted([adapter()], place):
        sys.meta_path.insert(1, finder)
        try:
            assert importlib.import_module("some_library").__file__ is None
        finally:
            sys.meta_path.remove(finder)
        assert not caplog.records and libraries.states == {}


def test_a_module_that_two_finders_find_is_adapted_once(place: Path) -> None:
    class Delegating:
        busy = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != "some_library" or self.busy:
                return None
            self.busy = True
            return importlib.util.find_spec(name)

    with adapted([adapter(dispatch=AdaptedCall(described, ("x",)))], place):
        sys.meta_path.insert(1, Delegating())
        try:
            told, buffer = listening(), importlib.import_module("some_library").Buffer()
        finally:
            del sys.meta_path[1]
        assert buffer.dispatch(3) == 3
        assert libraries.states == {"lib": "applied"}
        wrapped = vars(type(buffer))["dispatch"]
        assert not hasattr(wrapped.__wrapped__, "__wrapped__") and len(told) == 2


def test_a_call_that_is_interrupted_while_it_is_announced_hides_no_later_one(place: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with adapted([adapter()], place):
        buffer = importlib.import_module("some_library").Buffer()
        libraries.listen(interrupted, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(1)
        told = listening()
        buffer.dispatch(2)
        assert told


def test_what_an_adapter_does_not_describe_runs_unseen(place: Path) -> None:
    with adapted([adapter()], place):
        told, buffer = listening(), importlib.import_module("some_library").Buffer()
        assert buffer.dispatch("quiet") == "quiet"
        with pytest.raises(TypeError):
            buffer.dispatch()  # as without commlens
        assert told == []


def test_an_error_of_ours_is_logged_once_and_harms_nothing(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any, given: dict[str, Any]) -> LibraryCall | None:
        raise RuntimeError("ours")

    with (
        adapted([adapter(dispatch=AdaptedCall(broken, ("x",)))], place),
        caplog.at_level(logging.WARNING),
    ):
        buffer = importlib.import_module("some_library").Buffer()
        assert [buffer.dispatch(1), buffer.dispatch(2)] == [1, 2]
        libraries.listen(None, None)
        assert [record.message for record in caplog.records] == [
            "commlens: a call past torch's dispatcher is not recorded: RuntimeError: ours"
        ]


@pytest.mark.parametrize(
    "calls",
    [
        {"dispatch": AdaptedCall(described, ("x", "topk"))},  # another parameter
        {"send": AdaptedCall(described, ("x",))},  # no such method
    ],
)
def test_another_version_is_left_alone(place: Path, calls: dict[str, Any]) -> None:
    with adapted([adapter(**calls)], place):
        buffer_class = importlib.import_module("some_library").Buffer
        assert libraries.states == {"lib": "other-version"}
        assert not hasattr(buffer_class.dispatch, "__wrapped__")


@pytest.mark.parametrize("misfit_is_first", [True, False])
def test_a_class_of_another_version_leaves_the_whole_library_alone(
    place: Path, misfit_is_first: bool
) -> None:
    """Else the order of imports, which may differ between ranks, would decide what is recorded."""
    fits = adapter(dispatch=AdaptedCall(described, ("x",)))
    misfit = Adapter("lib", "other_module", "Buffer", {"combine": AdaptedCall(described, ("y",))})
    (place / "other_module.py").write_text(LIBRARY)
    modules = ["some_library", "other_module"]
    with adapted([fits, misfit], place):
        told = listening()
        for module in modules[::-1] if misfit_is_first else modules:
            importlib.import_module(module)
        buffer = sys.modules["some_library"].Buffer()
        assert buffer.dispatch(1) == 1
        assert told == []
        assert not hasattr(type(buffer).dispatch, "__wrapped__")
        assert libraries.states == {"lib": "other-version"}


def test_leaving_a_library_alone_keeps_the_patch_of_another_tool(place: Path) -> None:
    (place / "other_module.py").write_text(LIBRARY)
    misfit = Adapter("lib", "other_module", "Buffer", {"send": AdaptedCall(described, ("x",))})
    with adapted([adapter(), misfit], place):
        buffer_class = importlib.import_module("some_library").Buffer
        buffer_class.dispatch = lambda self, x: "of another tool"
        importlib.import_module("other_module")
        assert buffer_class().dispatch(1) == "of another tool"


def test_in_a_running_job_the_number_of_a_call_is_unknown(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(place))
        buffer = importlib.import_module("some_library").Buffer()
        with adapted([adapter()], late=True):
            told = listening()
            buffer.dispatch(1)
            assert told[0][3] == 0
        sys.modules.pop("some_library")


def test_other_imports_are_not_touched(place: Path) -> None:
    (place / "another_library.py").write_text("value = 7")
    with adapted([adapter()], place):
        module = importlib.import_module("another_library")
        assert module.value == 7
        assert "exec_module" not in vars(module.__spec__.loader)
        assert libraries.states == {}
    with adapted([Adapter("lib", "missing_library", "", {})], place), pytest.raises(ImportError):
        importlib.import_module("missing_library")


def test_other_modules_of_a_zip_file_are_not_touched(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have the loader of the library."""
    packed = place / "packed.zip"
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("some_library.py", LIBRARY)
        file.writestr("another_library.py", "value = 7")
    told = listening()
    with adapted([adapter()], packed):
        buffer = importlib.import_module("some_library").Buffer()
        assert importlib.import_module("another_library").value == 7
        assert buffer.dispatch(1) == 1
    assert [each[1] for each in told[:1]] == ["dispatch"] and not caplog.records


def test_what_is_installed_is_read_and_not_imported(place: Path) -> None:
    package = place / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    (package / "buffer.py").write_text(LIBRARY)
    fits = {"dispatch": AdaptedCall(described, ("x", "handle"))}
    other = {"dispatch": AdaptedCall(described, ("x", "topk"))}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(place))
        for module in ("a_package", "a_package.buffer"):
            assert libraries.installed([Adapter("lib", module, "Buffer", fits)]) == {"lib": True}
            assert libraries.installed([Adapter("lib", module, "Buffer", other)]) == {"lib": False}
        assert libraries.installed([Adapter("lib", "missing", "Buffer", fits)]) == {}
        absent = Adapter("lib", "a_package", "ElasticBuffer", fits)
        assert libraries.installed([absent]) == {}, "the class came with a later version"
        (package / "stub.pyi").write_text(LIBRARY)
        stub = Adapter("lib", "a_package.stub", "Buffer", fits)
        assert libraries.installed([stub]) == {"lib": True}
        both = [Adapter("lib", "a_package", "Buffer", each) for each in (fits, other)]
        assert libraries.installed(both) == {"lib": False}, "one of its adapters does not fit"
