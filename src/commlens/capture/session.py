"""Switch recording on and off in this process: :func:`start`, :func:`stop` and what the user calls;
and :class:`TorchEvents`, which follows the calls that make and destroy groups.

The box opens with the import of torch if a launcher made the process a rank, and collectives are
recorded from its first ``init_process_group`` on. A process without a rank in its environment gets
no box before it calls ``init_process_group``; a rank's children (workers of a data loader, of
inductor) inherit its environment and get none. For example, in a rank that torchrun started:

===========================================  ======================================================
the program                                  here
===========================================  ======================================================
``import torch``                             ``start``: the box opens
``dist.init_process_group()``                ``before_init``: recording begins; the call is noted as
                                             a collective of all ranks until it returns
which calls ``_new_process_group_helper``    ``before_new_group``: the groups' names start again
``dist.new_group([0, 1])``                   ``before_new_group``: noted as one of ranks 0 and 1
``store.get("key")``                         ``before_store_wait``: noted until it returns
``dist.destroy_process_group()``             ``before_destroy``: latent faults are written
===========================================  ======================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from commlens import config
from commlens.blackbox import layout as L
from commlens.capture import rank_environment
from commlens.capture.init_hooks import After, hook_init, safely
from commlens.capture.rank_environment import PlaceInJob
from commlens.capture.recording import Recording
from commlens.model.ops import STORE_CLIENT, STORE_SERVER
from commlens.tap.hand_made import (
    group_store,
    membership,
    note_backend,
    note_by_hand,
    note_generation,
    store_address,
    store_name,
)
from commlens.text import count

_recording: Recording | None = None
_events: TorchEvents | None = None


def recording() -> Recording | None:
    """Return the process's recording; None before :func:`start`."""
    return _recording


def is_started() -> bool:
    """Return whether :func:`start` has been called in this very process, not in the parent that it
    was forked from.
    """
    return _recording is not None and _recording.pid == os.getpid()


def start(
    settings: config.Settings,
    *,
    make_verifier: Callable[..., Any],
    dump: Callable[[str, Path, config.Settings], Path],
) -> None:
    """Open the box of a launcher's rank, and record from the first ``init_process_group`` on; at
    once if it has already run.

    A second call may change the settings before collectives are recorded, and may switch
    verification on afterwards.

    Args:
        settings: the settings.
        make_verifier: makes a :class:`commlens.verification.verifier.Verifier` from the same
            arguments.
        dump: dumps into a directory the job whose boxes are in a folder, with these settings, and
            returns the dump's folder.
    """
    global _recording, _events
    if _recording is not None and _recording.pid == os.getpid():
        if not _recording.is_recording:
            safely(_recording.reopen, settings)
        elif settings.debug and not _recording.settings.debug:
            _recording.settings = dataclasses.replace(
                _recording.settings, debug=settings.debug, verify_timeout=settings.verify_timeout
            )
            enter_verification()
        return
    import torch.distributed as dist

    from commlens.tap import libraries
    from commlens.tap.library_adapters import ADAPTERS

    if settings.box_entries == 0 or not dist.is_available():
        return
    _recording = Recording(settings, make_verifier, dump)
    _events = TorchEvents(_recording)
    hook_init(lambda: _events)
    safely(lambda: libraries.install(ADAPTERS, late=dist.is_initialized()))
    if dist.is_initialized():
        _recording.begin_late()
    else:
        safely(_recording.begin_early)


def stop() -> None:
    """Stop recording and close the box. The job goes on."""
    if _recording is not None:
        if _recording.is_recording and _recording.recorder.verifier is not None:
            _recording.recorder.verifier.stop()  # the process may go on
        _recording.close(L.PHASE_CLOSED)


def enter_verification() -> None:
    """Verify from here on, as the other ranks do at the same point of the program. Waits for them
    for a limited time.
    """
    if _recording is not None and is_started():
        _recording.regions += 1
        if _recording.is_recording:
            safely(_recording.enter_verification)


def leave_verification() -> None:
    """Undo one :func:`enter_verification`."""
    if _recording is not None and is_started():
        _recording.regions -= 1
        if _recording.is_recording and _recording.recorder.verifier is not None:
            safely(_recording.recorder.verifier.leave)


@contextlib.contextmanager
def expect_slow(label: str) -> Iterator[None]:
    """Announce that the code inside takes long, so that the ranks waiting for it are not reported
    as stuck.

    Args:
        label: what it does, for the report ("checkpoint").
    """
    current = _recording
    if current is None or not current.is_open:
        yield
        return
    current.expecting.append(label)
    safely(current.write_expecting)
    try:
        yield
    finally:
        current.expecting.pop()
        safely(current.write_expecting)


log = logging.getLogger("commlens")


# --- the effects on the recording of torch's calls that make and destroy groups


