"""The recorder with the native engine: C++ does the hot path, and Python the rare work.

``commlens/native/recorder.hpp`` does for each collective what
:class:`commlens.capture.recorder.Recorder` does, and writes the same records. It calls the methods
under "called from C++" when something is new or has failed. So of ten equal all_reduces of one
line:

======  ==========================================================================================
1st     C++ calls ``describe_args``, ``args_blob``, ``channel_blob`` and ``python_stack``, keeps
        what they return, and writes the record
others  C++ finds the arguments and the stack among those that it knows, and writes the record
======  ==========================================================================================

With a verifier, the first one is verified in Python (``verify_before_issue``), which then plans how
C++ verifies the others (``make_plan``). A *token* here is a C++ object with the fields of
:class:`commlens.tap.token.Token`; ``native`` is one that C++ hands over.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from commlens import native as native_engine
from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.capture import stacks
from commlens.capture.completion import error_of
from commlens.capture.recorder import Recorder
from commlens.tap import backward_caller, tap
from commlens.tap.groups import Groups, LiveChannel
from commlens.tap.interned_args import InternedArgs, describe
from commlens.tap.rejections import was_not_issued
from commlens.tap.token import CallVerifier, Token


class NativeBoxWriter(BoxWriter):
    """A black box whose records and side table are written by C++."""

    engine: Any = None  # until the base class has made the box, and read these properties

    def __init__(self, module: Any, path: Path, **header: Any) -> None:
        super().__init__(path, **header)
        self.engine = module.Engine(
            self._map, self.capacity, self._side_at, self._side_size, self.epoch
        )
        self.next_index = self.engine.next_index

    @property
    def last_index(self) -> int:
        """Index of the newest announced record."""
        return self.engine.last_index if self.engine is not None else 0

    @last_index.setter
    def last_index(self, index: int) -> None:
        if self.engine is not None:
            self.engine.seen(index)

    @property
    def side_floor(self) -> int:
        """Position up to which blobs are too old for new records to refer to."""
        return self.engine.side_floor if self.engine is not None else 0

    @side_floor.setter
    def side_floor(self, _: int) -> None:
        pass  # the base class sets it; C++ has its own

    def _append(self, payload: bytes) -> int:
        """Append a blob to the side table, and return its position."""
        return int(self.engine.append(payload))


class NativeGroups(Groups):
    """The groups. C++ keeps its own copy of them."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def started_again(self) -> None:
        """Count a new default group, which starts the groups' names again."""
        super().started_again()
        self._engine.forget_groups()

    def reconfigured(self, process_group: Any) -> None:
        """Forget a group that got other members."""
        super().reconfigured(process_group)
        self._engine.forget_groups()

    def renamed(self, channel: LiveChannel) -> None:
        """Describe a channel anew: its group got another name."""
        super().renamed(channel)
        self._engine.renamed(channel)


