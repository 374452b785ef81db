"""Resume a run from the newest complete checkpoint, the same one on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.guard.checkpointing import GuardedRun, non_finite_tensors
from ampwise.guard.data_position import epoch_start
from ampwise.guard.disk.catalog import SavedCheckpoint, checkpoints
from ampwise.guard.disk.manifest import DamagedCheckpoint
from ampwise.guard.events import CheckpointDamaged, RanksChanged
from ampwise.guard.script_changes import ScriptChanges
from ampwise.runs.plain_data import from_json
from ampwise.trace.value_ranges import local_shard
from ampwise.train.precision.policy import Policy

if TYPE_CHECKING:
    from ampwise.guard.disk.reading import CheckpointReader

LoadedCheckpoint = tuple[SavedCheckpoint, dict[str, Any]]


class CheckpointLoader:
    """Loads checkpoints from a directory into an engine."""

    def __init__(self, run: GuardedRun, changes: ScriptChanges) -> None:
        self._directory, self._engine, self._training_state, self._agreement, self._reporter = run
        self._changes = changes

    def newest(self) -> LoadedCheckpoint | None:
        """Load the newest complete checkpoint; return None if the directory has no checkpoints.

        Damaged checkpoints are reported. If all are damaged, raise BadInput: starting over is the user's decision.
        """
        found = self._agreement.broadcast(self._agreement.run_on_all(self._found))
        troubles: list[tuple[str, str]] = []
        policy = self._engine.policy
        for checkpoint in found:
            if checkpoint.undone:
                continue
            trouble = checkpoint.trouble
            if not trouble:
                try:
                    plain = self.read(checkpoint, resumes=True)
                except DamagedCheckpoint as error:
                    trouble = str(error).removeprefix(f"{checkpoint.path} cannot be read: ")
                    self._set_precision(policy)
                else:
                    self._report(troubles, str(checkpoint.path))
                    return checkpoint, plain
            troubles.append((str(checkpoint.path), trouble))
        self._report(troubles, "")
        if troubles:
            raise BadInput(
                f"{self._directory} has {len(troubles)} checkpoints, and none can be resumed: {troubles[0][1]} List "
                f"them: `ampwise checkpoints {self._directory} -v`; to start over, name another directory."
            )
        return None

    def earlier(self, than: int) -> LoadedCheckpoint | None:
        """Load the newest good checkpoint from before a step; None if there is no complete one.

        The precision does not change: the guard may have widened it since for a reason.
        """
        try:
            found = self._agreement.broadcast(self._agreement.run_on_all(self._found))
        except (BadInput, RuntimeError):  # the directory cannot be listed
            return None
        policy = self._engine.policy
        for checkpoint in found:
            if checkpoint.good and not checkpoint.trouble and checkpoint.step < than:
                try:
                    return checkpoint, self.read(checkpoint, resumes=False)
                except (DamagedCheckpoint, BadInput) as error:  # or another script saved it, before an override
                    self._report([(str(checkpoint.path), str(error))], "another state")
                finally:
                    if self._engine.policy != policy:
                        self._engine.change_precision(policy)
        return None

    def _found(self) -> list[SavedCheckpoint]:
        return checkpoints(self._directory) if self._agreement.rank == 0 else []

    def read(self, checkpoint: SavedCheckpoint, *, resumes: bool) -> dict[str, Any]:
        """Load a checkpoint, and return its plain state; raise Damaged if it cannot be used.

        Each part succeeds on all ranks or fails on all, because they read tensors together.
        resumes: True if a script resumes, which may have changed since; False for a rollback in the same run.
        """
        agreement = self._agreement
        reader, plain, targets, kept_buffers, policy, changes = agreement.run_on_all(
            lambda: self._prepared(checkpoint, resumes=resumes)
        )
        reader.read_into(targets, agreement.reading)
        live = self._training_state.live()
        checked = {name: local_shard(tensor) for name, tensor in targets.items() if name not in live.transient}
        here = next(iter(non_finite_tensors(checked, live.moving)), "")
        bad = next(filter(None, agreement.gather(here)), "")
        if bad:
            raise DamagedCheckpoint(f"{checkpoint.path.name} has inf or NaN in {bad}.")
        if checkpoint.world_size != agreement.size:
            self._reporter.report(RanksChanged(before=checkpoint.world_size, after=agreement.size))
            plain["engine"]["rng"] = self._engine.state_dict()["rng"]  # each rank keeps its own
            plain["data"] = epoch_start(plain["data"])
        for line in changes:
            self._reporter.log(line)
        values = {name: local_shard(each) for name, each in targets.items() if name not in kept_buffers}
        agreement.run_on_all(lambda: self._training_state.restore_plain(plain, values))
        if kept_buffers:
            more = f" and {len(kept_buffers) - 1} others" if len(kept_buffers) > 1 else ""
            self._reporter.log(
                f"{kept_buffers[0]}{more}: different in {checkpoint.path.name} in shape or dtype, or missing there or "
                "here. These buffers are not persistent, so the model keeps its own"
            )
        if policy is not None:
            agreement.run_on_all(lambda: self._set_precision(policy))
        return plain

    def _prepared(
        self, checkpoint: SavedCheckpoint, *, resumes: bool
    ) -> tuple[CheckpointReader, dict[str, Any], dict[str, Tensor], list[str], Policy | None, list[str]]:
        """Return the reader, the plain state, tensors to read into, names of buffers that the model keeps, the
        precision to continue in after loading, and what to print about changes of the script."""
        from ampwise.guard.disk.reading import CheckpointReader
        from ampwise.guard.state_validation import validate_state

        try:
            reader = CheckpointReader(checkpoint)
            stored = reader.stored()
            plain = from_json(reader.plain(self._agreement.rank))
            plain = validate_state(plain, stored, self._training_state.parameters(), self._engine.optimizers)
            policy, changes = self._changes.precision(plain) if resumes else (None, [])
            self._set_precision(Policy.from_dict(plain["engine"]["policy"]))
            trained = [each.get("state", {}).keys() for each in self._training_state.live().plain["optimizers"]]
            changes += self._changes.settle(plain, trained)
            targets, kept_buffers = self._training_state.prepare(plain, stored)
            return reader, plain, targets, kept_buffers, policy, changes
        except DamagedCheckpoint:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadInput(printable(f"{checkpoint.path} cannot be resumed: {error}")) from error

    def _set_precision(self, policy: Policy) -> None:
        if policy != self._engine.policy:
            self._engine.change_precision(policy)

    def _report(self, troubles: Sequence[tuple[str, str]], instead: str) -> None:
        for path, why in troubles:
            self._reporter.report(CheckpointDamaged(path=path, why=why, instead=instead))
