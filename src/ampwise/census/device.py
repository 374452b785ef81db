"""DeviceCensus: results by name that stay on the device until someone asks, fetched all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ampwise.census.algebra import Census

__all__ = ["DeviceCensus"]


class DeviceCensus(Mapping[str, Census]):
    """The censuses of several tensors, by name. Looking at any of them waits for the device, once."""

    def __init__(self, names: Sequence[str], parts: Sequence[Callable[[], Mapping[str, Census]]]) -> None:
        self._names = tuple(names)
        self._parts = tuple(parts)  # each brings some of the results to the host, in one copy
        self._fetched: dict[str, Census] | None = None

    def fetch(self) -> dict[str, Census]:
        """Copy the results to the host and wait for the copy; later calls are free."""
        if self._fetched is None:
            read: dict[str, Census] = {}
            for part in self._parts:
                read.update(part())
            self._fetched = {name: read[name] for name in self._names}
            self._parts = ()  # the device memory can go
        return self._fetched

    def total(self) -> Census:
        """All of them as one census; waits for the device like any other look."""
        return sum(self.fetch().values(), Census())

    def grouped(self, group_of: Callable[[str], str]) -> dict[str, Census]:
        """Merged by group, in the order in which groups appear: per layer, say, from ``name.split(".")[1]``."""
        groups: dict[str, Census] = {}
        for name, census in self.fetch().items():
            groups[group_of(name)] = groups.get(group_of(name), Census()) + census
        return groups

    def __getitem__(self, name: str) -> Census:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getstate__(self) -> dict[str, object]:
        # To another rank, say: what travels are the results, so this waits for the device.
        return {"_names": self._names, "_parts": (), "_fetched": self.fetch()}

    def __repr__(self) -> str:
        # Printing must not wait for the device.
        where = "not fetched" if self._fetched is None else "fetched"
        return f"<DeviceCensus of {len(self)} tensors, {where}>"
