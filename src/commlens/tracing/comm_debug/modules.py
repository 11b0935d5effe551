"""The modules of a CommDebugMode context, and its ``advanced_module_tracker``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from commlens.model.trace import Phase
from commlens.tracing.attribution.module_calls import current_node

if TYPE_CHECKING:
    from commlens.tracing.attribution.module_calls import ModuleRow
    from commlens.tracing.tracer import Tracer

GLOBAL = "Global"


@dataclass(slots=True, eq=False)
class SeenModule:
    """A module called in the context. It keeps neither the module nor its parameters alive."""

    path: str
    type: str  # "class 'torch.nn.modules.linear.Linear'"
    depth: int
    parent: SeenModule | None
    reference: weakref.ref[Any] | None
    children: list[SeenModule] = field(default_factory=list)
    placements: dict[str, Any] = field(default_factory=dict)  # by parameter name, DTensors only

    def with_descendants(self) -> Iterator[SeenModule]:
        """Yield the module and all modules called inside it, callers first."""
        todo = [self]
        while todo:
            module = todo.pop()
            yield module
            todo.extend(reversed(module.children))


class SeenModules:
    """The modules of one context by path, in the order of first calls."""

    def __init__(self) -> None:
        self.root = SeenModule(GLOBAL, "", 0, None, None)
        self.by_path: dict[str, SeenModule] = {GLOBAL: self.root}

    def add_row(self, row: ModuleRow) -> SeenModule:
        """Return the module of a tracker's row; record it if it is new."""
        seen = self.by_path.get(row.path)
        if seen is None:
            parent = self.add_row(row.parent) if row.parent is not None else self.root
            kind = f"class '{row.type}'".replace("<", "").replace(">", "")
            seen = self.by_path[row.path] = SeenModule(
                row.path, kind, parent.depth + 1, parent, row.ref
            )
            parent.children.append(seen)
            module = row.ref()
            if module is not None:
                seen.placements = {
                    name: tensor.placements
                    for name, tensor in module._parameters.items()
                    if isinstance(tensor, DTensor)
                }
        return seen

    def nearest(self, path: str | None) -> SeenModule:
        """Return the module of a path, or its nearest called ancestor."""
        while path:
            seen = self.by_path.get(path)
            if seen is not None:
                return seen
            path = path.rpartition(".")[0]
        return self.root


