"""The run's position in its data, if it uses guard.batches(), and the batches that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps
from ampwise.guard.resumable_data import ResumableData, epoch_start
from ampwise.runs.files import read_json, write_atomically

__all__ = ["BatchIndex", "DataPosition"]

BatchIndex = tuple[int, int]  # epoch, and index of the batch in it

PASSED_OVER = "passed_over.json"
LARGEST = 16_000_000  # bytes
STEPS_KEPT = 256


class DataPosition:
    """Position in one loader. Without guard.batches() the user iterates the data, and nothing is restored."""

    def __init__(self, directory: Path, *, writes: bool, log: Callable[[str], None], override: bool = False) -> None:
        self._path, self._writes, self._log, self._override = directory / PASSED_OVER, writes, log, override
        self._resumed = self._reported_unused = False
        self._data: ResumableData | None = None
        self._pending: Any = None  # position to restore once there is a loader
        self._microbatches: list[BatchIndex] = []
        self._batches_by_step: dict[int, tuple[BatchIndex, ...]] = {}
        self.passed_over: list[BatchIndex] = []
        self.fetched = 0  # batches fetched by this process

    def begin(self) -> None:
        """Read which batches an earlier run has left out."""
        if self._path.exists():
            self.passed_over = _read(self._path)

    def hand_out(self, loader: Any, epochs: int | None) -> Iterator[tuple[BatchIndex, Any]]:
        """Iterate over a loader's batches with their places, from where a resumed run stopped."""
        if self._data is not None:
            raise BadInput(
                "guard.batches() was already called. It iterates over all epochs of one loader, so that a run can "
                "resume there: call it once with epochs=..."
            )
        self._data = ResumableData(loader, epochs=epochs)
        if self._pending is not None:
            self._go_on(self._data, self._pending)
            self._pending = None
        elif self._resumed:
            self._log("the checkpoint has no position in the data, which starts at its first batch")
        if self.passed_over:
            self._log(
                f"{self._count()} that failed before will be left out; to train on them again, remove {self._path}"
            )
        self._data.pass_over(self.passed_over)
        return self._placed(self._data)

    def _go_on(self, data: ResumableData, position: Any) -> None:
        """Continue from a position; or from the start of its epoch, if the data has changed."""
        epoch = epoch_start(position)
        if position != epoch:
            try:
                # The file decides which batches to leave out: the user may have removed it.
                data.go_to(position | {"passed_over": self.passed_over} if isinstance(position, dict) else position)
            except BadInput as error:
                if not self._override or epoch is None:
                    raise BadInput(
                        f"{error} To start its epoch over with this loader: Guard(override=['data'])."
                    ) from error
            else:
                if lost := data.unrestored:
                    names = ", ".join(lost)
                    self._log(f"the order of the data differs from now on: the random state of {names} is not saved")
                return
        data.go_to(epoch)
        self._log(f"the data has changed: continuing at the start of epoch {epoch['epoch'] + epoch['over']}")
        if self.passed_over:
            self._log(f"{self._count()} that failed before will be used again: batches have other numbers now")
            self.passed_over = []
            self._write()

    def _count(self) -> str:
        return "1 batch" if len(self.passed_over) == 1 else f"{len(self.passed_over):,} batches"

    def _placed(self, data: ResumableData) -> Iterator[tuple[BatchIndex, Any]]:
        for batch in data:
            self.fetched += 1
            yield (data.epoch, data.index), batch

    def remaining(self) -> Iterator[tuple[BatchIndex, Any]] | None:
        """Iterate over batches that follow after a rollback at the end of the data; None if there was no rollback."""
        return None if self._data is None or self._data.finished else self._placed(self._data)

    def taken(self, place: BatchIndex) -> None:
        """Record a batch that the user receives."""
        self._microbatches.append(place)

    def closed(self, step: int) -> None:
        """Assign the batches since the last step to this step."""
        if self._data is None and self._pending is not None and not self._reported_unused:
            self._reported_unused = True
            self._log("the checkpoint has a position in the data; only guard.batches(loader) can continue from it")
        self._batches_by_step[step] = tuple(self._microbatches)
        self._microbatches.clear()
        if len(self._batches_by_step) > STEPS_KEPT:
            del self._batches_by_step[next(iter(self._batches_by_step))]

    def batches_of(self, steps: Iterable[int]) -> list[BatchIndex]:
        return [place for step in steps for place in self._batches_by_step.get(step, ())]

    def state(self) -> Any:
        """Return the position to save; None if the user iterates the data, or has not started yet."""
        return self._pending if self._data is None else self._data.position()

    def resume(self, position: Any) -> None:
        """Continue from the position in a checkpoint, if it has one."""
        self._resumed = True
        self.go_to(position)

    def go_to(self, position: Any) -> None:
        """Go to a position if the data can be rewound; else continue from the current one."""
        self._microbatches.clear()
        if position is None:
            return
        if self._data is None:
            self._pending = position
        elif self._data.rewinds:
            self._data.go_to(position)

    def pass_over(self, places: Sequence[BatchIndex]) -> bool:
        """Leave these batches out, also in a resumed run; return whether the data can be rewound to do so."""
        rewound = self._data is not None and self._data.rewinds
        if places and self._data is not None:
            self.passed_over = list(dict.fromkeys([*self.passed_over, *places]))
            self._data.pass_over(places)
            self._write()
        return rewound

    def _write(self) -> None:
        if not self._writes:
            return
        try:
            write_atomically(self._path, [dumps({"passed_over": self.passed_over}).encode()])
        except OSError as error:  # training continues; a resumed run will see them again
            self._log(f"{self._path} cannot be written: {error.strerror or error}")

    @property
    def epoch(self) -> int:
        return 0 if self._data is None else self._data.epoch


def _read(path: Path) -> list[BatchIndex]:
    def count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    try:
        places = read_json(path, LARGEST)["passed_over"]
        if not all(isinstance(place, list) and len(place) == 2 and all(map(count, place)) for place in places):
            raise ValueError("expected pairs of an epoch and an index")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} cannot be read ({error}). It lists the batches to leave out; remove it to use them again."
        ) from error
    return [(epoch, index) for epoch, index in places]
