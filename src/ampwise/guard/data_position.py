"""The position of a run in its data, which can be saved and restored, in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps
from ampwise.guard.data_sources import DataPlace, batches_per_epoch, set_epoch, source_of, unsaveable
from ampwise.runs.files import read_json, write_atomically
from ampwise.runs.json_lines import is_count

BatchIndex = tuple[int, int]  # epoch, and index of the batch in it

KEYS = {"kind", "batches", "epoch", "done", "over", "passed_over", "state"}
EPOCH_KEYS = {"epoch", "over"}
PASSED_OVER = "passed_over.json"
LARGEST = 16_000_000  # bytes
STEPS_KEPT = 256


class ResumableData:
    """Batches of a loader, epoch after epoch, in one loop.

    A loop that is left (for an evaluation, for example) and started again continues with the next batch. ``go_to`` may
    be called inside the loop, which then continues from that position.

    >>> data = ResumableData([10, 11, 12], epochs=2)
    >>> batches = iter(data)
    >>> next(batches), next(batches)
    (10, 11)
    >>> after_two = data.position()
    >>> list(batches)
    [12, 10, 11, 12]
    >>> data.go_to(after_two)
    >>> data.pass_over([(1, 0)])
    >>> list(data)
    [12, 11, 12]

    epochs: how many epochs to iterate; None: no end.

    After a restart the batches are the same bit for bit, if the random state of the process is restored, too, as Guard
    does; the generators of samplers, datasets and transforms are restored here. Two exceptions: numbers that
    the workers of a StatefulDataLoader draw are not part of its state, and generators listed in ``unrestored``.
    """

    def __init__(self, loader: Any, *, epochs: int | None = 1) -> None:
        if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
            raise BadInput(f"Data(epochs={epochs!r}): expected a whole number, 1 or more, or None for no end.")
        self._loader, self._epochs = loader, epochs
        self._source = source_of(loader)
        self.rewinds = self._source.rewinds  # whether ``go_to`` can go back; a one-shot iterator cannot
        if not self.rewinds and epochs not in (1, None):
            raise BadInput(
                f"Data(epochs={epochs}): a {type(loader).__name__} can be iterated only once. "
                "Give a loader, a list, or an object whose __iter__ starts over."
            )
        self._place = DataPlace(epoch=0, done=0, over=False)
        self._passed_over: set[BatchIndex] = set()
        self._iterator: Iterator[Any] | None = None  # of the current epoch
        self._in_loop = False
        self.finished = False  # all epochs are over, and no ``go_to`` came after

    @property
    def epoch(self) -> int:
        """Epoch of the batch that was yielded last, from 0."""
        return self._place.epoch

    @property
    def index(self) -> int:
        """Index in its epoch of the batch that was yielded last, from 0; -1 before the first."""
        return self._place.done - 1

    @property
    def unrestored(self) -> Sequence[str]:
        """Generators in the loader whose random numbers differ after the last ``go_to``."""
        return [*unsaveable(self._loader), *self._source.unrestored]

    @property
    def passed_over(self) -> tuple[BatchIndex, ...]:
        """Batches that are left out, as (epoch, index)."""
        return tuple(sorted(self._passed_over))

    def pass_over(self, batches: Iterable[BatchIndex]) -> None:
        """Leave these batches out, now and after ``go_to``; positions saved from now on include them."""
        self._passed_over.update(_pairs(batches))

    # The loop

    def __iter__(self) -> Iterator[Any]:
        self._refuse_second_loop()
        if self.finished:
            raise BadInput(
                f"this Data is used up: {self._epochs} of {self._epochs} epochs. "
                "Data(loader, epochs=n) has all epochs in one loop; go_to(position) goes back."
            )
        return self._batches()

    def _refuse_second_loop(self) -> None:
        if self._in_loop:
            raise BadInput("a loop over this Data is already running. A second loop at a time needs its own Data.")

    def _batches(self) -> Iterator[Any]:
        self._refuse_second_loop()  # two iterators were made before either was used
        self._in_loop = True
        try:
            while True:
                if self._place.over:
                    if not self.rewinds or self.epoch + 1 == self._epochs:
                        break
                    self._place = DataPlace(epoch=self.epoch + 1, done=0, over=False)
                if self._iterator is None:
                    self._iterator = self._source.begin(self.epoch)
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    self._iterator = None
                    if self._place.done == 0:
                        raise BadInput(
                            f"the {type(self._loader).__name__} yielded no batch in epoch {self.epoch}. "
                            "It is empty, smaller than a batch (drop_last=True), or can be iterated only once."
                        ) from None
                    self._place = self._place._replace(over=True)
                    continue
                self._place = self._place._replace(done=self._place.done + 1)
                if (self.epoch, self.index) not in self._passed_over:
                    yield batch
            self.finished = True
        finally:
            self._in_loop = False

    # The position

    def position(self) -> dict[str, Any]:
        """Return the current position as data for ``to_json``; after ``go_to`` the next batch is the one that is next
        now."""
        return {
            "kind": self._source.kind,
            "batches": batches_per_epoch(self._loader),
            **self._place._asdict(),
            "passed_over": [list(batch) for batch in self.passed_over],
            "state": self._source.state(self._place.done),
        }

    def go_to(self, position: Any) -> None:
        """Continue from a position. The random state of the process does not change.

        Raise BadInput for an invalid position, one in other data, or an earlier one in an iterator that cannot go back.
        A position from ``epoch_start`` fits any data.
        """
        if isinstance(position, Mapping) and set(position) == EPOCH_KEYS:
            if not (is_count(position["epoch"]) and isinstance(position["over"], bool)):
                raise BadInput("not a position in data: its epoch is not a number.")
            self._iterator, self.finished = None, False
            self._place = DataPlace(position["epoch"], done=0, over=position["over"])
            return
        if not isinstance(position, Mapping) or set(position) != KEYS or not isinstance(position["state"], Mapping):
            raise BadInput("not a position in data. Data.position() returns one.")
        place = DataPlace(position["epoch"], position["done"], position["over"])
        if not (is_count(place.epoch) and is_count(place.done) and isinstance(place.over, bool)):
            raise BadInput("not a position in data: its epoch or its batch is not a number.")
        passed_over = _pairs(position["passed_over"])
        kind = self._source.kind
        if position["kind"] != kind:
            raise BadInput(f"the position is in data of another kind: got {position['kind']!r:.40}, expected {kind!r}.")
        if not self.rewinds and place.done < self._place.done:
            raise BadInput(
                f"a {type(self._loader).__name__} cannot go back from batch {self._place.done:,} to {place.done:,}. "
                "Data(...) of a loader, a list, or an object whose __iter__ starts over can."
            )
        set_epoch(self._loader, place.epoch)  # the length of some samplers depends on it
        batches = batches_per_epoch(self._loader)
        set_epoch(self._loader, self.epoch)
        if position["batches"] != batches:
            saved, here = (
                f"{count:,} batches" if isinstance(count, int) else "unknown batches"
                for count in (position["batches"], batches)
            )
            raise BadInput(
                f"the position is in data of {saved} an epoch, and this has {here}: "
                "use the same loader (dataset, batch size, number of ranks), or start over."
            )
        self._iterator = _Lost()  # until go_to succeeds; also ends the previous iterator's workers
        self._iterator = self._source.go_to(place, position["state"])
        self._place = place
        self._passed_over.update(passed_over)
        self.finished = False


class _Lost:
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise BadInput("the position in the data was lost when go_to failed. Go to another position, or start over.")


def epoch_start(position: Any) -> Any:
    """Return the start of a position's epoch, which is valid for data with different batches; None if unknown."""
    known = isinstance(position, Mapping) and set(position) >= EPOCH_KEYS
    return {key: position[key] for key in sorted(EPOCH_KEYS)} if known else None


