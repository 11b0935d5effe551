"""What torch's calls that make and destroy groups mean for the recording of this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from commlens.blackbox import layout as L
from commlens.capture import rank_environment
from commlens.capture.init_hooks import After, NewGroup, safely
from commlens.capture.rank_environment import Place
from commlens.capture.recording import Recording

log = logging.getLogger("commlens")


class TorchEvents:
    """The listener of the hooks in ``torch.distributed``
    (:class:`commlens.capture.init_hooks.InitListener`).
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def before_init(self, place: Place) -> After:
        """``init_process_group`` was called."""
        if not place.is_pretended:
            self._warn_of_twin(place)
        self.recording.begin(place)
        if not self.recording.is_recording:
            return None
        self.recording.setups.init_began(place.world_size, place.backend, place.meeting or None)
        return self._after_init

    def _warn_of_twin(self, place: Place) -> None:
        from commlens.capture import job_box

        if twin := safely(job_box.twin_of, self.recording.settings, place):
            log.warning("commlens: %s.", twin)

    def _after_init(self, raised: bool, _: Any) -> None:
        self.recording.setups.init_ended(raised)
        if not raised:
            self.recording.note_default_group()
            if self.recording.recorder.verifier is not None and self.recording.settings.debug:
                safely(self.recording.recorder.verifier.link)

    def before_new_group(self, group: NewGroup) -> After:
        """A group is about to be made. For a program that goes past ``init_process_group``, this is
        where recording begins.
        """
        import torch.distributed as dist

        recording = self.recording
        is_default = not dist.is_initialized()
        if is_default:
            safely(
                recording.begin,
                rank_environment.place_of(
                    (), {"rank": group.rank, "world_size": group.size, "backend": group.backend}
                ),
            )
        if not recording.is_recording:
            return None
        if is_default:
            # Calls of init_process_group do not show this: one may be refused, and init_device_mesh
            # may have imported its name before commlens was switched on.
            recording.recorder.groups.started_again()
            if recording.recorder.verifier is not None:
                recording.recorder.verifier.group_destroyed()
            recording.setups.init_began(group.size, group.backend, None)
        else:
            recording.setups.group_began(group.name, group.ranks, group.backend, group.description)
        from commlens.capture import connections

        if not is_default:
            safely(recording.recorder.hazards.group_made, group.ranks)
        is_member = is_default or dist.get_rank() in group.ranks
        before = safely(connections.sockets) if is_member else None

        def after(raised: bool, made: Any) -> None:
            (recording.setups.init_ended if is_default else recording.setups.ended)(raised)
            if is_member and not raised:
                if is_default:
                    recording.initialised = True
                    recording.writer.word(L.PHASE, L.PHASE_INITIALISED)
                if before is not None:
                    connections.note(made[0], before)

        return after

    def before_mesh(self, shape: Any, names: Any) -> After:
        """``init_device_mesh`` was called."""
        import torch.distributed as dist

        if not self.recording.is_recording:
            return None
        self.recording.setups.mesh_began(
            shape, names, dist.get_world_size() if dist.is_initialized() else 0
        )
        return lambda *_: self.recording.setups.mesh_ended()

    def before_split(self, parent: Any, split_ranks: Any) -> After:
        """``split_group`` was called."""
        import torch.distributed as dist

        if not self.recording.is_recording:
            return None
        self.recording.setups.split_began(
            dist.get_process_group_ranks(parent or dist.group.WORLD), split_ranks
        )
        return lambda raised, _: self.recording.setups.ended(raised)

    def before_store_wait(self, op: str, keys: Sequence[str]) -> After:
        """A thread is about to wait for keys in a store."""
        if not self.recording.is_open or not self.recording.setups.store_wait_began(op, keys):
            return None
        return lambda *_: self.recording.setups.store_wait_ended()

    def before_store_write(self, keys: Sequence[str]) -> After:
        """A thread writes keys into a store."""
        if self.recording.is_recording:
            self.recording.setups.keys_written(keys)
        return None

    def before_destroy(self, is_last: bool) -> Callable[[], None] | None:
        """``destroy_process_group`` was called, for all groups if ``is_last``. Returns the
        verifier's last check, which may raise a refusal.
        """
        recording = self.recording
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
