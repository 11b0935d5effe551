"""Which ranks must hold the same bytes of a tensor: according to DDP, to the placements and the
mesh of a DTensor, and to Megatron's groups.

On a mesh of 2 x 2 ranks with dimensions dp and tp, a weight that is replicated along dp and sharded
along tp is the same on ranks 0 and 2, and on 1 and 3: on rank 0 it has ``Replicas((0, 2),
"equal")``. A parameter of a plain module has ``Replicas((0, 1, 2, 3), "learned")``: it must be the
same only once it has been the same while it changed.

Megatron trains plain tensors. It marks the tensors of which each tensor parallel rank has its own
shard, and keeps its groups in ``megatron.core.parallel_state``. Nothing of it is imported here.
Tried with megatron-core 0.16.1.

A model is found from its parameters. torch's private names are used here only: DDP's
``process_group``, ``parameters_to_ignore`` and ``_comm_hooks``, FSDP2's parameter groups and their
mesh, and a DTensor's ``_local_tensor``
(tried with torch 2.13).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from commlens.model.numbers import Relation
from commlens.tap.groups import global_ranks

_WRAPPERS: Final = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# of DDP: with these, ranks train apart from each other on purpose
_HOOKS_THAT_DIVERGE: Final = frozenset({"post_localSGD_hook", "noop_hook"})

Ranks = tuple[int, ...]


class Replicas(NamedTuple):
    """Ranks that hold the same bytes of a tensor."""

    ranks: tuple[int, ...]  # ascending
    relation: Relation


class TensorPlace(NamedTuple):
    """Where a parameter or buffer is in its model."""

    name: str
    kept_by: tuple[Replicas, ...]


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor that is on this rank; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def replicas_of_dtensor(tensor: Any) -> tuple[Replicas, ...]:
    """Return the ranks that hold the same part of a DTensor as this one; nothing for other tensors.

    They are those at the same place along each mesh dimension that it is sharded over. No other
    rank has the same partial sum.
    """
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None or any(each.is_partial() for each in placements):
        return ()
    here = mesh.get_coordinate()
    if here is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else here[dim]
        for dim, placement in enumerate(placements)
    )
    ranks = mesh_ranks(mesh, index)
    return (Replicas(ranks, "equal"),) if len(ranks) > 1 else ()


def replicas_beside_mesh(tensor: Any, whole: Any) -> tuple[Replicas, ...]:
    """Return the ranks that perhaps hold the same part of a DTensor, whose mesh is a slice of the
    model's: FSDP2 shards what tensor parallel has left as it was on all of its ranks.

    Args:
        tensor: the DTensor.
        whole: the mesh of other parameters of its model.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    here = whole.get_coordinate()
    names, own = whole.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if here is None or len(own) >= len(names) or not set(own) <= set(names):
        return ()
    sharded = {name for name, each in zip(own, placements, strict=True) if not each.is_replicate()}
    index = tuple(here[dim] if name in sharded else slice(None) for dim, name in enumerate(names))
    ranks = mesh_ranks(whole, index)
    return (Replicas(ranks, "presumed"),) if len(ranks) > 1 else ()