class NativeRecorder(Recorder):
    """Records every collective of the process into ``writer``, in C++."""

    writer: NativeBoxWriter
    listens_to_waits = False  # C++ sees them
    reads_reduce_ops = True  # C++ can, in every torch

    def __init__(
        self, module: Any, writer: NativeBoxWriter, *, cpp_stack: bool = False, timing: bool = False
    ) -> None:
        self.engine = writer.engine
        self.engine.record_for(self, cpp_stack, timing)
        super().__init__(writer, NativeGroups(self.engine), cpp_stack=cpp_stack, timing=timing)
        self._module = module
        self._specs = {spec.name: spec for _, spec in tap.ops()}
        # by the address of a process group, by which C++ knows it: a weak reference, which tells
        # C++ when the address may be another group's
        self._watched_groups: dict[int, Any] = {}

    # --- switching

    def attach(self) -> None:
        """Start recording."""
        self.engine.attach()

    def detach(self) -> None:
        """Stop recording."""
        self._module.detach()

    @property
    def verifier(self) -> CallVerifier | None:
        """The verifier, which compares every collective with the peers' before it is issued."""
        return self._verifier

    @verifier.setter
    def verifier(self, verifier: CallVerifier | None) -> None:
        self._verifier = verifier
        self.engine.verify(verifier.exchange if verifier is not None else None)

    def make_exchange(self, board: Any, shared: Any, rank: int) -> Any:
        """Make the C++ part of verification, from a rank's board and the page that all ranks
        share.
        """
        return self._module.Exchange(board, shared, rank)

    def tapped_wait(self, original: Any, slow: Any) -> Any:
        """Return a ``Work.wait`` that records in C++, and calls ``slow`` while a tracer in Python
        listens, too.
        """
        return self._module.tapped_wait(original, slow)

    # --- called from C++

    def describe_args(self, name: str, arguments: tuple[Any, ...], address: int) -> InternedArgs:
        """Intern the arguments of an op, on first sight; ``address`` is that of the process
        group.
        """
        spec = self._specs[name]
        process_group = tap.unbox_group(arguments[spec.process_group])
        if address not in self._watched_groups:
            self._watched_groups[address] = weakref.ref(
                process_group, lambda _: self._forget(address)
            )
        return describe(spec, arguments, self.groups.find(process_group))

    def _forget(self, address: int) -> None:
        self._watched_groups.pop(address, None)
        self.engine.forget_group(address)

    def args_blob(self, args: InternedArgs) -> int:
        """Return the position of their description; 0 if it is too large."""
        return self.writer.add_blob(args.content)

    def channel_blob(self, channel: LiveChannel) -> int:
        """Return the position of its description."""
        return self.writer.add_blob(channel.describe())

    def backward_caller(self) -> int:
        """Return the number of the stack that called ``backward()``, if this is one of autograd's
        own threads, which run the pass for the calling thread; 0 for none, and -1 in a thread that
        Python made, in which that is never so.
        """
        return -1 if backward_caller.this_thread.made_by_python else backward_caller.number()

    def python_stack(self, skip: int, caller: int) -> int:
        """Return the position of the calling stack, without its ``skip`` innermost frames, followed
        by the stack with the number ``caller``.
        """
        frame = sys._getframe().f_back  # None in a C++ thread
        for _ in range(skip):
            frame = frame and frame.f_back
        return self.writer.add_blob({"k": "stack", "f": stacks.frames_of(frame, caller)})

    def native_stack(self) -> int:
        """Return the position of the calling stack with its C++ frames."""
        return self.stacks.native_position()

    error_of = staticmethod(error_of)

    def report_native_error(self, text: str) -> None:
        """Count an error of the C++ code."""
        self._failed(RuntimeError(text))

    def verify_before_issue(self, native: Any, reduce_op: int) -> Token:
        """Compare a collective with the peers' before it is issued, if C++ cannot decide alone.
        Return its token in Python. Raises only a refusal.
        """
        verifier = self.verifier
        token = Token(
            native.index,
            native.offset,
            native.args,
            native.since,
            native.thread,
            native.number,
            native.stack,
        )
        token.tagged_number = native.tagged_number
        if native.announced is not None:  # by C++: slot, number, reduce op, absent ranks
            token.announced = native.announced[:2]
        if verifier is None:
            return token
        try:
            # the frame is None in a C++ thread
            frame = sys._getframe().f_back
            # in the form in which a verifier reads it
            boxed = SimpleNamespace(op=reduce_op) if reduce_op >= 0 else None
            verifier.before_issue(token, frame, boxed)
        except BaseException as error:
            self.withdraw(token)
            self.mark_failed(token.offset, token.index, error, 0, L.HOW_RETURN)
            raise error.with_traceback(None) from error.__cause__
        return token

    def make_plan(self, args: InternedArgs, stack: int, reduce_op: int) -> Any:
        """Return how C++ verifies the next collective like this; None if Python must do it."""
        code = reduce_op if reduce_op >= 0 else None
        return self.verifier.plan(args, stack, code) if self.verifier is not None else None

    def verify_before_wait(self, native: Any) -> None:
        """Finish comparing before a thread waits, if C++ cannot decide alone; None for a Work
        without a record. Raises only a refusal.
        """
        verifier = self.verifier
        if verifier is None:
            return
        try:
            if native is None or native.announced is None:
                verifier.before_wait(native.index if native is not None else 0)
            else:
                _, number, code, absent = native.announced
                verifier.before_planned_wait(native.args, number, code, absent, native.index)
        except BaseException as error:
            if native is not None:
                self.engine.wait_ended(native, error, None)
            raise error.with_traceback(None) from error.__cause__

    def after_verified_issue(self, token: Token) -> None:
        """Note that the backend accepted a collective that Python had verified."""
        if token.args.fails_locally and self.verifier is not None:
            self.verifier.announce_accepted(token)

    def was_not_issued(self, args: InternedArgs, error: BaseException) -> bool:
        """Return whether the backend refused an op before anything was sent."""
        return was_not_issued(args.op, error)

    def withdraw(self, token: Token) -> None:
        """Take back the announcement of a collective that was not issued."""
        if self.verifier is not None:
            self.verifier.withdraw(token)

    def forget_number(self, offset: int, index: int) -> None:
        """Remove the number from a record: a later one has it now."""
        self.writer.forget_number(offset, index)

    # --- completion, as Python callers see it

    def wait_begins(self, work: Any) -> Any:
        """Note that a thread is about to block in ``work.wait()``."""
        token = self.engine.wait_begins(work)
        self.engine.verify_wait(token)
        return token

    def wait_ended(self, work: Any, token: Any, error: BaseException | None) -> None:
        """Note that this wait ended."""
        self.engine.wait_ended(token, error, work)

    def _after_wait(self, token: Any, error: BaseException | None) -> None:
        self.engine.wait_ended(token, error, None)

    def tensor_wait_begins(self, tensor: Any) -> Any:
        """Note that a thread is about to block in ``wait_tensor(tensor)``."""
        token = self.engine.tensor_wait_begins(tensor)
        if token is None and self.verifier is None:
            return None
        self.engine.verify_wait(token)
        return None, token

    def used_without_wait(self, work: Any) -> None:
        """Note that the program asked for the state or the future of a Work."""
        self.engine.handled(work)

    def unwaited_works(self) -> Counter[int]:
        """Return how many Works of asynchronous calls were never waited for, by stack."""
        return Counter(self.engine.unwaited())

    def sweep(self) -> Any:
        """Poll the collectives in flight, from the watchdog thread, and return the oldest one that
        is not done.
        """
        self._take_enqueued()
        return self.engine.sweep()

    def _take_enqueued(self) -> None:
        """Hand over what C++ has seen enqueued on a device since the last time."""
        for native in self.engine.take_enqueued():
            if native.captured:
                self.graphs.captured(native.args.channel)
                continue
            token = Token(
                native.index, native.offset, native.args, native.since, native.thread, native.number
            )
            token.backend_number = native.backend_number
            if native.is_hooked:
                token.hooked = native
            elif native.has_result:
                token.result = native.result
            self.device_queues.add(token)

    def cpp_waits(self) -> None:
        """Note that this thread enters a call that waits in C++ for the collectives it issues."""
        self.engine.cpp_waits()

    def waited_in_cpp(self, began: int = 0) -> None:
        """Note that this call has returned."""
        self.engine.waited_in_cpp()

    def release(self) -> None:
        """Drop every Work."""
        self.engine.release()

    # --- CUDA graphs

    def capture_begins(self) -> None:
        """Note that a CUDA graph is being captured: no collective runs, and nothing may query the
        device.
        """
        super().capture_begins()
        self.engine.set_capturing(True)

    def capture_ends(self, graph: Any) -> None:
        """Note that the capture of a graph has ended."""
        self.engine.set_capturing(False)
        self._take_enqueued()
        super().capture_ends(graph)

    # --- coalesced groups

    def coalescing_starts(self) -> None:
        """Note a call of ``ProcessGroup._start_coalescing``."""
        self.engine.coalescing_starts()

    def coalescing_ends(self) -> Any:
        """Record a coalesced group as one collective, before ``ProcessGroup._end_coalescing``
        runs.
        """
        try:
            ended = self.engine.coalescing_ends()
            if ended is None:
                return None
            first, channel_blob, number, identity, members = ended
            stack = self.engine.stack_position(2)
            args, index, offset, now = self._announce_group(
                first.python, channel_blob, stack, number, identity, members
            )
            return self.engine.group_token(args, first, index, offset, now, number)
        except Exception as error:
            self._failed(error)
            return None

    def group_returned(self, token: Any, work: Any) -> None:
        """Note that ``ProcessGroup._end_coalescing`` returned ``work``."""
        try:
            self.engine.group_returned(token, work)
        except Exception as error:
            self._failed(error)

    def raised(self, token: Any, error: BaseException) -> None:
        """Note that closing a coalesced group raised."""
        try:
            self.mark_failed(token.offset, token.index, error, 0, L.HOW_RETURN)
        except Exception as ours:
            self._failed(ours)


