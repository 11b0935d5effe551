"""What a rank reports about its tensors, so that they can be compared with the other ranks'.

After step 100, each rank of a DDP job sends the hash of each parameter: a table of the ranks 0-3
with the relation ``equal``, and a measure ``("parameter", "layers.0.weight", 0x9e09e94f...)``. If
rank 2 sends another hash, its parameter has diverged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from commlens.model.cause import Rank, TensorKind

_FIRST_STEPS = 6

Relation = Literal["equal", "output", "presumed", "learned", "different"]
"""What is known of a tensor's values on the ranks of a table.

``equal``: they must be the same, bit for bit. ``output``: so they must on the ranks that report
them, as one collective gave them. ``presumed``: so they must, unless they differ much
from the beginning. ``learned``: so they must, if they have been so while they changed.
``different``: no two ranks may have the same.
"""


Key = tuple[TensorKind, str]
"""A tensor's kind and name."""


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's hash, and the statistics that distinguish noise from a fault."""

    kind: TensorKind
    name: str
    digest: Annotated[int, msgspec.Meta(ge=0)]  # 64 bits, of its bytes
    items: int = 0
    dtype: str = ""
    norm: float = 0.0
    mean: float = 0.0
    nans: int = 0
    infs: int = 0
    parameter: str = ""  # of an optimizer's state: the name of the parameter that it belongs to
    source: str = ""  # of a collective's output: file name and line number of the call

    @property
    def owner(self) -> str:
        """The parameter's name, for its gradient and its optimizer states, too."""
        return self.parameter or self.name

    @property
    def key(self) -> Key:
        """The tensor's kind and name, which all ranks give it alike."""
        return self.kind, self.name


class TensorTable(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that a group of ranks has in common."""

    ranks: tuple[Rank, ...]  # ascending
    relation: Relation
    measures: tuple[Measure, ...]  # parameters in the order in which they are registered


class TableRef(msgspec.Struct, frozen=True, array_like=True):
    """A table that is kept elsewhere, under its digest: ranks that agree share it."""

    ranks: tuple[Rank, ...]
    relation: Relation
    digest: str


class CheckId(msgspec.Struct, frozen=True, array_like=True):
    """One check, which all of its ranks name alike."""

    source: str  # the optimizer, or the call
    number: int  # the optimizer's step, or the number of the call
    tolerance: float = 0.0  # of norms and means, relative; 0: bit for bit
    # seconds that the ranks wait for the answer. Then a tensor that one of them lacks is a fault.
    # 0: they do not wait
    wait_s: float = 0.0
    ranks: tuple[Rank, ...] = ()  # that take part, if they wait
    tensors: str = ""  # which an optimizer trains: ranks number their optimizers differently

    @property
    def subject(self) -> str:
        """The optimizer, or the place in a program, that is checked again and again."""
        return f"{self.source} {self.tensors}"


class NanEvent(msgspec.Struct, frozen=True, array_like=True):
    """The first NaN of a rank: in the input of a collective, or in the output of a module."""

    step: int  # of the first optimizer
    number: int  # collectives of this step so far
    op: str = ""
    module: str = ""


class OpPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an op ran."""

    module: str = ""
    backward: bool = False  # in the backward pass of the module
    source: str = ""  # file name and line number; in a backward pass, of the forward pass
    after: str = ""  # the last collective that was issued before


class OpRun(msgspec.Struct, frozen=True, array_like=True):
    """One op of torch that a rank ran. Hashes are signed 64-bit integers."""

    op: str  # "": none; something else has changed the tensors that it writes
    arguments: tuple[str, ...]  # of tensors only type and layout
    inputs: tuple[int, ...]  # hashes of the tensors that it reads, and of the generator's state
    outputs: tuple[int, ...]
    writes: tuple[tuple[TensorKind, str, int], ...]  # parameters and so on, with their new hash
    place: int  # in the list of places


class OpLog(msgspec.Struct, frozen=True, array_like=True):
    """The ops of one step of a rank."""

    places: tuple[OpPlace, ...]
    runs: tuple[OpRun, ...]


class NumbersReport(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank reports in one check."""

    rank: Rank
    check: CheckId
    tables: tuple[TableRef, ...]
    nans: tuple[Measure, ...] = ()  # parameters and optimizer states with NaN, shared or not
    first_nan: NanEvent | None = None
    ops: OpLog | None = None


@dataclass
class StepsCompared:
    """The steps of the first optimizer after which ranks were compared."""

    checks: int = 0
    steps: list[int] = field(default_factory=list)  # the first of them, and the last
    ranks: int = 0  # after the step after which most were compared
    tensors: int = 0
    differs_at: int = 0  # the first step with a difference; 0: none
    newest: tuple[int, int] = 0, 0  # ranks and tensors after the newest step

    def add(self, step: int, ranks: int, tensors: int, differs: bool) -> None:
        """Count a check. Ranks that train other parameters, such as another stage of a pipeline,
        have a check of their own after the same step.
        """
        if self.steps[-1:] == [step]:
            ranks, tensors = ranks + self.newest[0], tensors + self.newest[1]
        else:
            self.checks += 1
            self.steps = [*self.steps[:_FIRST_STEPS], step]
        self.newest = ranks, tensors
        self.ranks, self.tensors = max((self.ranks, self.tensors), self.newest)
        if differs and not self.differs_at:
            self.differs_at = step
