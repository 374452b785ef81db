"""DeviceCensus: censuses by name that stay on the device until they are read, then fetched all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ampwise.numbers.census.algebra import Census


class DeviceCensus(Mapping[str, Census]):
    """Censuses of several tensors, by name. Reading any of them syncs with the device, once."""

    def __init__(self, names: Sequence[str], parts: Sequence[Callable[[], Mapping[str, Census]]]) -> None:
        self._names = tuple(names)
        self._parts = tuple(parts)  # each fetches some of the results, in one copy
        self._fetched: dict[str, Census] | None = None

    def fetch(self) -> dict[str, Census]:
        """Copy the results to the host, which syncs with the device; later calls are free.

        Returns:
            the censuses by name.
        """
        if self._fetched is None:
            read: dict[str, Census] = {}
            for part in self._parts:
                read.update(part())
            self._fetched = {name: read[name] for name in self._names}
            self._parts = ()  # frees the device memory
        return self._fetched

    def total(self) -> Census:
        """Return all of them merged into one census; syncs with the device."""
        return sum(self.fetch().values(), Census())

    def grouped(self, group_of: Callable[[str], str]) -> dict[str, Census]:
        """Return censuses merged by group, in order of appearance; per layer, for instance: ``name.split(".")[1]``.

        Args:
            group_of: returns the group of a name.

        Returns:
            the censuses by group.
        """
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
        # For pickling, as to another rank: fetch the results, which syncs with the device.
        return {"_names": self._names, "_parts": (), "_fetched": self.fetch()}

    def __repr__(self) -> str:
        # Printing must not sync with the device.
        where = "not fetched" if self._fetched is None else "fetched"
        return f"<DeviceCensus of {len(self)} tensors, {where}>"
