"""A run that goes on from disk: the newest checkpoint that is whole, on all ranks the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ampwise.engine.engine import Engine
from ampwise.engine.precision.policy import Policy
from ampwise.errors import BadInput
from ampwise.evidence.faults import CheckpointDamaged, RanksChanged
from ampwise.guard.agreement import Agreement
from ampwise.guard.changes import Changes
from ampwise.guard.data import epoch_of
from ampwise.guard.disk.catalog import Checkpoint, Damaged, checkpoints, verify
from ampwise.guard.plain import from_json
from ampwise.guard.saving import not_finite
from ampwise.guard.state import Whole
from ampwise.guard.telling import Telling
from ampwise.printers.terminal import printable
from ampwise.trace.ranges import local

__all__ = ["Resumed", "Resuming"]

Resumed = tuple[Checkpoint, dict[str, Any]]


class Resuming:
    """Reads checkpoints of a directory into an engine."""

    def __init__(
        self,
        directory: Path,
        engine: Engine,
        whole: Whole,
        changes: Changes,
        agreement: Agreement,
        telling: Telling,
    ) -> None:
        self._directory, self._engine, self._whole, self._changes = directory, engine, whole, changes
        self._agreement, self._telling = agreement, telling

    def newest(self) -> Resumed | None:
        """Go on from the newest that is whole; None if the directory has none at all.

        One that is damaged is told of. If all are, nothing is begun anew in their place: that is for a person to say.
        """
        found = self._agreement.first_says(self._agreement.each(self._found))
        troubles: list[tuple[str, str]] = []
        for checkpoint in found:
            if checkpoint.undone:
                continue
            trouble = checkpoint.trouble or self._trouble(checkpoint)
            if not trouble:
                try:
                    plain = self.read(checkpoint, resumes=True)
                except Damaged as error:
                    trouble = str(error)
                else:
                    self._tell(troubles, str(checkpoint.path), checkpoint)
                    return checkpoint, plain
            troubles.append((str(checkpoint.path), trouble))
        self._tell(troubles, "", None)
        if troubles:
            raise BadInput(
                f"{self._directory} has {len(troubles)} checkpoints, and none to go on from: {troubles[0][1]} Look: "
                f"`ampwise resume {self._directory} --show`; to begin anew, name another directory."
            )
        return None

    def earlier(self, than: int) -> Resumed | None:
        """Go back to the newest good one of a step before this; None if there is none that is whole.

        The precision stays as it is: it may have been changed since, for a reason.
        """
        try:
            found = self._agreement.first_says(self._agreement.each(self._found))
        except (BadInput, RuntimeError):  # it cannot be listed
            return None
        policy = self._engine.policy
        for checkpoint in found:
            if checkpoint.good and not checkpoint.trouble and checkpoint.step < than:
                try:
                    return checkpoint, self.read(checkpoint, resumes=False)
                except (Damaged, BadInput) as error:  # or it is of another script, which was overridden since
                    self._tell([(str(checkpoint.path), str(error))], "another state", None)
                finally:
                    if self._engine.policy != policy:
                        self._engine.change_precision(policy)
        return None

    def _found(self) -> list[Checkpoint]:
        return checkpoints(self._directory) if self._agreement.rank == 0 else []

    def _trouble(self, checkpoint: Checkpoint) -> str:
        """What is wrong with it, as far as one can tell without loading it. Each rank reads a share of the files."""
        why = ""
        try:
            verify(checkpoint, share=self._agreement.rank, of=self._agreement.size)
        except (Damaged, OSError) as error:
            why = str(error)
        told = enumerate(self._agreement.all_of(why))
        return next((f"rank {rank}: {each}" if rank else each for rank, each in told if each), "")

    def read(self, checkpoint: Checkpoint, *, resumes: bool) -> dict[str, Any]:
        """Put all of it in place: tensors, and the rest, which is returned.

        In pieces that all ranks do or none, as tensors are read together. Damaged if there is no going on from it.
        resumes: by a script that may have changed since, and not by a run that goes back.
        """
        from ampwise.guard.disk.reading import read_into

        agreement = self._agreement
        plain, room, own, policy = agreement.each(lambda: self._prepared(checkpoint, resumes=resumes))
        read_into(checkpoint, room, agreement.reading)
        bad = next(filter(None, agreement.all_of(self._not_finite(room))), "")
        if bad:
            raise Damaged(f"{checkpoint.path.name} has {bad} with inf or NaN in it.")
        if checkpoint.world_size != agreement.size:
            self._telling.tell(RanksChanged(before=checkpoint.world_size, after=agreement.size), checkpoint.step)
            plain["engine"]["rng"] = self._engine.state_dict()["rng"]  # each its own: those of others are not
            plain["data"] = epoch_of(plain["data"])
        values = {name: local(each) for name, each in room.items() if name not in own}
        agreement.each(lambda: self._whole.put_back_plain(plain, values))
        if own:
            more = f" and {len(own) - 1} others" if len(own) > 1 else ""
            self._telling.say(
                f"{own[0]}{more}: of another shape or dtype in {checkpoint.path.name}, or only there or here; as they "
                "are not persistent, the model keeps its own"
            )
        if policy is not None:
            agreement.each(lambda: self._take_precision(policy))
        return plain

    def _prepared(
        self, checkpoint: Checkpoint, *, resumes: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor], list[str], Policy | None]:
        """The plain part, room for tensors, names of buffers that the model keeps its own of, and the precision to go
        on in when they are in place."""
        from ampwise.guard.disk.reading import read_plain, stored_tensors
        from ampwise.guard.received import checked_state

        try:
            stored = stored_tensors(checkpoint)
            plain = from_json(read_plain(checkpoint, self._agreement.rank))
            plain = checked_state(plain, stored, self._whole.parameters(), self._engine.optimizers)
            policy = self._changes.precision(plain) if resumes else None
            self._take_precision(Policy.from_dict(plain["engine"]["policy"]))
            trained = [rest.get("state", {}).keys() for rest in self._whole.live().plain["optimizers"]]
            self._changes.settle(plain, trained)
            return plain, *self._whole.prepare(plain, stored), policy
        except Damaged:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadInput(printable(f"{checkpoint.path} cannot be gone on from: {error}")) from error

    def _not_finite(self, tensors: dict[str, Tensor]) -> str:
        """The first weight that is not to be gone on with."""
        live = self._whole.live()
        ours = {name: local(tensor) for name, tensor in tensors.items() if name not in live.transient}
        return next(iter(not_finite(ours, live.moving)), "")

    def _take_precision(self, policy: Policy) -> None:
        if policy != self._engine.policy:
            self._engine.change_precision(policy)

    def _tell(self, troubles: Sequence[tuple[str, str]], instead: str, used: Checkpoint | None) -> None:
        for path, why in troubles:
            self._telling.tell(CheckpointDamaged(path=path, why=why, instead=instead), 0 if used is None else used.step)
