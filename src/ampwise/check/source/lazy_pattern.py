"""Regular expressions that are compiled at first use: compiling all of them takes longer than a check."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any


class LazyPattern:
    """Regular expression that is compiled at first use.

    Its methods are those of ``re.Pattern``; they are cached, so that later calls are as fast.

    >>> bool(LazyPattern("caler").search("scaler"))
    True
    """

    def __init__(self, text: str, flags: int = 0) -> None:
        self.text, self.flags = text, flags

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.text, self.flags)

    @functools.cached_property
    def search(self) -> Callable[[str], re.Match[str] | None]:
        return self.compiled.search

    @functools.cached_property
    def match(self) -> Callable[[str], re.Match[str] | None]:
        return self.compiled.match

    @functools.cached_property
    def fullmatch(self) -> Callable[[str], re.Match[str] | None]:
        return self.compiled.fullmatch

    @functools.cached_property
    def findall(self) -> Callable[[str], list[Any]]:
        return self.compiled.findall

    @functools.cached_property
    def finditer(self) -> Callable[[str], Iterator[re.Match[str]]]:
        return self.compiled.finditer
