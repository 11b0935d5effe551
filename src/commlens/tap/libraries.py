"""Calls of libraries that communicate past torch's dispatcher: a hook on their import replaces the
methods that communicate, so that each call is announced before it runs.

No library is imported here. A library whose signatures are not those of its adapter is left alone.
What a call does never depends on commlens: it runs once, with its own arguments, and its result or
error is passed on.

``buffer.dispatch(x)`` of DeepEP, the first call in its group, becomes ``LibraryCall(group,
"dispatch", x)``, and is announced with the number 1 and the name "deep_ep.Buffer.dispatch".
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Container, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from commlens.tap.call_arguments import reader_of, signature_of
from commlens.tap.groups import numbers
from commlens.tap.hand_made import Membership

log = logging.getLogger("commlens")

Given = dict[str, Any]
"""The arguments of a call, by name."""


class LibraryGroup:
    """The processes with which a library communicates through one object, and the numbers of the
    calls. After a call that raised, it is unknown which calls of the peers correspond, so later
    ones have no number.
    """

    def __init__(self, library: str, *, process_group: Any = None, made: Any = None) -> None:
        self.library = library
        self.process_group = process_group if process_group is None else weakref.ref(process_group)
        self.made: Membership | None = made  # of a group that torch does not know
        self.aligned = True
        self.is_used = False
        self._counters: dict[tuple[int, str], Callable[[], int]] = {}

    def number(self, peer: int, op: str) -> int:
        """Return the number of a call: with a peer among those with this peer, else in the group;
        0 if it is unknown.
        """
        key = (peer, op) if peer >= 0 else (-1, "")
        drawn = self._counters.setdefault(key, numbers())()
        return drawn if self.aligned else 0


class LibraryCall(NamedTuple):
    """A call that communicates. Roots and peers are ranks in the group."""

    group: LibraryGroup
    op: str
    tensor: Any = None
    root: int = -1
    peer: int = -1
    is_numbered: bool = True  # the peers make the same calls in the same order
    waits: bool = False  # it returns once it is done; else it only enqueues it on a device
    makes: bool = False  # it returns an object that communicates in this group


Describe = Callable[[Any, Given], LibraryCall | None]
"""Describe a call by its ``self`` (of a function None) and its arguments."""


class AdaptedCall(NamedTuple):
    """How one method is recorded. A method without these parameters is of another version."""

    describe: Describe
    parameters: tuple[str, ...] = ()


class Adapter(NamedTuple):
    """How the methods of one class are recorded or, if ``owner`` is "", a module's functions."""

    library: str
    module: str
    owner: str
    calls: Mapping[str, AdaptedCall]
    # takes a method and its name, and returns its replacement; None: one that announces each call
    wrap: Callable[[Any, str], Any] | None = None


class _Replaced(NamedTuple):
    owner: Any
    name: str
    original: Any
    replacement: Any


_groups: MutableMapping[Any, dict[str, LibraryGroup]] = weakref.WeakKeyDictionary()
states: dict[str, str] = {}
"""By library that the program has imported: "applied", or "other-version"."""
_replaced: dict[str, list[_Replaced]] = {}
"""By library: the methods that its adapters have replaced."""
_inside = threading.local()
_failed = False
_adapters: dict[str, list[Adapter]] = {}  # by module
_begin: Callable[[LibraryCall, int, str, Any], Any] | None = None
_end: Callable[[Any, BaseException | None], None] | None = None


def group_of(owner: Any, library: str, make: Callable[[], LibraryGroup]) -> LibraryGroup:
    """Return the group of a process group or of a library's own object; ``make`` makes it."""
    found = _groups.setdefault(owner, {})
    if library not in found:
        found[library] = make()
    return found[library]


def of_process_group(process_group: Any, library: str) -> LibraryGroup:
    """Return the group of a library that communicates among the members of a process group."""
    return group_of(
        process_group, library, lambda: LibraryGroup(library, process_group=process_group)
    )


def made_by(owner: Any, library: str) -> LibraryGroup | None:
    """Return the group of an object that a call of the library has returned; None if unknown."""
    return _groups.get(owner, {}).get(library)


def listen(
    begin: Callable[[LibraryCall, int, str, Any], Any] | None,
    end: Callable[[Any, BaseException | None], None] | None,
) -> None:
    """Report each call to ``begin(call, number, name, frame) -> token``, and its end to
    ``end(token, error)``; None: calls are only counted.
    """
    global _begin, _end
    _begin, _end = begin, end


def install(adapters: list[Adapter], *, late: bool) -> None:
    """Apply adapters whenever their modules are imported. In a job that is running already, the
    numbers of the calls of a module that was imported before are unknown (``late``).
    """
    if _adapters:
        return
    for adapter in adapters:
        _adapters.setdefault(adapter.module, []).append(adapter)
    sys.meta_path.insert(0, _Finder())
    for name in [*_adapters]:
        if name in sys.modules:
            _safely(functools.partial(_apply_to, late=late), sys.modules[name])


class _Finder:
    """Lets the other finders find a module, and applies its adapters once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module with adapters; None for all others."""
        if name not in _adapters:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _safely(_applying_after, spec)
                return spec
        return None


def _applying_after(spec: Any) -> None:
    if spec.loader is None:
        return  # a folder without __init__.py
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        # the loader of a zip file loads other modules, too
        if module.__name__ in _adapters:
            _safely(_apply_to, module)

    spec.loader.exec_module = exec_module


