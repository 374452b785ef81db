"""Where a run is in its data, if the guard hands it out; and which batches it is to pass over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.guard.data import Data, epoch_of
from ampwise.record.files import read_json, write_aside
from ampwise.strict_json import dumps

__all__ = ["Place", "Position"]

Place = tuple[int, int]  # epoch, and number of the batch in it

PASSED_OVER = "passed_over.json"
LARGEST = 16_000_000  # bytes
STEPS_KEPT = 256


class Position:
    """Of one loader. Until there is one, the data is the user's own, and goes on as it does."""

    def __init__(self, directory: Path, *, writes: bool, say: Callable[[str], None], override: bool = False) -> None:
        self._path, self._writes, self._say, self._override = directory / PASSED_OVER, writes, say, override
        self._resumed = self._said_unused = False
        self._data: Data | None = None
        self._waiting: Any = None  # a position to go to, when there is a loader
        self._window: list[Place] = []
        self._of_steps: dict[int, tuple[Place, ...]] = {}
        self.passed_over: list[Place] = []
        self.fetched = 0  # batches, by this process

    def begin(self) -> None:
        """What an earlier run has passed over is passed over again."""
        if self._path.exists():
            self.passed_over = _read(self._path)

    def hand_out(self, loader: Any, epochs: int | None) -> Iterator[tuple[Place, Any]]:
        """Batches of a loader, from where a resumed run was."""
        if self._data is not None:
            raise BadInput(
                "guard.batches() was called before: it hands out all epochs of one loader, so that a resumed run knows "
                "where it was. Give it epochs=..., and loop over it once."
            )
        self._data = Data(loader, epochs=epochs)
        if self._waiting is not None:
            self._go_on(self._data, self._waiting)
            self._waiting = None
        elif self._resumed:
            self._say("the checkpoint has no place in the data, which begins with its first batch")
        if self.passed_over:
            self._say(
                f"{self._count()} that failed before will be passed over; to train on them again, remove {self._path}"
            )
        self._data.pass_over(self.passed_over)
        return self._placed(self._data)

    def _go_on(self, data: Data, position: Any) -> None:
        """From there; or, where its batches have other numbers now, from the beginning of its epoch."""
        epoch = epoch_of(position)
        if position != epoch:
            try:
                # Passed over is what the file has: a person may have removed it.
                data.go_to(position | {"passed_over": self.passed_over} if isinstance(position, dict) else position)
            except BadInput as error:
                if not self._override or epoch is None:
                    raise BadInput(f"{error} To begin its epoch with this loader: Guard(override=['data']).") from error
            else:
                if lost := data.unrestored:
                    names = ", ".join(lost)
                    self._say(f"the order of the data differs from now on: the random numbers of {names} are not saved")
                return
        data.go_to(epoch)
        self._say(f"the data is not as it was: it goes on at the beginning of epoch {epoch['epoch'] + epoch['over']}")
        if self.passed_over:
            self._say(f"{self._count()} that failed before will be used: batches have other numbers now")
            self.passed_over = []
            self._write()

    def _count(self) -> str:
        return "1 batch" if len(self.passed_over) == 1 else f"{len(self.passed_over):,} batches"

    def _placed(self, data: Data) -> Iterator[tuple[Place, Any]]:
        for batch in data:
            self.fetched += 1
            yield (data.epoch, data.index), batch

    def rest(self) -> Iterator[tuple[Place, Any]] | None:
        """Batches that are there again after going back from the end of the data; None if nothing went back."""
        return None if self._data is None or self._data.gone_over else self._placed(self._data)

    def taken(self, place: Place) -> None:
        """A batch is handed to the user."""
        self._window.append(place)

    def closed(self, step: int) -> None:
        """Those since the last step were this step's."""
        if self._data is None and self._waiting is not None and not self._said_unused:
            self._said_unused = True
            self._say("the checkpoint has a place in the data, which only guard.batches(loader) goes on from")
        self._of_steps[step] = tuple(self._window)
        self._window.clear()
        if len(self._of_steps) > STEPS_KEPT:
            del self._of_steps[next(iter(self._of_steps))]

    def batches_of(self, steps: Iterable[int]) -> list[Place]:
        return [place for step in steps for place in self._of_steps.get(step, ())]

    def state(self) -> Any:
        """None where the data is the user's own, or not there yet."""
        return self._waiting if self._data is None else self._data.position()

    def resume(self, position: Any) -> None:
        """The place that a checkpoint has, if any."""
        self._resumed = True
        self.go_to(position)

    def go_to(self, position: Any) -> None:
        """As far as the data can be rewound; if not, it goes on from where it is."""
        self._window.clear()
        if position is None:
            return
        if self._data is None:
            self._waiting = position
        elif self._data.rewinds:
            self._data.go_to(position)

    def pass_over(self, places: Sequence[Place]) -> bool:
        """From now on, and in a run that is resumed. Whether the data was rewound, so that it matters."""
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
            write_aside(self._path, [dumps({"passed_over": self.passed_over}).encode()])
        except OSError as error:  # training goes on; a resumed run meets them again
            self._say(f"{self._path} could not be written: {error.strerror or error}")

    @property
    def epoch(self) -> int:
        return 0 if self._data is None else self._data.epoch


def _read(path: Path) -> list[Place]:
    def count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    try:
        places = read_json(path, LARGEST)["passed_over"]
        if not all(isinstance(place, list) and len(place) == 2 and all(map(count, place)) for place in places):
            raise ValueError("it has places that are none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} cannot be read ({error}): it says which batches to pass over. Remove it to forget them."
        ) from error
    return [(epoch, index) for epoch, index in places]
