"""The paths of modules and parameters: the class of a root and the names of the children,
``"MLP.net1"`` and ``"MLP.net1.weight"``.

A *root* is a module that is called inside no other one. A call of a wrapper, such as DDP, counts as
a call of the module that it wraps, which has a path without the wrapper.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from commlens.tracing.attribution.module_calls import ModuleRow

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The names under which wrappers hold the module that they wrap."""
_WRAPPERS = (DistributedDataParallel, DataParallel)
"""Their name for it is ``module``, which a module of the program may use, too."""


class ModulePaths:
    """The paths of all modules below the roots that were called, and the rows of the modules that
    were called.
    """

    def __init__(self) -> None:
        self.rows: list[ModuleRow] = []
        self.names_wrappers = False
        """Whether wrappers are modules with names of their own, as in CommDebugMode, except for
        torch.compile's; else their calls count as the wrapped module's.
        """
        self._rows_by_path: Any = WeakIdKeyDictionary()  # by module, and path
        self._paths: Any = WeakIdKeyDictionary()  # by module: its paths below all roots
        self._parameters: Any = WeakIdKeyDictionary()  # by parameter: its path
        self._roots_of_class: Counter[str] = Counter()

    def row_of(self, module: Module, parent: ModuleRow | None) -> ModuleRow:
        """Return the row of a module that is called inside the module of another row."""
        path = self._path(module, parent)
        rows = self._rows_by_path.setdefault(module, {})
        if path not in rows:
            rows[path] = ModuleRow(len(self.rows), path, module, parent)
            self.rows.append(rows[path])
        row: ModuleRow = rows[path]
        return row

    def name_root(self, module: Module) -> str:
        """Return the path of a module, which is taken for a root if no call has shown otherwise."""
        return self._path(self.unwrapped(module), None)

    def paths_of(self, module: Any) -> list[str]:
        """Return the paths of a module below all roots that were called."""
        paths: list[str] = self._paths.get(module, [])
        return paths

    def path_of(self, module: Any) -> str | None:
        """Return the path of a module whose root has been called."""
        return next(iter(self.paths_of(module)), None)

    def other_paths(self, row: ModuleRow) -> tuple[str, ...]:
        """Return the other paths of a row's module under which no row counts its calls: those calls
        are in this row.
        """
        module = row.ref()
        if module is None:
            return ()
        rows = self._rows_by_path.get(module, {})
        return tuple(path for path in self.paths_of(module) if path not in rows)

    def parameter_path(self, parameter: Any) -> str | None:
        """Return a parameter's path, if its root has been called; None for other tensors."""
        path_of: str | None = self._parameters.get(parameter)
        if path_of is None:  # new, or replaced: read all anew
            self._parameters = WeakIdKeyDictionary()
            roots = [(row.path, row.ref()) for row in self.rows if row.parent is None]
            for root_path, root in roots:
                for path, module in self._below(root, root_path) if root is not None else ():
                    for name, tensor in module._parameters.items():
                        if tensor is not None:
                            self._parameters.setdefault(tensor, f"{path}.{name}")
            path_of = self._parameters.get(parameter)
        return path_of

    def accumulating_path(self, node: Any) -> str | None:
        """Return the path of the module whose parameter's gradient a node accumulates; None for
        other nodes.
        """
        parameter = getattr(node, "variable", None)
        path = self.parameter_path(parameter) if parameter is not None else None
        return path.rpartition(".")[0] if path is not None else None

    def unwrapped(self, module: Module) -> Module:
        """Return the module inside all wrappers."""
        while (inner := self._wrapped(module)) is not None:
            module = inner
        return module

    def _wrapped(self, module: Module) -> Module | None:
        """Return the module that a wrapper wraps, if its calls count as that module's."""
        names: tuple[str, ...] = _WRAPPED
        if self.names_wrappers:
            names = ("_orig_mod",)
        elif isinstance(module, _WRAPPERS):
            names = (*_WRAPPED, "module")
        inside: dict[str, Module | None] = module.__dict__.get("_modules", {})
        return next((inside[name] for name in names if name in inside), None)

    def _path(self, module: Module, parent: ModuleRow | None) -> str:
        """Return a module's path. Of several paths of a shared module, it is the one nearest to the
        parent's. A module that is no child of the root is named by its class, ``"MLP.(Helper)"``,
        and the second root of a class ``"MLP#2"``.
        """
        name = type(module).__name__
        if parent is not None:
            root = parent.root.ref()
            if not self.paths_of(module) and root is not None:
                self._learn(root, parent.root.path)  # it was added after its root's first call
            return max(
                self.paths_of(module) or [f"{parent.path}.({name})"],
                key=lambda path: (_shared_parts(path, parent.path), -len(path)),
            )
        if not self.paths_of(module):
            self._roots_of_class[name] += 1
            number = self._roots_of_class[name]
            self._learn(module, name if number == 1 else f"{name}#{number}")
        return self.paths_of(module)[0]

    def _learn(self, root: Module, name: str) -> None:
        """Note the paths of all modules below a root."""
        for path, module in self._below(root, name):
            paths = self._paths.setdefault(module, [])
            if path not in paths:
                paths.append(path)

    def _below(
        self, module: Module, path: str, above: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, Module]]:
        """Yield a module and all inside it under all paths without wrappers. A module that is also
        inside itself, under ids in ``above``, is not entered again.
        """
        yield path, module
        wrapped, above = self._wrapped(module), above | {id(module)}
        for name, child in module._modules.items():
            if child is not None and id(child) not in above:
                yield from self._below(child, path if child is wrapped else f"{path}.{name}", above)


def _shared_parts(path: str, other: str) -> int:
    """Count the parts with which two paths begin alike."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
