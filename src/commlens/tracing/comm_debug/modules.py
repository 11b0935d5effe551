"""The modules that CommDebugMode shows, and ``advanced_module_tracker``, under which its users find them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from commlens.model.trace import Phase

if TYPE_CHECKING:
    from commlens.tracing.modules import ModuleCall, ModuleRow
    from commlens.tracing.tracer import Tracer

GLOBAL = "Global"


class SeenModule:
    """A module that was called in the context. Its parameters are its own: nothing here keeps them alive."""

    __slots__ = ("children", "depth", "parent", "path", "placements", "reference", "type")

    def __init__(self, path: str, kind: str, depth: int, parent: SeenModule | None, reference: weakref.ref[Any] | None) -> None:
        self.path = path
        self.type = kind  # "class 'torch.nn.modules.linear.Linear'"
        self.depth = depth
        self.parent = parent
        self.reference = reference
        self.children: list[SeenModule] = []
        self.placements: dict[str, Any] = {}  # by parameter's name, DTensors only

    def with_descendants(self) -> Iterator[SeenModule]:
        """Itself and all that were called inside, callers first."""
        todo = [self]
        while todo:
            module = todo.pop()
            yield module
            todo.extend(reversed(module.children))


class SeenModules:
    """The modules of one context by path, in the order of their first calls."""

    def __init__(self) -> None:
        self.root = SeenModule(GLOBAL, "", 0, None, None)
        self.by_path: dict[str, SeenModule] = {GLOBAL: self.root}

    def entered(self, call: ModuleCall, module: Any) -> None:
        """A module is being called."""
        if call.row.path not in self.by_path:
            self.of_row(call.row)

    def of_row(self, row: ModuleRow) -> SeenModule:
        """The module of a tracker's row."""
        seen = self.by_path.get(row.path)
        if seen is None:
            parent = self.of_row(row.parent) if row.parent is not None else self.root
            kind = f"class '{row.type}'".replace("<", "").replace(">", "")
            seen = self.by_path[row.path] = SeenModule(row.path, kind, parent.depth + 1, parent, row.ref)
            parent.children.append(seen)
            module = row.ref()
            if module is not None:
                seen.placements = {name: tensor.placements for name, tensor in module._parameters.items() if isinstance(tensor, DTensor)}
        return seen

    def nearest(self, path: str | None) -> SeenModule:
        """The module of a path or, where it has not been called yet, the one that it is part of."""
        while path:
            seen = self.by_path.get(path)
            if seen is not None:
                return seen
            path = path.rpartition(".")[0]
        return self.root


class ModuleView:
    """What ``comm_mode.advanced_module_tracker`` offers. Dictionaries are made when they are asked for."""

    def __init__(self) -> None:
        self._modules = SeenModules()
        self._tracer: Tracer | None = None

    def follow(self, tracer: Tracer, modules: SeenModules) -> None:
        """Show another context."""
        self._tracer, self._modules = tracer, modules

    @property
    def is_bw(self) -> bool:
        """Whether this thread is inside a backward pass."""
        return bool(torch._C._current_graph_task_id() != -1)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether this thread is running a forward again for activation checkpointing."""
        return self._tracer is not None and self._tracer.locate()[0] is Phase.RECOMPUTATION

    @property
    def name(self) -> str:
        """The module that this thread is in, ``"Global"`` outside of modules."""
        call = self._tracer.locate()[1] if self._tracer is not None else None
        return call.row.path if call is not None else GLOBAL

    @property
    def module_helper_dict(self) -> dict[str, dict[str, Any]]:
        """By path: ``depth``, and but for ``"Global"`` ``module_type``; ``parameters`` where some are DTensors."""
        found: dict[str, dict[str, Any]] = {}
        for module in self._modules.root.with_descendants():
            entry: dict[str, Any] = {"depth": module.depth}
            if module is not self._modules.root:
                entry = {"module_type": module.type, **entry}
            if module.placements:
                entry["parameters"] = {name: str(placements) for name, placements in module.placements.items()}
            found[module.path] = entry
        return found

    @property
    def module_parents_dict(self) -> dict[str, set[str]]:
        """By path: the paths of the module itself and of all that it was called in, ``"Global"`` among them."""
        found: dict[str, set[str]] = {GLOBAL: set()}
        for module in self._modules.root.with_descendants():
            if module.parent is not None:
                found[module.path] = {module.path, module.parent.path, *found[module.parent.path]}
        return found

    @property
    def parent_dict(self) -> dict[str, list[str]]:
        """By path: the modules called directly inside, each once."""
        return {m.path: [child.path for child in m.children] for m in self._modules.root.with_descendants() if m.children}

    @property
    def sharding_dict(self) -> dict[str, Any]:
        """By parameter: placements. ``{"MLPModule.net1.weight": (Shard(dim=0),)}``."""
        modules = self._modules.root.with_descendants()
        return {f"{m.path}.{name}": placements for m in modules for name, placements in m.placements.items()}

    @property
    def module_parameters_dict(self) -> dict[str, dict[str, Any]]:
        """By path: the parameters' data by name, of the modules that have any and that still exist."""
        found: dict[str, dict[str, Any]] = {}
        with torch.utils._python_dispatch._disable_current_modes():  # reading data is an op
            for seen in self._modules.root.with_descendants():
                module = seen.reference() if seen.reference is not None else None
                parameters = module._parameters.items() if module is not None else ()
                data = {name: parameter.data for name, parameter in parameters if parameter is not None}
                if data:
                    found[seen.path] = data
        return found

    def print_paramater_info(self) -> None:
        """Print ``module_parameters_dict``. (The name is PyTorch's.)"""
        print(self.module_parameters_dict)

    def print_sharding_info(self) -> None:
        """Print ``sharding_dict``, a line each."""
        for name, placements in self.sharding_dict.items():
            print(f"{name}: {placements}")
