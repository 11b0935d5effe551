"""The order in which a rank runs the modules that FSDP2 has sharded.

If rank 0 runs ``layers.0`` and then ``layers.1``, and rank 1 the other way round,
:meth:`FsdpModules.take` yields the two names in these orders, each as a tensor of kind "module".
The comparison of the ranks' reports then names the first module that they ran at another place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from commlens.numbers.measuring import Named
from commlens.numbers.replicas import Model, Replicas, is_fsdp2, mesh_ranks, plain_name

_ROOT: Final = "the model"


class FsdpModules:
    """The modules of one model, and in which order they ran first since the last check.

    FSDP2 gathers a module's parameters when it runs, and the gathers of the ranks meet in their
    order. A rank that runs modules of equal shapes in another order computes with other parameters,
    and nothing fails.

    Args:
        model: the model; hooks are installed on its modules.
    """

    def __init__(self, model: Model) -> None:
        self._called: dict[str, None] = {}
        self._ranks: tuple[int, ...] = ()
        for root in model.alive():
            sharded = {name: module for name, module in root.named_modules() if is_fsdp2(module)}
            if sharded:
                # of the widest mesh
                meshes = (
                    each.device_mesh for each in root.parameters() if hasattr(each, "device_mesh")
                )
                self._ranks = max(map(mesh_ranks, meshes), key=len, default=())
            for name, module in sharded.items():
                self._note_forward(name, module)

    def take(self) -> Iterator[Named]:
        """Yield the modules in their order, which must be the same on all ranks, and forget it."""
        called, self._called = list(self._called), {}
        if len(self._ranks) > 1:
            kept_by = (Replicas(self._ranks, "equal"),)
            for name in called:
                yield Named("module", name, torch.zeros(1), kept_by)

    def _note_forward(self, name: str, module: nn.Module) -> None:
        ref = weakref.ref(self)
        title = plain_name(name) if name else _ROOT

        def note(_module: nn.Module, _args: Any) -> None:
            if not torch.compiler.is_compiling() and (modules := ref()) is not None:
                modules._called.setdefault(title)

        module.register_forward_pre_hook(note)
