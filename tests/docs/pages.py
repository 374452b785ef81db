"""Pages whose examples run: what is shown is done, in order and in one folder, and what is said to come out does.

- A fence of Python is run; the names it makes are there for the next one of the page. A fence of ``text`` right below
  it is what it prints.
- In a fence of ``console``, each ``$ ampwise …`` and ``$ python …`` is run; the lines below are what it says.
- ``<!-- file: train.py -->`` above a fence: it is that file. Above a ``diff``: that file is changed so.
- ``<!-- not run: the reason -->`` above a fence: it is only compiled, or only parsed.

In what is shown, ``…`` stands for anything: on a line of its own for any lines, else for the rest or a part of a line.
Numbers with a point and at most four digits may differ by a few percent: another processor sums in another order.
"""

import contextlib
import io
import re
import shlex
from dataclasses import dataclass

FENCE = re.compile(
    r"(?:^<!-- (?P<note>(?:file|not run): .*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
NUMBER = r"-?\d+\.\d+(?:e[+-]?\d+)?"
TOLERANCE, EXACT = 0.05, 5  # relative; from so many digits on
RUN = ("ampwise", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A fence of a page."""

    language: str
    text: str
    line: int
    follows: bool  # nothing but blank lines since the fence before
    file: str | None
    not_run: str | None


def pieces(page):
    """The fences of a page, in order."""
    text, end, found = page.read_text(encoding="utf-8"), 0, []
    for match in FENCE.finditer(text):
        kind, _, rest = (match["note"] or "").partition(": ")
        found.append(
            Piece(
                language=match["language"],
                text=match["text"],
                line=text.count("\n", 0, match.start("language")) + 1,
                follows=bool(found) and not text[end : match.start()].strip(),
                file=rest if kind == "file" else None,
                not_run=rest if kind == "not run" else None,
            )
        )
        end = match.end()
    return found


def commands(piece):
    """The commands of a fence, each with what is shown below it."""
    for part in re.split(r"^\$ ", piece.text, flags=re.M)[1:]:
        command, _, shown = part.partition("\n")
        yield shlex.split(command, comments=True), shown


def is_as_shown(shown, real):
    """Whether the real output is what a page shows."""
    if not shown.strip():
        return True
    pattern, numbers = _pattern(shown)
    match = re.fullmatch(pattern, _trimmed(real))
    return bool(match) and all(_is_near(*pair) for pair in zip(numbers, match.groups(), strict=True))


def _pattern(shown):
    parts, numbers = [], []
    for part in re.split(rf"(^…\n?|…|{NUMBER})", _trimmed(shown), flags=re.M):
        if part == "…\n":
            parts.append(r"(?:.*\n)*?")
        elif part == "…":
            parts.append(r".*?" if parts and parts[-1] and not parts[-1].endswith("\n") else r"(?:.|\n)*")
        elif re.fullmatch(NUMBER, part):
            parts.append(f"({NUMBER})")
            numbers.append(part)
        else:
            parts.append(re.escape(part).replace("\\\n", "\n"))
    return "".join(parts), numbers


def _trimmed(text):
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _is_near(shown, real):
    digits = re.match(r"-?(\d+)\.(\d+)", shown)
    if len((digits[1] + digits[2]).lstrip("0")) >= EXACT:
        return shown == real
    last_digit = 0.0 if "e" in shown else 10.0 ** -len(digits[2])
    return abs(float(shown) - float(real)) <= max(TOLERANCE * abs(float(shown)), 1.01 * last_digit)


class Reading:
    """A page being gone through, in a folder of its own."""

    def __init__(self, page, folder, warm, names=None):
        self.page, self.folder, self.warm = page, folder, warm
        self.names = {"__name__": "__main__"} if names is None else names
        self.printed = None  # by the Python before

    def go(self):
        for piece in pieces(self.page):
            what = self._file if piece.file else getattr(self, f"_{piece.language}", self._other)
            with self._place(piece):
                what(piece)

    @contextlib.contextmanager
    def _place(self, piece):
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.page.name}, the fence at line {piece.line}")
            raise

    def _file(self, piece):
        path = self.folder / piece.file
        text = patched(path.read_text(encoding="utf-8"), piece.text) if piece.language == "diff" else piece.text
        path.write_text(text, encoding="utf-8")

    def _python(self, piece):
        code = compile("\n" * piece.line + piece.text, self.page.name, "exec")
        self.printed = None
        if piece.not_run is None:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(code, self.names)
            self.printed = said.getvalue()

    def _text(self, piece):
        if piece.follows and self.printed is not None:
            assert is_as_shown(piece.text, self.printed), f"it prints\n{self.printed}"

    def _console(self, piece):
        for words, shown in commands(piece):
            if piece.not_run is None and words[0] in RUN:
                said = self._said(words)
                assert is_as_shown(shown, said), f"{shlex.join(words)} says\n{said}"

    def _said(self, words):
        arguments = ["-m", *words] if words[0] == "ampwise" else words[1:]
        done = self.warm.run(*arguments, cwd=self.folder)
        assert done.returncode in (0, 1), f"{shlex.join(words)} ends with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def _other(self, piece):
        pass


def patched(text, diff):
    """The text with a diff applied; a line ``…`` is between two places."""
    for hunk in re.split(r"^…\n", diff, flags=re.M):
        old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " -")
        new = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " +")
        assert text.count(old) == 1, f"not once in the file:\n{old}"
        text = text.replace(old, new)
    return text