class Model:
    """The modules that hold some parameters.

    Args:
        roots: the outermost modules.
        group: the ranks that hold replicas of tensors that neither DDP nor a placement describes;
            None: tensors that agree are taken for replicas.
    """

    def __init__(self, roots: Iterable[nn.Module], group: tuple[int, ...] | None = None) -> None:
        self._roots = [weakref.ref(root) for root in roots]
        self._group = group
        self.first_of: Any = None  # the optimizer whose checks include the buffers
        self.fsdp: Any = None  # the order of its modules, in these checks
        self.places: dict[int, TensorPlace] = {}  # by the id of a parameter
        self._find_places()

    def alive(self) -> list[nn.Module]:
        """Return the outermost modules that still exist."""
        return [root for ref in self._roots if (root := ref()) is not None]

    @property
    def is_alive(self) -> bool:
        """Whether all of the outermost modules still exist."""
        return all(ref() is not None for ref in self._roots)

    @property
    def has_replicas(self) -> bool:
        """Whether any tensor is known to be replicated."""
        return any(
            each.relation != "learned" for place in self.places.values() for each in place.kept_by
        )

    @property
    def is_sharded(self) -> bool:
        """Whether all parameters are parts of larger tensors, and no other rank has a copy of these
        parts.
        """
        return all(not place.kept_by for place in self.places.values())

    def parameters(self) -> Iterator[tuple[TensorPlace, nn.Parameter]]:
        """Yield all parameters, in the order in which they are registered."""
        for root in self.alive():
            for parameter in root.parameters():
                if (place := self.places.get(id(parameter))) is not None:
                    yield place, parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, tuple[Replicas, ...]]]:
        """Yield all buffers, but those of batch norms, which each rank may keep for itself."""
        untold = Replicas(self._group, "equal") if self._group else Replicas(everyone(), "learned")
        for prefix, root in zip(self._prefixes(), self.alive(), strict=True):
            for path, module in root.named_modules():
                if isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(
                    module, nn.SyncBatchNorm
                ):
                    continue
                for name, buffer in module.named_buffers(recurse=False):
                    kept_by = replicas_of_dtensor(buffer) or (untold,)
                    yield plain_name(f"{prefix}{path}.{name}"), buffer, kept_by

    def _prefixes(self) -> list[str]:
        roots = self.alive()
        if len(roots) < 2:
            return [""] * len(roots)
        return [f"{type(root).__name__} {number}." for number, root in enumerate(roots)]

    def _find_places(self) -> None:
        for prefix, root in zip(self._prefixes(), self.alive(), strict=True):
            by_ddp = _replicas_by_ddp(root)
            copies = find_copies(root, group_ranks)
            untold = self._presumed_replicas(root)
            # the mesh with the most dimensions of all DTensors
            meshes = (getattr(parameter, "device_mesh", None) for parameter in root.parameters())
            whole = max(filter(None, meshes), key=lambda mesh: mesh.ndim, default=None)
            for name, parameter in root.named_parameters():
                known = (
                    *replicas_of_dtensor(parameter),
                    *by_ddp.get(id(parameter), ()),
                    *(Replicas(ranks, "equal") for ranks in copies.get(id(parameter), ())),
                )
                # FSDP1 makes one flat parameter of several.
                is_flat = hasattr(parameter, "_fqns") or hasattr(parameter, "_is_flat_param")
                is_part = hasattr(parameter, "placements") or is_flat
                if hasattr(parameter, "placements") and whole is not None:
                    known = (*known, *replicas_beside_mesh(parameter, whole))
                is_part = is_part or id(parameter) in copies
                kept = tuple(dict.fromkeys(known)) or (() if is_part else untold)
                self.places[id(parameter)] = TensorPlace(plain_name(prefix + name), kept)

    def _presumed_replicas(self, root: nn.Module) -> tuple[Replicas, ...]:
        """Return the ranks that are presumed to hold replicas of plain parameters outside of
        DDP.
        """
        if self._group is not None:
            return (Replicas(self._group, "equal"),) if len(self._group) > 1 else ()
        meshes = {
            tuple(parameter.device_mesh.mesh.reshape(-1).tolist())
            for parameter in root.parameters()
            if hasattr(parameter, "device_mesh")
        }
        # Tensor parallel leaves the parameters as they are that it does not shard.
        if len(meshes) == 1 and not has_fsdp(root):
            return (Replicas(tuple(sorted(meshes.pop())), "presumed"),)
        return (Replicas(everyone(), "learned"),)


def has_fsdp(root: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a module or any below it."""
    return any(map(is_fsdp2, root.modules()))


def is_fsdp2(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a module itself."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def draws_random_numbers(root: nn.Module) -> bool:
    """Return whether a forward pass draws random numbers, for dropout."""
    return any(
        module.training
        and (
            (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
            or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
        )
        for module in root.modules()
    )


def tensor_parallel_ranks(root: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold the other parts of this rank's DTensors, without those along the
    mesh dimensions of FSDP2; nothing if that is not known.
    """
    of_fsdp = {name for module in filter(is_fsdp2, root.modules()) for name in fsdp2_dims(module)}
    for parameter in root.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        names = getattr(mesh, "mesh_dim_names", None) or ("",) * getattr(mesh, "ndim", 0)
        here = mesh.get_coordinate() if mesh is not None else None
        dims = [dim for dim, name in enumerate(names) if name not in of_fsdp]
        # Without FSDP, which of several dimensions is data parallel is not known.
        is_known = "" not in names if has_fsdp(root) else len(names) == 1
        if here is None or len(dims) != 1 or not is_known:
            continue
        index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))
        return mesh_ranks(mesh, index)
    return ()


