"""What was found, as the terminal shows it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.printers.terminal import console, printable, table
from ampwise.report.wording import duration, percent, size
from ampwise.tune.search.choices import WIDEST
from ampwise.tune.search.patterns import globs, spans

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampwise.tune.search.found import Found, Sensitive, Verified

__all__ = ["format_rows", "found_text", "gains", "headline", "how", "show", "shown_name", "told_alone"]

MOST_ROWS = 12
MOST_PATTERNS = 4


def found_text(found: Found) -> str:
    """All of it, without colour."""
    out = console(io.StringIO())
    with out.capture() as captured:
        show(out, found)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def show(out: Console, found: Found) -> None:
    """The answer first, then what it rests on."""
    _say(out, headline(found), "bold")
    out.print()
    out.print(_formats(found))
    raised = [each for each in found.ranking if each.narrower is not None]
    if raised:
        out.print()
        out.print(_sensitive(raised))
        for each in raised[:MOST_ROWS]:
            for reason in each.reasons:
                _say(out, f"{shown_name(each.name)}: {reason}")
    out.print()
    for sentence in gains(found):
        _say(out, sentence)
    for sentence in how(found):
        _say(out, sentence, "dim")


def headline(found: Found) -> str:
    """The answer in a sentence."""
    if not found.narrower and found.spent:
        return (
            f"{found.subject}: at a tolerance of {found.tolerance:g} nothing narrower than FP32 was found in "
            f"{found.trials} trial{'s' if found.trials > 1 else ''}, as many as allowed"
        )
    if not found.narrower:
        formats = ", ".join(fmt for fmt in found.formats if fmt != WIDEST)
        return (
            f"{found.subject}: nothing passes at a tolerance of {found.tolerance:g} but FP32 everywhere (of {formats})"
        )
    counts = ", ".join(f"{count} in {fmt}" for fmt, count in found.counts.items() if count)
    many = len(found.modules)
    return (
        f"{found.subject}: {counts}, of {many} module{'s' if many > 1 else ''} with matrix products; error "
        f"{found.error:.2g} of {found.tolerance:g} allowed"
    )


def format_rows(found: Found) -> Iterator[tuple[str, str, str, str]]:
    """A row a format: how many modules, their share of the products, and which."""
    shares = {each.name: each.share for each in found.ranking}
    for fmt, count in found.counts.items():
        names = [name for name, its in found.modules.items() if its == fmt]
        known = [shares[name] for name in names if name in shares]
        share = percent(round(sum(known), 9)) if len(known) == len(names) else "-"  # of all it is 100%
        yield fmt, str(count), share if count else "", _which(found, names)


def gains(found: Found) -> Iterator[str]:
    """What it brings, each number with what it rests on."""
    gain = found.gain
    yield f"Operands of products take {percent(gain.cost)} of the bits of FP32 (derived: bits, weighed by FLOPs)."
    if gain.faster_than_fp32 is not None:
        times = gain.faster_than_16_bits
        half = "" if times is None else f", {times:.2f} times as fast as in 16 bits everywhere"
        yield (
            f"Products are at best {gain.faster_than_fp32:.1f} times as fast as in FP32{half}, by the peaks of "
            f"{gain.gpu} (datasheet); other work is not counted."
        )
    elif gain.why_no_time:
        yield f"No time is predicted: {gain.why_no_time}."
    if gain.kept_bytes is not None and gain.kept_bytes_fp32:
        kept, wide = size(gain.kept_bytes), size(gain.kept_bytes_fp32)
        yield f"For the backward pass of a batch {kept} are kept, in FP32 {wide} (measured here)."


def how(found: Found) -> Iterator[str]:
    """How it was found, and how sure it is."""
    resting = "none" if not found.noise else f"{found.noise:.1g}"
    yield (
        f"Found in {found.trials} trials ({found.passes} passes, {duration(found.seconds)}) on {found.batches} "
        f"batch{'es' if found.batches > 1 else ''}; noise of FP32: {resting}; "
        + ("no other can be cheaper." if not found.gap else f"another can be cheaper by {percent(found.gap)} at most.")
    )
    verified = found.verified
    if verified is not None and verified.passed:
        yield f"Verified on {verified.batches} held back: error {verified.error:.2g}."
    elif verified is not None:
        names = ", ".join(map(shown_name, verified.raised[:MOST_PATTERNS]))
        more = len(verified.raised) - MOST_PATTERNS
        yield (
            f"On {verified.batches} held back the error was {verified.error:.2g}{_farthest(verified)}, so that more "
            f"was made wider: {names}{f' and {more} more' if more > 0 else ''}; now it is {verified.error_after:.2g}."
        )
    yield from (f"{note[0].upper()}{note[1:].rstrip('.')}." for note in found.notes)


def _farthest(verified: Verified) -> str:
    if verified.worst is None:
        return ""
    return f" (the gradient of {printable(verified.worst) or 'its own parameters'} was farthest off)"


def told_alone(each: Sensitive) -> str:
    """The error of the whole with the narrower format in this module alone: measured, or else estimated."""
    if each.narrower is None:
        return ""
    if each.alone is not None:
        return f"{each.alone:.2g}"
    estimate = each.estimates.get(each.narrower)
    return "" if estimate is None else f"~{estimate:.1g}"


def shown_name(name: str) -> str:
    """Also of what has none."""
    return printable(name) or "(the model itself)"


def _formats(found: Found) -> Table:
    shown = table("format")
    shown.add_column("modules", justify="right")
    shown.add_column("products", justify="right")
    shown.add_column("which", no_wrap=False)
    for row in format_rows(found):
        shown.add_row(*map(_plain, row))
    return shown


def _sensitive(raised: list[Sensitive]) -> Table:
    shown = table("most sensitive", "class", "has", "not")
    shown.add_column("error alone", justify="right")
    for each in raised[:MOST_ROWS]:
        cells = (shown_name(each.name), printable(each.kind), each.format, each.narrower or "", told_alone(each))
        shown.add_row(*map(_plain, cells))
    if len(raised) > MOST_ROWS:
        shown.add_row(f"… and {len(raised) - MOST_ROWS} more")
    return shown


def _which(found: Found, names: list[str]) -> str:
    others = [name for name in found.modules if name not in set(names)]
    patterns = globs(names, others)
    are_plain = not any("[" in pattern for pattern in patterns)  # which is how a star in a name is written
    short = patterns if are_plain and len(patterns) <= MOST_PATTERNS else spans(names)
    more = len(short) - MOST_PATTERNS
    return ", ".join(map(shown_name, short[:MOST_PATTERNS])) + (f" and {more} more" if more > 0 else "")


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(printable(text), style=style, markup=False, soft_wrap=True)


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)  # a name is not markup