log = logging.getLogger("commlens")


# --- the choice of engine: the native one if it was built for this very torch and Python (see
# docs/native.md), else the one in Python, which writes the same records

_TRACED = "this process traced collectives before, with kernels in Python, which stay installed"


def choose(wanted: str) -> tuple[Callable[..., BoxWriter], Callable[..., Recorder]]:
    """Return how to make a box, and how to make its recorder, for the setting ``engine``. Never
    raises; logs why a native engine that was asked for cannot be used.
    """
    if wanted != "python":
        module, why = _native_module()
        if module is not None:
            return partial(NativeBoxWriter, module), partial(NativeRecorder, module)
        if wanted == "native" or why:
            # A traced process has kernels in Python, which is no fault unless the native ones were
            # asked for.
            level = logging.DEBUG if why == _TRACED and wanted != "native" else logging.WARNING
            log.log(level, "commlens records in Python: %s", why or native_engine.NOT_BUILT)
    return BoxWriter, lambda writer, **options: Recorder(writer, Groups(), **options)


def _native_module() -> tuple[Any, str]:
    """Return the module with its kernels installed, or None and the reason; no reason if it was
    simply not built.
    """
    try:
        module = native_engine.load()
        if module is None:
            return None, ""
        if not tap.use_native(module):
            return None, _TRACED
        return module, ""
    except Exception as error:
        return None, f"the native engine cannot be used: {error}"