def _pairs(batches: Any) -> list[BatchIndex]:
    try:
        pairs = [(epoch, index) for epoch, index in batches]
    except (TypeError, ValueError):
        pairs = [(-1, -1)]
    if not all(is_count(epoch) and is_count(index) for epoch, index in pairs):
        raise BadInput("batches to leave out: expected pairs of an epoch and an index, both from 0.")
    return pairs


class DataPosition:
    """Position in the loader of guard.batches(), and the batches that the run leaves out.

    Without guard.batches() the user iterates the data, and nothing is restored.
    """

    def __init__(self, directory: Path, *, writes: bool, log: Callable[[str], None], override: bool = False) -> None:
        self._path, self._writes, self._log, self._override = directory / PASSED_OVER, writes, log, override
        self._resumed = self._reported_unused = False
        self._data: ResumableData | None = None
        self._pending: Any = None  # position to restore once there is a loader
        self._microbatches: list[BatchIndex] = []
        self._batches_by_step: dict[int, tuple[BatchIndex, ...]] = {}
        self.passed_over: list[BatchIndex] = []
        self.fetched = 0  # batches fetched by this process

    @property
    def is_used(self) -> bool:
        """Whether guard.batches() hands out the data."""
        return self._data is not None

    def begin(self) -> None:
        """Read which batches an earlier run has left out."""
        if not self._path.exists():
            return
        try:
            self.passed_over = _pairs(read_json(self._path, LARGEST)["passed_over"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{self._path} cannot be read ({error}). It lists the batches to leave out; remove it to use them "
                "again."
            ) from error

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

    @property
    def index(self) -> int:
        return -1 if self._data is None else self._data.index
