"""A line of user code in which a call was made."""

from __future__ import annotations

from dataclasses import dataclass

from ampwise.finding import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A line of user code, and the library the call went through, if any."""

    file: str | None = None
    line: int | None = None
    function: str = ""
    through: str = ""  # "accelerate/optimizer.py:123"
    called_from: str = ""  # the user's line that called the enclosing function: "train.py:30"
    span: tuple[int, int, int] | None = None  # of the call: its column, and the line and column of its end

    @property
    def place(self) -> Place:
        column, end_line, end_column = self.span or (None, None, None)
        return Place(file=self.file, line=self.line, column=column, end_line=end_line, end_column=end_column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(unknown location)"

    @property
    def in_text(self) -> str:
        """The file name without folders, and the line, for a sentence."""
        if not self.file:
            return "an unknown location"
        name = self.file.replace("\\", "/").rpartition("/")[2]
        return f"{name}:{self.line}" if self.line else name

    @property
    def short(self) -> str:
        """Line number only, for a sentence about one file."""
        return f"line {self.line}" if self.line else "an unknown line"
