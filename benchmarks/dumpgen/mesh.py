"""Ranks on a mesh of pipeline x data x tensor parallelism, and the process groups that each belongs
to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

WORLD = "world"


@dataclass(frozen=True)
class Group:
    """One process group."""

    name: str
    role: str  # "world", "pp", "dp", "tp", "ep"
    description: str
    ranks: tuple[int, ...]

    @cached_property
    def rank_list(self) -> str:
        """As ``pg_config`` has it."""
        return "[" + ", ".join(map(str, self.ranks)) + "]"


@dataclass(frozen=True)
class Mesh:
    """Which rank is where. Tensor parallel ranks are neighbours, pipeline stages are furthest
    apart.
    """

    pp: int
    dp: int
    tp: int
    ep: int = 1  # experts: neighbouring data parallel ranks; 1 means none
    megatron: bool = False  # its names of groups, and the many that it makes without much use
    _groups: dict[tuple[str, int], Group] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, data parallel and tensor parallel coordinate."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, stage: int, dp: int, tp: int) -> int:
        """The rank at these coordinates."""
        return (stage * self.dp + dp) * self.tp + tp

    def group(self, role: str, rank: int) -> Group:
        """The group of this role that the rank is in."""
        return self._of[role][rank]

    def groups(self, rank: int) -> list[Group]:
        """All groups of a rank, in the order in which they were made."""
        return [of[rank] for of in self._of.values() if rank in of]

    @cached_property
    def _of(self) -> dict[str, dict[int, Group]]:
        descriptions = _MEGATRON if self.megatron else _DEVICE_MESH
        size, pp, dp, tp = self.size, range(self.pp), range(self.dp), range(self.tp)
        members: dict[str, list[list[int]]] = {WORLD: [list(range(size))]}
        members["dp"] = [[self.rank(p, d, t) for d in dp] for p in pp for t in tp]
        if self.megatron:
            members["model"] = [[self.rank(p, d, t) for p in pp for t in tp] for d in dp]
        members["tp"] = [[self.rank(p, d, t) for t in tp] for p in pp for d in dp]
        members["pp"] = [[self.rank(p, d, t) for p in pp] for d in dp for t in tp]
        if self.megatron:
            members["embedding"] = [
                [self.rank(p, d, t) for p in sorted({0, self.pp - 1})] for d in dp for t in tp
            ]
            members["stage"] = [[self.rank(p, d, t) for d in dp for t in tp] for p in pp]
        if self.ep > 1:
            members["ep"] = [
                [self.rank(p, d, t) for d in range(first, first + self.ep)]
                for p in pp
                for t in tp
                for first in range(0, self.dp, self.ep)
            ]
        of: dict[str, dict[int, Group]] = {}
        number = 0
        for role, lists in members.items():
            of[role] = {}
            for ranks in lists:
                group = Group(str(number), role, descriptions[role], tuple(ranks))
                number += 1
                of[role].update(dict.fromkeys(ranks, group))
        return of


_DEVICE_MESH = {
    WORLD: "default_pg",
    "dp": "mesh_fsdp",
    "tp": "mesh_tp",
    "pp": "mesh_pp",
    "ep": "mesh_ep",
}
_MEGATRON = {
    WORLD: "default_pg",
    "dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "model": "MODEL_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "embedding": "EMBEDDING_GROUP",
    "stage": "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
}

MESHES = {
    8: Mesh(2, 2, 2),
    16: Mesh(4, 2, 2),
    64: Mesh(4, 4, 4),
    256: Mesh(4, 8, 8),
    1024: Mesh(8, 16, 8),
    4096: Mesh(8, 64, 8),
    10240: Mesh(8, 160, 8),
}
"""World size to the mesh of an FSDP x TP x PP job."""

FLAT_MESHES = {
    8: Mesh(1, 2, 4),
    16: Mesh(1, 4, 4),
    64: Mesh(1, 8, 8),
    256: Mesh(1, 32, 8),
    1024: Mesh(1, 128, 8),
    4096: Mesh(1, 512, 8),
    10240: Mesh(1, 1280, 8),
}
"""World size to the mesh of a job without a pipeline: no messages, collectives only."""

MEGATRON_MESHES = {
    16: Mesh(4, 2, 2, ep=2, megatron=True),
    64: Mesh(4, 4, 4, ep=4, megatron=True),
    1024: Mesh(8, 16, 8, ep=8, megatron=True),
}
"""World size to the mesh of a mixture-of-experts job as Megatron runs it."""
