"""Show the result of a search on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.finding.terminal import console, printable, table
from ampwise.report.formatting import format_bytes, format_duration, format_percent
from ampwise.tune.search.format_choices import WIDEST
from ampwise.tune.search.patterns import globs, spans

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampwise.tune.search.result import ModuleSensitivity, SearchResult, Verification

__all__ = [
    "alone_text",
    "format_rows",
    "found_text",
    "gain_sentences",
    "headline",
    "method_sentences",
    "show",
    "shown_name",
]

MOST_ROWS = 12
MOST_PATTERNS = 4


def found_text(found: SearchResult) -> str:
    """Render the whole result without colour."""
    out = console(io.StringIO())
    with out.capture() as captured:
        show(out, found)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def show(out: Console, found: SearchResult) -> None:
    """Print the verdict first, then the numbers behind it."""
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
    for sentence in gain_sentences(found):
        _say(out, sentence)
    for sentence in method_sentences(found):
        _say(out, sentence, "dim")


def headline(found: SearchResult) -> str:
    """Return the verdict in a sentence."""
    if not found.narrower and found.spent:
        return (
            f"{found.subject}: at a tolerance of {found.tolerance:g} nothing narrower than FP32 was found within the "
            f"limit of {found.trials} trial{'s' if found.trials > 1 else ''}"
        )
    if not found.narrower:
        formats = ", ".join(fmt for fmt in found.formats if fmt != WIDEST)
        return f"{found.subject}: at a tolerance of {found.tolerance:g} only FP32 everywhere passes (tried: {formats})"
    counts = ", ".join(f"{count} in {fmt}" for fmt, count in found.counts.items() if count)
    many = len(found.modules)
    return (
        f"{found.subject}: {counts}, of {many} module{'s' if many > 1 else ''} with matmuls; error "
        f"{found.error:.2g} of {found.tolerance:g} allowed"
    )


def format_rows(found: SearchResult) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row per format: number of modules, their share of the matmuls, and which."""
    shares = {each.name: each.share for each in found.ranking}
    for fmt, count in found.counts.items():
        names = [name for name, its in found.modules.items() if its == fmt]
        known = [shares[name] for name in names if name in shares]
        share = format_percent(round(sum(known), 9)) if len(known) == len(names) else "-"  # rounded to give 100%
        yield fmt, str(count), share if count else "", _which(found, names)


def gain_sentences(found: SearchResult) -> Iterator[str]:
    """Yield what is gained, each number with its basis."""
    gain = found.gain
    yield f"Matmul operands take {format_percent(gain.cost)} of FP32's bits (derived: bits, weighted by FLOPs)."
    if gain.faster_than_fp32 is not None:
        times = gain.faster_than_16_bits
        half = "" if times is None else f", {times:.2f}x as fast as in 16 bits everywhere"
        yield (
            f"Matmuls are at best {gain.faster_than_fp32:.1f}x as fast as in FP32{half}, by the peaks of {gain.gpu} "
            "(datasheet); other work is not counted."
        )
    elif gain.why_no_time:
        yield f"No time is predicted: {gain.why_no_time}."
    if gain.kept_bytes is not None and gain.kept_bytes_fp32:
        kept, wide = format_bytes(gain.kept_bytes), format_bytes(gain.kept_bytes_fp32)
        yield f"A batch saves {kept} for the backward pass, {wide} in FP32 (measured here)."


def method_sentences(found: SearchResult) -> Iterator[str]:
    """Yield how it was found, and how certain it is."""
    noise = "none" if not found.noise else f"{found.noise:.1g}"
    yield (
        f"Found in {found.trials} trials ({found.passes} passes, {format_duration(found.seconds)}) on {found.batches} "
        f"batch{'es' if found.batches > 1 else ''}; noise of FP32: {noise}; "
        + (
            "no other can be cheaper."
            if not found.gap
            else f"another can be cheaper by at most {format_percent(found.gap)}."
        )
    )
    verified = found.verified
    if verified is not None and verified.passed:
        yield f"Verified on {_held_back(verified)}: error {verified.error:.2g}."
    elif verified is not None:
        names = ", ".join(map(shown_name, verified.raised[:MOST_PATTERNS]))
        more = len(verified.raised) - MOST_PATTERNS
        yield (
            f"On {_held_back(verified)} the error was {verified.error:.2g}{_worst_gradient(verified)}, so these "
            f"were made wider: {names}{f' and {more} more' if more > 0 else ''}; now it is {verified.error_after:.2g}."
        )
    yield from (f"{note[0].upper()}{note[1:].rstrip('.')}." for note in found.notes)


def _held_back(verified: Verification) -> str:
    return f"{verified.batches} held-back batch{'es' if verified.batches > 1 else ''}"


def _worst_gradient(verified: Verification) -> str:
    if verified.worst is None:
        return ""
    return f" (largest in the gradient of {printable(verified.worst) or 'its own parameters'})"


def alone_text(each: ModuleSensitivity) -> str:
    """Return the error with the narrower format in this module alone: measured, else estimated."""
    if each.narrower is None:
        return ""
    if each.alone is not None:
        return f"{each.alone:.2g}"
    estimate = each.estimates.get(each.narrower)
    return "" if estimate is None else f"~{estimate:.1g}"


def shown_name(name: str) -> str:
    """Return the name, or a placeholder for the model itself."""
    return printable(name) or "(the model itself)"


def _formats(found: SearchResult) -> Table:
    shown = table("format")
    shown.add_column("modules", justify="right")
    shown.add_column("matmuls", justify="right")
    shown.add_column("which", no_wrap=False)
    for row in format_rows(found):
        shown.add_row(*map(_plain, row))
    return shown


def _sensitive(raised: list[ModuleSensitivity]) -> Table:
    shown = table("most sensitive", "class", "has", "not")
    shown.add_column("error alone", justify="right")
    for each in raised[:MOST_ROWS]:
        cells = (shown_name(each.name), printable(each.kind), each.format, each.narrower or "", alone_text(each))
        shown.add_row(*map(_plain, cells))
    if len(raised) > MOST_ROWS:
        shown.add_row(f"… and {len(raised) - MOST_ROWS} more")
    return shown


def _which(found: SearchResult, names: list[str]) -> str:
    others = [name for name in found.modules if name not in set(names)]
    patterns = globs(names, others)
    are_plain = not any("[" in pattern for pattern in patterns)  # a bracket is an escaped star
    short = patterns if are_plain and len(patterns) <= MOST_PATTERNS else spans(names)
    more = len(short) - MOST_PATTERNS
    return ", ".join(map(shown_name, short[:MOST_PATTERNS])) + (f" and {more} more" if more > 0 else "")


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(printable(text), style=style, markup=False, soft_wrap=True)


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)  # a name is not markup