def fsdp2_dims(module: Any) -> set[str]:
    """Return the names of the mesh dimensions over which FSDP2 shards or replicates a module."""
    return {
        name
        for group in fsdp2_groups(module._get_fsdp_state())
        for name in group.mesh_info.mesh.mesh_dim_names or ()
    }


def fsdp2_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a module's FSDP2 state."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers around its modules."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS) or name


def module_names(roots: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of modules in their models, by id."""
    return {
        id(module): plain_name(name) if name else type(module).__name__
        for root in roots
        for name, module in root.named_modules()
    }


def find_roots(parameters: Iterable[Any]) -> list[nn.Module]:
    """Return the outermost modules that hold any of these parameters, in a stable order."""
    wanted = {id(parameter): number for number, parameter in enumerate(parameters)}
    first: dict[int, int] = {}  # the first parameter of each module
    modules: dict[int, nn.Module] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and "_parameters" in each.__dict__:
            modules[id(each)] = each
            held = [wanted[id(own)] for own in each._parameters.values() if id(own) in wanted]
            if held:
                first[id(each)] = min(held)
    children = {
        id(child): id(module)
        for module in modules.values()
        for child in module.__dict__.get("_modules", {}).values()
        if child is not None
    }
    roots: dict[int, int] = {}
    for module, number in first.items():
        top, seen = module, {module}
        while (above := children.get(top)) is not None and above not in seen:
            top = above
            seen.add(above)
        roots[top] = min(number, roots.get(top, number))
    return [modules[root] for root in sorted(roots, key=lambda root: roots[root])]


def everyone() -> tuple[int, ...]:
    """Return all ranks of the job."""
    return tuple(range(dist.get_world_size()))


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, ascending; empty if they are unknown."""
    return tuple(sorted(global_ranks(group if group is not None else dist.group.WORLD)))


def mesh_ranks(mesh: Any, index: tuple[Any, ...] = ()) -> tuple[int, ...]:
    """Return the global ranks of a device mesh, or of the part at an index, ascending."""
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def _replicas_by_ddp(root: nn.Module) -> Mapping[int, tuple[Replicas, ...]]:
    """Return the replicas of the parameters that DDP keeps alike, by the parameters' ids."""
    found: dict[int, tuple[Replicas, ...]] = {}
    for module in root.modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        ranks = group_ranks(module.process_group)
        if len(ranks) < 2:
            continue
        hooks = getattr(module, "_comm_hooks", None) or ()
        is_apart = any(getattr(hook, "__name__", "") in _HOOKS_THAT_DIVERGE for hook, _ in hooks)
        relation: Relation = "learned" if is_apart else "equal"
        ignored = set(module.parameters_to_ignore)
        for name, parameter in module.module.named_parameters():
            if name not in ignored and id(parameter) not in found:
                found[id(parameter)] = (Replicas(ranks, relation),)
    return found


def find_copies(
    root: nn.Module, ranks_of: Callable[[Any], Ranks]
) -> Mapping[int, tuple[Ranks, ...]]:
    """Return the groups of ranks that hold copies of each parameter, by the parameter's id; nothing
    if this is no model of Megatron, or it has groups of its own.

    Args:
        root: the model.
        ranks_of: returns the global ranks of a process group.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    kinds = (type(module).__module__ for module in root.modules())
    is_of_megatron = any(kind.startswith("megatron.core.") for kind in kinds)
    if state is None or not (is_of_megatron and state.model_parallel_is_initialized()):
        return {}
    tensor = ranks_of(state.get_tensor_model_parallel_group())
    data = ranks_of(state.get_data_parallel_group(with_context_parallel=True))
    experts = state.get_expert_data_parallel_group(check_initialized=False)
    of_experts = ranks_of(experts) if experts is not None else ()
    own = {getattr(module, "tp_group", None) for module in root.modules()} - {None}
    if any(ranks_of(group) != tensor for group in own):
        return {}
    found: dict[int, tuple[Ranks, ...]] = {}
    for parameter in root.parameters():
        if not getattr(parameter, "allreduce", True):
            groups = [of_experts]
        elif getattr(parameter, "tensor_model_parallel", False):
            groups = [data]
        else:
            groups = [data, tensor]
        found[id(parameter)] = tuple(ranks for ranks in groups if len(ranks) > 1)
    return found
