"""Records that grow, and a screen to look at: what a terminal shows after all that was written to it."""

import codecs
import contextlib
import fcntl
import math
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter

# Out of FP16 at a scale of 65536: nothing is below 2**-40, and what was there is among the zeros.
FADING = Census(
    binades={-41: 60, -40: 60, -39: 60, -38: 60, -37: 40, -20: 20},
    zeros=120,
    amax=2**-19.5,
    amin=2**-40,
    sum_squares=1e-10,
)
HEALTHY = Census(binades={-12: 60, -11: 30, -8: 10}, amax=2**-7.5, amin=2**-11.5, sum_squares=0.0025)


def step(number, **changes):
    values = {"seconds": number / 10, "loss": 8 / number, "scale": 65536.0, "norm": 1.25, "skipped": number % 50 == 0}
    return StepRow(step=number, **values | changes)


def layers(number, names=("stem.weight", "head.weight")):
    return LayerSample(first=number, last=number, scale=65536.0, layers=dict.fromkeys(names, FADING))


def clipped(message="clipped while scaled by 65536", line=31, count=120):
    finding = find_rule("AMP101").at(Place(file="train.py", line=line), message)
    return CountedFinding(finding=finding, count=count, first_step=1, last_step=120)


@contextlib.contextmanager
def growing(folder, steps=120, **options):
    """A writer with some steps, a sample of layers and a finding; ended at the end, if the test has not done so."""
    writer = RecordWriter.create(folder, script="train.py", command=["train.py"], **options)
    try:
        writer.fact("precision", "fp16")
        for number in range(1, steps + 1):
            writer.step(step(number, loss=math.nan) if number == 70 else step(number))
        writer.layers(layers(steps))
        writer.findings([clipped()])
        writer.flush()
        yield writer
    finally:
        writer.close("finished", 0)


def stop(server):
    """Stop a server at once: it notices by itself, but only a few times a second, and whenever somebody comes."""
    ending = threading.Thread(target=server.shutdown)
    ending.start()
    while ending.is_alive():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", server.server_port), timeout=60).close()
        ending.join(0.02)
    server.server_close()


class Screen:
    """Enough of a terminal for what rich writes: lines, returns, the way home, a second screen, colours."""

    PIECE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
    TORN = re.compile(r"(\x1b(\[[\d;?]*)?)?\Z")  # a sequence of which the rest is still to come

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.lines, self.row, self.column = [""], 0, 0
        self.scrolled, self.unread = 0, ""
        self.pictures = 0  # that were begun
        self.cursor_shown = True
        self.below = None  # what the second screen covers

    @property
    def is_second(self):
        return self.below is not None

    def resize(self, width, height):
        """As a terminal does with its second screen: what has no room is cut off, and the rest stays where it was."""
        self.width, self.height = width, height
        self.lines = [line[:width] for line in self.lines[:height]]
        self.row, self.column = min(self.row, len(self.lines) - 1), min(self.column, width)

    def feed(self, text):
        text = self.unread + text
        self.unread = self.TORN.search(text)[0]
        for parts, letter, control, plain in self.PIECE.findall(text[: len(text) - len(self.unread)]):
            if letter:
                self._sequence(parts, letter)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._down()
            else:
                for char in plain:
                    self._put(char)
        return self

    def _sequence(self, parts, letter):
        if (parts, letter) == ("", "H"):
            self.row = self.column = 0
            self.pictures += 1
        elif (parts, letter) == ("?1049", "h"):
            assert not self.is_second
            self.below = self.lines, self.row, self.column
            self.lines, self.row, self.column = [""], 0, 0
        elif (parts, letter) == ("?1049", "l"):
            assert self.is_second
            (self.lines, self.row, self.column), self.below = self.below, None
        elif (parts, letter) in (("?25", "l"), ("?25", "h")):
            self.cursor_shown = letter == "h"
        else:
            assert letter == "m", (parts, letter)  # colours; nothing else is expected

    def _put(self, char):
        if self.column == self.width:
            self._down()
            self.column = 0
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
        self.column += 1

    def _down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")
        if self.row == self.height:
            self.lines.pop(0)
            self.row -= 1
            self.scrolled += 1

    @property
    def text(self):
        return "\n".join(self.lines)


class Terminal:
    """`ampwise` in a terminal of its own."""

    def __init__(self, *words, width=80, height=24, **environment):
        self.screen = Screen(width, height)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.descriptor, inside = pty.openpty()
        self.resize(width, height)
        plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ampwise", *words],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=plain | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
        )
        os.close(inside)

    def resize(self, width, height):
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(width, height)

    def until(self, wanted, seconds=120.0):
        """Read until a whole picture has what is wanted, or the process has ended; the screen.

        A picture is whole when the next one is begun; until then, more of it may come at any time.
        """
        if self._until(wanted, seconds) and self.screen.is_second:
            self.see_pictures(1, seconds)
        return self.screen

    def see_pictures(self, count, seconds=120.0):
        """Read until so many more are begun."""
        last = self.screen.pictures + count
        self._until(lambda screen: screen.pictures >= last, seconds)

    def _until(self, wanted, seconds):
        """Whether the process goes on."""
        end = time.monotonic() + seconds
        is_open = True
        while is_open and not wanted(self.screen):
            assert time.monotonic() < end, self.screen.text
            is_open = self._read(0.2)
        return is_open

    def _read(self, seconds):
        """Whether more may come."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # the other end is closed
            return False
        self.screen.feed(self.decode(data))
        return bool(data)

    def end(self, seconds=120.0):
        """Read all that comes, and the exit code."""
        self._until(lambda _: False, seconds)
        return self.process.wait(timeout=seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.descriptor)
