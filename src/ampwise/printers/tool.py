"""What the outputs say of ampwise itself."""

from __future__ import annotations

__all__ = ["NAME", "installed_version"]

NAME = "ampwise"


def installed_version() -> str | None:
    """The version, or None when ampwise runs from a source folder that was never installed."""
    from importlib import metadata  # slow to import, and few ask

    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None