def _splits(given: dict[str, Any]) -> bool:
    """Return whether ``new_group`` splits the communicator of the default group (NCCL's
    ``ncclCommSplit``): then all ranks of that one must come, also those not in the new group.
    """
    import torch.distributed.distributed_c10d as c10d

    world, find = c10d._get_default_group(), getattr(c10d, "_get_split_source", None)
    # Torch splits only if the default group is bound to a device. A name that is no number is the
    # program's own or, with use_local_synchronization, a hash: then only the members call.
    if find is None or not world.bound_device_id or not str(given["group_name"]).isdecimal():
        return False
    if getattr(given.get("backend_options"), "lazy_init", False):
        return False
    several = len(inspect.signature(find).parameters) > 1  # from torch 2.15 on
    return find(world, *((given["backend"],) if several else ())) is not None


class TorchEvents:
    """The listener of the hooks in ``torch.distributed`` (:mod:`commlens.capture.init_hooks`).

    Each ``before_...`` gets the arguments of the call by name, and may return a function to call
    after the call: with whether it raised, and its result. Errors of all these are logged, not
    raised, except those of the function that ``before_destroy`` returns.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def before_init(self, given: dict[str, Any]) -> After:
        """``init_process_group`` was called."""
        place = rank_environment.place_of(given)
        if not place.is_pretended:
            from commlens.capture import job_box

            if twin := safely(job_box.twin_of, self.recording.settings, place):
                log.warning("commlens: %s.", twin)
        self.recording.begin(place)
        if not self.recording.is_recording:
            return None
        self.recording.setups.init_began(place.world_size, place.backend, place.meeting or None)
        return self._after_init

    def _after_init(self, raised: bool, _: Any) -> None:
        self.recording.setups.init_ended(raised)
        if not raised:
            self.recording.note_default_group()
            if self.recording.recorder.verifier is not None and self.recording.settings.debug:
                safely(self.recording.recorder.verifier.link)

    def before_new_group(self, given: dict[str, Any]) -> After:
        """A group is about to be made: the default one, one for ``new_group``, or one by a program
        that calls torch's helper by hand.
        """
        import torch.distributed as dist

        ranks = given["global_ranks_in_group"] or ()
        is_default = not dist.is_initialized()
        is_by_hand = not is_default and not ranks
        is_member = is_default or is_by_hand or dist.get_rank() in ranks
        if is_default:
            # for a program that goes past init_process_group, recording begins here
            place = {
                "rank": given["group_rank"],
                "world_size": given["group_size"],
                "backend": str(given["backend"]),
            }
            safely(self.recording.begin, rank_environment.place_of(place))
        if not self.recording.is_recording:
            return None
        if is_default:
            self._default_group_begins(given)
        else:
            self._group_begins(given, ranks)
        from commlens.capture import connections

        before = safely(connections.sockets) if is_member else None

        def after(raised: bool, made: Any) -> None:
            if not is_default:
                self.recording.setups.ended(raised)
            else:
                self.recording.setups.init_ended(raised)
                if not raised:
                    self.recording.initialised = True
                    self.recording.writer.word(L.PHASE, L.PHASE_INITIALISED)
            if is_by_hand and not raised:
                note_by_hand(made[0])
            if before is not None and not raised:
                connections.note(made[0], before)

        return after

    def _default_group_begins(self, given: dict[str, Any]) -> None:
        recording = self.recording
        # Calls of init_process_group do not show that names start again: one may be refused, and
        # init_device_mesh may have imported its name before commlens was switched on.
        recording.recorder.groups.started_again()
        if recording.recorder.verifier is not None:
            recording.recorder.verifier.group_destroyed()
        recording.setups.init_began(given["group_size"], str(given["backend"]), None)

    def _group_begins(self, given: dict[str, Any], ranks: Sequence[int]) -> None:
        """Note a group that is not the default one; ``ranks``: empty if it is made by hand."""
        name, by_hand, splits_world = str(given["group_name"]), None, False
        if ranks:
            splits_world = bool(safely(_splits, given))
        else:
            by_hand = membership(given["group_rank"], given["group_size"], given["store"], name)
        self.recording.setups.group_began(
            name,
            str(given.get("group_desc") or ""),
            ranks,
            str(given["backend"]),
            by_hand,
            splits_world=splits_world,
        )
        safely(self.recording.recorder.hazards.group_made, ranks)

    def backend_registered(self, process_group: Any) -> None:
        """A group has got a backend. For a program that makes groups by hand and never calls
        ``init_process_group``, this is where recording begins, if not before.
        """
        note_backend(process_group)
        size, store = process_group.size(), group_store(process_group)
        self._begin_by_hand(process_group.rank(), size, store, process_group.name())

    def before_gloo(self, given: dict[str, Any]) -> After:
        """The members of a group connect to each other. If the program makes the group by hand, no
        other call tells of it before all have come.
        """
        rank, size, store = given["rank"], given["size"], given["store"]
        self._begin_by_hand(rank, size, store, "gloo")
        if not self.recording.is_recording:
            return None
        setups = self.recording.setups
        setups.group_began("", "", (), "gloo", membership(rank, size, store))
        return lambda raised, _: setups.ended(raised)

    def _begin_by_hand(self, rank: int, size: int, store: Any, backend: str) -> None:
        """Begin recording in a program that has no default group."""
        import torch.distributed as dist

        if self.recording.is_recording or dist.is_initialized() or size < 2:
            return
        place = rank_environment.place_of()
        if place.rank < 0:
            place = PlaceInJob(rank, size, store_name(store))
        self.recording.begin(place._replace(backend=backend))

    def before_mesh(self, given: dict[str, Any]) -> After:
        """``init_device_mesh`` was called."""
        import torch.distributed as dist

        if not self.recording.is_recording:
            return None
        self.recording.setups.mesh_began(
            given["mesh_shape"],
            given.get("mesh_dim_names"),
            dist.get_world_size() if dist.is_initialized() else 0,
        )
        return lambda *_: self.recording.setups.mesh_ended()

    def before_reconfigure(self, given: dict[str, Any]) -> After:
        """A living group gets other members."""
        group, uuid = given["group"], int(given["opts"].uuid)

        def after(raised: bool, _: Any) -> None:
            if not raised:
                note_generation(group, uuid)
                if self.recording.is_recording:
                    self.recording.recorder.groups.reconfigured(group)

        return after

    def before_split(self, given: dict[str, Any]) -> After:
        """``split_group`` was called."""
        import torch.distributed as dist

        if not self.recording.is_recording:
            return None
        parent = given.get("parent_pg") or dist.group.WORLD
        self.recording.setups.split_began(
            dist.get_process_group_ranks(parent), given.get("split_ranks")
        )
        return lambda raised, _: self.recording.setups.ended(raised)

    def before_store_wait(self, op: str, given: dict[str, Any]) -> After:
        """A thread is about to wait for keys in a store."""
        waits = op != "queue_pop" or given.get("second", given.get("block", True))
        return self._while_waiting(f"store.{op}", _keys(given)) if waits else None

    def _while_waiting(self, op: str, keys: Sequence[str], label: str | None = None) -> After:
        """Note that this thread is about to wait in a store."""
        setups = self.recording.setups
        if not self.recording.is_open or not setups.store_wait_began(op, keys, label):
            return None
        return lambda *_: setups.store_wait_ended()

    def before_store_made(self, given: dict[str, Any]) -> After:
        """A ``TCPStore`` is made. A client waits for its server, a server for its clients if it
        knows their number.
        """
        address = [store_address(given.get("host_name"), given.get("port"))]
        if not given.get("is_master", False):
            return self._while_waiting(STORE_CLIENT, address)
        clients = (given.get("world_size") or 0) - 1
        if clients < 1 or not given.get("wait_for_workers", True):
            return None
        return self._while_waiting(STORE_SERVER, address, count(clients, "client"))

    def before_store_write(self, op: str, given: dict[str, Any]) -> After:
        """A thread writes keys into a store; to add 0 only reads one."""
        if self.recording.is_recording and not (op == "add" and given.get("second") == 0):
            self.recording.setups.keys_written(_keys(given))
        return None

    def before_destroy(self, is_last: bool) -> Callable[[], None] | None:
        """``destroy_process_group`` was called, for all groups if ``is_last``. Returns the
        verifier's last check, which may raise a refusal.
        """
        recording = self.recording
        if is_last and recording.before_end is not None:
            safely(recording.before_end)
        if not recording.is_recording:
            return None
        from commlens.tap import torch_patches

        verifier = recording.recorder.verifier
        if is_last:
            safely(recording.report_hazards)
        safely(recording.recorder.sweep)
        safely(recording.recorder.groups.before_destroy)
        # gloo's thread may be waiting for the GIL to free the last op's tensors, and torch 2.6
        # joins that thread with the GIL held: a deadlock of its own (4 of 24 bare runs), to which
        # the sweep would add.
        time.sleep(0.2 if torch_patches.torch_version() < (2, 7) else 0.01)
        return verifier.before_end if verifier is not None else None

    def after_destroy(self) -> None:
        """``destroy_process_group`` returned: after the last group, nobody waits for this
        process.
        """
        import torch.distributed as dist

        if self.recording.is_recording and not dist.is_initialized():
            self.recording.writer.word(L.PHASE, L.PHASE_LEFT)


def _keys(given: dict[str, Any]) -> Sequence[str]:
    keys = given.get("key") or given.get("keys") or ()
    each = [keys] if isinstance(keys, (str, bytes)) else keys
    return [key.decode(errors="replace") if isinstance(key, bytes) else key for key in each]