def _safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of commlens. Log its first error; return None after one."""
    global _failed
    try:
        return function(*args)
    except Exception as error:
        if not _failed:
            _failed = True
            log.warning(
                "commlens: a call past torch's dispatcher is not recorded: %s: %s",
                type(error).__name__,
                error,
            )
        return None


def _apply_to(module: Any, *, late: bool = False) -> None:
    for adapter in _adapters[module.__name__]:
        owner = getattr(module, adapter.owner, None) if adapter.owner else module
        if owner is None:
            continue
        methods = {name: vars(owner)[name] for name in adapter.calls if name in vars(owner)}
        if not methods and _is_of_torch(adapter):
            continue
        parameters = {
            name: signature.parameters
            for name, method in methods.items()
            if (signature := signature_of(method)) is not None
        }
        if len(parameters) < len(methods) or not _fits(adapter, parameters):
            _leave_alone(adapter.library)
        elif states.setdefault(adapter.library, "applied") == "applied":
            wrap = adapter.wrap or functools.partial(_announced, adapter=adapter, late=late)
            for name, method in methods.items():
                _replace(adapter.library, owner, name, wrap(method, name))


def _is_of_torch(adapter: Adapter) -> bool:
    """Whether torch itself has the calls, which an older torch lacks."""
    return adapter.module.startswith("torch.")


def _fits(adapter: Adapter, parameters: Mapping[str, Container[str]]) -> bool:
    """Return whether methods with these parameters are those that the adapter knows."""
    known = [name for name in adapter.calls if name in parameters]
    return bool(known) and all(
        needed in parameters[name] for name in known for needed in adapter.calls[name].parameters
    )


def _replace(library: str, owner: Any, name: str, replacement: Any) -> None:
    replaced = _replaced.setdefault(library, [])
    original = vars(owner)[name]
    # two finders may have found the module's spec, so that its adapters are applied twice
    if all(original is not each.replacement for each in replaced):
        replaced.append(_Replaced(owner, name, original, replacement))
        setattr(owner, name, replacement)


def _leave_alone(library: str) -> None:
    """Record no call of a library of which one class is of another version. If some classes were
    recorded, ranks that import them in another order would seem to make other calls.
    """
    states[library] = "other-version"
    for each in _replaced.pop(library, ()):
        if vars(each.owner).get(each.name) is each.replacement:  # else another tool's is around it
            setattr(each.owner, each.name, each.original)


def _announced(original: Any, name: str, *, adapter: Adapter, late: bool) -> Any:
    """Return a function that announces a call, and calls the original."""
    describe, read = adapter.calls[name].describe, reader_of(original)
    label = ".".join(filter(None, (adapter.library, adapter.owner, name)))

    def begin(args: Any, kwargs: Any, frame: Any) -> tuple[LibraryCall, Any] | None:
        given = read(args, kwargs)
        call = None if given is None else describe(given.pop("self", None), given)
        if call is None:
            return None
        call.group.aligned &= not late
        number = call.group.number(call.peer, call.op) if call.is_numbered else 0
        return call, None if _begin is None else _begin(call, number, label, frame)

    @functools.wraps(original)
    def announced(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "a_call", False):
            return original(*args, **kwargs)
        begun = failure = None
        try:
            _inside.a_call = True
            begun = _safely(begin, args, kwargs, sys._getframe(1))
            result = original(*args, **kwargs)
            if begun is not None and begun[0].makes:
                _safely(group_of, result, adapter.library, lambda: begun[0].group)
            return result
        except BaseException as error:
            failure = error
            raise
        finally:
            _inside.a_call = False
            if begun is not None:
                _safely(_ended, *begun, failure)

    return announced


def _ended(call: LibraryCall, token: Any, failure: BaseException | None) -> None:
    if failure is not None:
        call.group.aligned = False
    if token is not None and _end is not None:
        _end(token, failure)


# --- for ``commlens doctor``, which reads the sources and imports nothing


def installed(adapters: list[Adapter]) -> dict[str, bool]:
    """Return the libraries that are installed, and whether the adapters know all signatures that
    they replace.
    """
    found: dict[str, bool] = {}
    for adapter in adapters:
        read = [_parameters_in(source, adapter.owner) for source in _sources(adapter.module)]
        owners = [parameters for parameters in read if parameters is not None]
        fits = any(_fits(adapter, parameters) for parameters in owners)
        if owners and (fits or not _is_of_torch(adapter)):
            found[adapter.library] = found.get(adapter.library, True) and fits
    return found


def _sources(module: str) -> list[Path]:
    """Return the source files of a module; of a package, those of all its modules."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    sources: list[Path] = []
    for folder in (spec and spec.submodule_search_locations) or ():
        place = Path(folder, *rest)
        files = [place.with_suffix(suffix) for suffix in (".py", ".pyi") if rest]
        sources += [file for file in files if file.exists()] or sorted(place.glob("**/*.py"))
    return sources


def _parameters_in(source: Path, owner: str) -> dict[str, list[str]] | None:
    """Return the parameters of each method of a class, or of a file's functions if ``owner`` is "";
    None if the file has no such class.
    """
    tree: Any = ast.parse(source.read_bytes())
    if owner:
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        tree = next((each for each in classes if each.name == owner), None)
    if tree is None:
        return None
    return {
        node.name: [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
