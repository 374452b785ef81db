"""Messages of the library: to the logger "ampwise", or to stderr while the program has not configured logging.

Commands do not use this: they write through ``ampwise.finding.terminal``.
"""

from __future__ import annotations

import contextlib

from ampwise.finding.terminal import printable, printable_lines, say

_SAID: set[str] = set()  # by log_once, in this process


def log(level: str, template: str, *fields: object) -> None:
    """Log a line: level is "info", "warning" or "error"; ``template`` is trusted, the fields need not be.

    While no handler is configured it goes to stderr, unless the logger's level is higher. A stream that cannot be
    written, such as a log on a full disk, does not stop the training.
    """
    shown = (field if isinstance(field, (int, float)) else printable(str(field)) for field in fields)
    message = template.format(*shown)
    if not log_if_configured(level, message):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            say("ampwise: {}", message)


def log_once(level: str, message: str) -> None:
    """Log a message unless this process has logged it before."""
    if message not in _SAID:
        _SAID.add(message)
        log(level, "{}", message)


def log_if_configured(level: str, message: str) -> bool:
    """Log a text if the program has configured logging; False if it has not, and the text should go to stderr."""
    import logging  # slow to import, and rarely needed

    logger, number = logging.getLogger("ampwise"), logging.getLevelNamesMapping()[level.upper()]
    if logger.hasHandlers():
        logger.log(number, "%s", printable_lines(message).rstrip("\n"))
        return True
    return number < logger.level
