"""The hooks that users register with ``advanced_module_tracker.register_user_hooks``, with
PyTorch's names and arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

Hook = Callable[..., Any]


class UserHooks:
    """Calls the user's hooks around the forward and backward of every module while a context is
    open.
    """

    def __init__(self, tell: Callable[[Hook, Any, Any], None]) -> None:
        """Prepare. ``tell(hook, module, arguments)`` calls a hook of a backward pass."""
        self._hooks: dict[str, Hook] = {}
        self._tell = tell
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

    def _on_gradients(self, name: str, module: Any, tensors: Any, mode: Any) -> None:
        needing = [
            each
            for each in tree_leaves(tensors)
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if name not in self._hooks or not needing or torch._C._current_graph_task_id() != -1:
            return
        reference = weakref.ref(module)

        def backward(*gradients: Any) -> None:
            hook = self._hooks.get(name)
            if hook is not None and self._handles:
                self._tell(hook, reference(), gradients[0] if mode == "all" else gradients)

        register_multi_grad_hook(needing, backward, mode=mode)
