"""Names of mesh dimensions for groups that a DeviceMesh uses but did not create."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from commlens.tap.groups import Group, Groups


def name_mesh_dims(groups: Groups) -> None:
    """Name the mesh dimension of each group that lacks one, such as the default group under a
    dimension that spans the world.
    """
    nameless = {name for name, group in groups.by_name.items() if group.mesh_dim is None}
    if not nameless:
        return
    for mesh in (thing for thing in gc.get_objects() if type(thing) is DeviceMesh):
        names = mesh.mesh_dim_names
        if not names or mesh.mesh.dim() != len(names) or mesh.get_coordinate() is None:
            continue
        for dim, name in enumerate(names):
            with contextlib.suppress(Exception):
                group_name = str(mesh.get_group(dim).group_name)
                if group_name in nameless and _uses(mesh, groups.by_name[group_name]):
                    # if meshes cannot be distinguished, the newest wins
                    nameless.discard(group_name)
                    groups.name_mesh_dim(group_name, str(name))


def _uses(mesh: Any, group: Group) -> bool:
    """Check that a mesh uses this very group, not one of an earlier world with the same name. Torch
    2.6 cannot tell.
    """
    registry = getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {})
    registered = registry.get(group.name)
    return registered is None or registered is group.ref()