class ModuleView:
    """The ``comm_mode.advanced_module_tracker``. Its dictionaries are built on access."""

    def __init__(self) -> None:
        self._modules = SeenModules()
        self._tracer: Tracer | None = None
        # the module whose backward hook is running: its thread is in no module's forward
        self._hooked: Any = None
        self.user_hooks = UserHooks(self._run_backward_hook)

    def follow(self, tracer: Tracer, modules: SeenModules) -> None:
        """Switch to another context."""
        self._tracer, self._modules = tracer, modules

    @property
    def is_bw(self) -> bool:
        """Whether this thread is in a backward pass."""
        return bool(torch._C._current_graph_task_id() != -1)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether this thread is recomputing a forward for activation checkpointing."""
        return self._tracer is not None and self._tracer.modules.locate()[0] is Phase.RECOMPUTATION

    @property
    def name(self) -> str:
        """The module that this thread is in; ``"Global"`` outside all modules."""
        if self._tracer is None:
            return GLOBAL
        modules = self._tracer.modules
        call = modules.locate()[1]
        if call is not None:
            return call.row.path
        node = current_node()  # of a parameter's gradient, in whose hook this runs
        return (modules.paths.accumulating_path(node) if node is not None else None) or GLOBAL

    @property
    def parents(self) -> set[str]:
        """The paths of the module that this thread is in and of all modules around it, including
        ``"Global"``.
        """
        path = self.get_known_fqn(self._hooked) if self._hooked is not None else self.name
        return {GLOBAL} | self.module_parents_dict.get(path or GLOBAL, set())

    def get_known_fqn(self, mod: Any) -> str | None:
        """Return the path of a module whose root has been called, else None."""
        return self._tracer.modules.paths.path_of(mod) if self._tracer is not None else None

    def register_user_hooks(
        self,
        pre_fw_hook: Hook | None = None,
        post_fw_hook: Hook | None = None,
        pre_bw_hook: Hook | None = None,
        post_bw_hook: Hook | None = None,
    ) -> None:
        """Call hooks before and after the forward and backward of every module, in the open
        context, if there is one, and in later ones.

        Each gets the module, and ``pre_fw_hook`` also its inputs, ``post_fw_hook`` its inputs and
        outputs, ``pre_bw_hook`` the gradients of its outputs, ``post_bw_hook`` those of its inputs.

        Raises:
            AssertionError: such a hook is registered already.
        """
        self.user_hooks.register(
            pre_fw_hook=pre_fw_hook,
            post_fw_hook=post_fw_hook,
            pre_bw_hook=pre_bw_hook,
            post_bw_hook=post_bw_hook,
        )

    def clear_user_hooks(self) -> None:
        """Remove the registered hooks."""
        self.user_hooks.clear()

    def _run_backward_hook(self, hook: Hook, module: Any, gradients: Any) -> None:
        outer, self._hooked = self._hooked, module
        try:
            hook(module, gradients)
        finally:
            self._hooked = outer

    @property
    def module_helper_dict(self) -> dict[str, dict[str, Any]]:
        """By path: ``depth``, ``module_type`` (except for ``"Global"``), and ``parameters`` if any
        are DTensors.
        """
        found: dict[str, dict[str, Any]] = {}
        for module in self._modules.root.with_descendants():
            entry: dict[str, Any] = {"depth": module.depth}
            if module is not self._modules.root:
                entry = {"module_type": module.type, **entry}
            if module.placements:
                entry["parameters"] = {
                    name: str(placements) for name, placements in module.placements.items()
                }
            found[module.path] = entry
        return found

    @property
    def module_parents_dict(self) -> dict[str, set[str]]:
        """By path: the paths of the module and all modules around it, including ``"Global"``; for
        ``"Global"`` itself, none.
        """
        found: dict[str, set[str]] = {GLOBAL: set()}
        for module in self._modules.root.with_descendants():
            if module.parent is not None:
                found[module.path] = {module.path, module.parent.path, *found[module.parent.path]}
        return found

    @property
    def parent_dict(self) -> dict[str, list[str]]:
        """By path: the modules called directly inside it, each once."""
        return {
            m.path: [child.path for child in m.children]
            for m in self._modules.root.with_descendants()
            if m.children
        }

    @property
    def sharding_dict(self) -> dict[str, Any]:
        """By parameter: placements. ``{"MLPModule.net1.weight": (Shard(dim=0),)}``."""
        modules = self._modules.root.with_descendants()
        return {
            f"{m.path}.{name}": placements
            for m in modules
            for name, placements in m.placements.items()
        }

    @property
    def module_parameters_dict(self) -> dict[str, dict[str, Any]]:
        """By path: the parameters' data by name. Those of a module that is gone are described:
        placements, shape, dtype and bytes.
        """
        found: dict[str, dict[str, Any]] = {}
        with torch.utils._python_dispatch._disable_current_modes():  # reading data is an op
            for seen in self._modules.root.with_descendants():
                module = seen.reference() if seen.reference is not None else None
                parameters = module._parameters.items() if module is not None else ()
                data: dict[str, Any] = {
                    name: parameter.data for name, parameter in parameters if parameter is not None
                }
                if module is None and self._tracer is not None:
                    data = {
                        parameter.name: parameter
                        for parameter in self._tracer.parameters.of_path(seen.path)
                    }
                if data:
                    found[seen.path] = data
        return found

    def print_paramater_info(self) -> None:
        """Print ``module_parameters_dict``. (The name is PyTorch's.)"""
        print(self.module_parameters_dict)

    def print_sharding_info(self) -> None:
        """Print ``sharding_dict``, one parameter per line."""
        for name, placements in self.sharding_dict.items():
            print(f"{name}: {placements}")


# --- the hooks of advanced_module_tracker.register_user_hooks, with PyTorch's names and arguments

Hook = Callable[..., Any]


class UserHooks:
    """Calls the user's hooks around the forward and backward of every module while a context is
    open.
    """

    def __init__(self, call_backward_hook: Callable[[Hook, Any, Any], None]) -> None:
        """Prepare. ``call_backward_hook(hook, module, gradients)`` calls a hook of a backward
        pass.
        """
        self._hooks: dict[str, Hook] = {}
        self._call_backward_hook = call_backward_hook
        self._handles: list[Any] = []
        self._is_open = False

    def register(self, **hooks: Hook | None) -> None:
        """Add hooks; each kind can have one."""
        for name, hook in hooks.items():
            if hook is not None and name in self._hooks:
                raise AssertionError(
                    f"There is a {name} already: call clear_user_hooks() before you register"
                    " another one."
                )
        self._hooks |= {name: hook for name, hook in hooks.items() if hook is not None}
        self._attach()

    def clear(self) -> None:
        """Remove the user's hooks."""
        self._hooks = {}

    def install(self) -> None:
        """Begin to call them."""
        self._is_open = True
        self._attach()

    def _attach(self) -> None:
        # Only if there are hooks: a compiled module would be compiled anew for a global hook.
        if self._is_open and self._hooks and not self._handles:
            before = register_module_forward_pre_hook(self._before)
            self._handles = [before, register_module_forward_hook(self._after, always_call=True)]

    def remove(self) -> None:
        """Stop calling them."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: Any, inputs: Any) -> None:
        if "pre_fw_hook" in self._hooks:
            self._hooks["pre_fw_hook"](module, inputs)
        self._on_gradients("post_bw_hook", module, inputs, "all")

    def _after(self, module: Any, inputs: Any, outputs: Any) -> None:
        if "post_fw_hook" in self._hooks:
            self._hooks["post_fw_hook"](module, inputs, outputs)
        self._on_gradients("pre_bw_hook", module, outputs, "any")

    def _on_gradients(
        self, name: str, module: Any, tensors: Any, mode: Literal["all", "any"]
    ) -> None:
        needing = [
            each
            for each in tree_leaves(tensors)
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if name not in self._hooks or not needing:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a forward inside a backward is recomputed: its first call has added the hooks
        reference = weakref.ref(module)

        def backward(*gradients: Any) -> None:
            hook = self._hooks.get(name)
            if hook is not None and self._handles:
                # torch passes a list of all gradients, or the first one: hooks get several
                several = gradients[0] if mode == "all" else gradients
                self._call_backward_hook(hook, reference(), several)

        register_multi_grad_hook(needing, backward, mode=mode)
