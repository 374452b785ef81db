"""The name and version of ampwise, for output formats."""

from __future__ import annotations

NAME = "ampwise"


def installed_version() -> str | None:
    """Return the version, or None if ampwise runs from a source folder that was never installed."""
    from importlib import metadata  # slow to import, and rarely needed

    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None
