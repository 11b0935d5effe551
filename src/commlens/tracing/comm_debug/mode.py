"""``commlens.CommDebugMode``: PyTorch's context manager with the same members, based on the tracer.

Its counts differ only where PyTorch's are wrong or incomplete: docs/comm_debug_mode.md lists the
differences.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from commlens.errors import MissingDependency
from commlens.model.trace import Phase, Redistribution, TraceData
from commlens.traces.trace import Trace

if importlib.util.find_spec("torch") is None:
    raise MissingDependency.torch("commlens.CommDebugMode")

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from commlens.tracing.attribution.op_names import collective_packets, counted_packet
from commlens.tracing.comm_debug.modules import GLOBAL, ModuleView, SeenModules
from commlens.tracing.comm_debug.output import (
    ANSI,
    PASSES,
    Section,
    described,
    document,
    sections,
    table,
)
from commlens.tracing.ops import OpRecord, OpsMode
from commlens.tracing.raw_event import RawEvent
from commlens.tracing.tracer import Tracer

Counts = dict[Any, int]


class CommDebugMode:
    """Counts the collectives of a block of code by op, module and pass, and lists its tensor ops.

    A drop-in for ``torch.distributed.tensor.debug.CommDebugMode``::

        comm_mode = commlens.CommDebugMode()
        with comm_mode:
            model(batch).sum().backward()
        assert comm_mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1
        print(comm_mode.generate_comm_debug_tracing_table(noise_level=1))

    Entering the block, also while it is still open, clears the results of before. They can be read
    during and after the block. No module, parameter or tensor is kept alive.
    """

    def __init__(self) -> None:
        self.comm_counts: Counts = defaultdict(int)
        self.comm_module_counts: dict[str, dict[str, Counts]] = {}
        # the redistributions that issued collectives, by module, pass and op
        self._causes: dict[str, dict[str, dict[Any, Counter[Redistribution]]]] = {}
        self.comm_registry: set[Any] = set(collective_packets())
        self.advanced_module_tracker = ModuleView()
        self._modules = SeenModules()
        self._tracer: Tracer | None = None
        self._ops: OpsMode | None = None
        self._subclass: _SubclassMode | None = None
        self._entered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op. A subclass may override this to see every op, and call this to run it.
        DTensors run their own ops first.
        """
        if DTensor in types:
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        self.comm_counts.clear()
        self.comm_module_counts.clear()
        self.comm_module_counts[GLOBAL] = _no_counts()
        self._causes.clear()
        self._modules = SeenModules()
        self._entered += 1
        if self._entered == 1:
            self._tracer = tracer = Tracer()
            tracer.modules.paths.names_wrappers = True
            self._ops = OpsMode(tracer.modules, tracer.on_collective, shapes=False)
            self._ops.on_unissued.append(self._count)
            tracer.on_collective.append(self._count_issued)
            tracer.modules.on_enter.append(lambda call, module: self._modules.add_row(call.row))
            tracer.start()
            self._ops.__enter__()
            if type(self).__torch_dispatch__ is not CommDebugMode.__torch_dispatch__:
                self._subclass = _SubclassMode(self)
                self._subclass.__enter__()
            self.advanced_module_tracker.user_hooks.install()
        elif self._ops is not None and self._tracer is not None:  # entered again while it is open
            self._ops.clear()
            self._tracer.clear()
        if self._tracer is not None:
            self.advanced_module_tracker.follow(self._tracer, self._modules)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if self._entered == 0 and self._tracer is not None and self._ops is not None:
            self.advanced_module_tracker.user_hooks.remove()
            if self._subclass is not None:
                self._subclass.__exit__(kind, error, traceback)
                self._subclass = None
            self._ops.__exit__(kind, error, traceback)
            self._tracer.stop()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # --- counts

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> Counts:
        """Return a live ``defaultdict`` of counts by op. Keys are ``torch.ops.c10d_functional.*``
        and ``torch.ops.c10d.*``.
        """
        return self.comm_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters' data by module and name, for called modules that still exist."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """Return the placements of DTensor parameters: ``{"MLPModule.net1.weight":
        (Shard(dim=0),)}``.
        """
        return self.advanced_module_tracker.sharding_dict

    @property
    def comm_module_operation_counts(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Each module's own ops under ``"operations_list"``, with input shapes and placements."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for record in self._records():
            path = self._modules.nearest(record.site).path
            found.setdefault(path, {"operations_list": []})["operations_list"].append(
                described(record)
            )
        return found

    # --- output

    def generate_comm_debug_tracing_table(
        self, noise_level: int = 3, *, causes: bool = False
    ) -> str:
        """Return a table of modules with their collectives and ops, in ANSI colours.

        Args:
            noise_level: 0 shows counts of collectives; 1 adds module types, parameters and DTensor
                ops; 2 adds other ops; 3 adds trivial ops such as views.
            causes: list below each collective the redistributions of DTensors that issued it.
        """
        return table(self._sections(), noise_level, causes=causes)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3, *, causes: bool = False
    ) -> None:
        """Write the table to a file, without colours."""
        text = ANSI.sub("", self.generate_comm_debug_tracing_table(noise_level, causes=causes))
        Path(file_name).write_text(text, encoding="utf-8")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the same content as JSON, in the format of PyTorch's browser page."""
        with Path(file_name).open("w", encoding="utf-8") as file:
            json.dump(document(self._sections(), noise_level), file, indent=4)

    def trace(self) -> Trace:
        """Return the collectives as a :class:`commlens.Trace`: in order, with bytes, groups, causes
        and lines of code.
        """
        return Trace(TraceData() if self._tracer is None else self._tracer.data())

    # --- counting

    def _count_issued(self, event: RawEvent) -> None:
        if event.call is not None:
            self._modules.add_row(event.call.row)
        path, owner = event.path, event.owner
        if owner is not None and owner.library.startswith("FSDP"):
            # the module whose parameters it carries, if that is part of a module that was called
            path = owner.name if owner.name.partition(".")[0] in self._modules.by_path else path
        self._count(counted_packet(event), event.phase, path, event.cause)

    def _count(
        self,
        packet: Any,
        phase: Phase | None,
        path: str | None,
        cause: Redistribution | None = None,
    ) -> None:
        """Count a collective of a module, also for each module around it."""
        self.comm_counts[packet] += 1
        pass_name = PASSES[phase]
        module = self._modules.nearest(path)
        if path is not None and path != module.path:  # the module at path was not called yet
            self._count_in_module(path, pass_name, packet, cause)
        while True:
            self._count_in_module(module.path, pass_name, packet, cause)
            if module.parent is None:
                return
            module = module.parent

    def _count_in_module(
        self, path: str, pass_name: str, packet: Any, cause: Redistribution | None
    ) -> None:
        counts = self.comm_module_counts.get(path)
        if counts is None:
            counts = self.comm_module_counts[path] = _no_counts()
        if pass_name not in counts:
            counts[pass_name] = defaultdict(int)
        counts[pass_name][packet] += 1
        if cause is not None and cause.after:
            by_pass = self._causes.setdefault(path, {})
            by_pass.setdefault(pass_name, {}).setdefault(packet, Counter())[cause] += 1

    def _sections(self) -> list[Section]:
        return sections(self._modules, self.comm_module_counts, self._records(), self._causes)

    def _records(self) -> list[OpRecord]:
        if self._ops is None:
            return []
        for row in list(self._ops.rows.values()):
            self._modules.add_row(row)
        return self._ops.records()


class _SubclassMode(TorchDispatchMode):  # type: ignore[misc]
    """Passes ops to the ``__torch_dispatch__`` of a subclass."""

    supports_higher_order_operators = True

    def __init__(self, mode: CommDebugMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_dispatch__(func, types, args, kwargs)


def _no_counts() -> dict[str, Counts]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}
