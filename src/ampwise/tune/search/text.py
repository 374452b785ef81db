"""Tables and sentences that show a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampwise.finding.terminal import printable
from ampwise.report.formatting import format_bytes, format_duration, format_percent
from ampwise.report.result_view import Headline, Line, Part, ResultTable
from ampwise.tune.search.arrangement import WIDEST
from ampwise.tune.search.build_result import globs, spans

if TYPE_CHECKING:
    from ampwise.tune.search.result import ModuleSensitivity, SearchResult

MOST_ROWS = 12
MOST_PATTERNS = 4
FORMAT_HEADINGS = ("format", "modules", "matmuls", "which")


def result_parts(found: SearchResult) -> Iterator[Part]:
    """Yield the verdict first, then the numbers behind it."""
    yield Headline(_headline(found), "search", "ok" if found.narrower else "warning")
    yield ResultTable(headings=FORMAT_HEADINGS, rows=list(_format_rows(found)), left=(0, 3), names=(0, 3), wraps=(3,))
    raised = [each for each in found.ranking if each.narrower is not None]
    if raised:
        yield ResultTable(
            headings=("most sensitive", "class", "has", "not", "error alone"),
            rows=list(map(_sensitive_cells, raised[:MOST_ROWS])),
            left=range(4),
            names=(0,),
            more=len(raised) - MOST_ROWS,
        )
        yield from (Line(f"{_shown_name(each.name)}: {why}") for each in raised[:MOST_ROWS] for why in each.reasons)
        yield Line("")
    yield from map(Line, _gain_sentences(found))
    yield from (Line(sentence, "dim") for sentence in _method_sentences(found))


def _headline(found: SearchResult) -> str:
    """Return the verdict in a sentence."""
    if not found.narrower and found.spent:
        return (
            f"{found.name}: at a tolerance of {found.tolerance:g} nothing narrower than FP32 was found within the "
            f"limit of {found.trials} trial{'s' if found.trials > 1 else ''}"
        )
    if not found.narrower:
        formats = ", ".join(fmt for fmt in found.formats if fmt != WIDEST)
        return f"{found.name}: at a tolerance of {found.tolerance:g} only FP32 everywhere passes (tried: {formats})"
    counts = ", ".join(f"{count} in {fmt}" for fmt, count in found.counts.items() if count)
    many = len(found.modules)
    return (
        f"{found.name}: {counts}, of {many} module{'s' if many > 1 else ''} with matmuls; error "
        f"{found.error:.2g} of {found.tolerance:g} allowed"
    )


def _format_rows(found: SearchResult) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row per format: number of modules, their share of the matmuls, and which."""
    shares = {each.name: each.share for each in found.ranking}
    for fmt, count in found.counts.items():
        names = [name for name, its in found.modules.items() if its == fmt]
        known = [shares[name] for name in names if name in shares]
        share = format_percent(round(sum(known), 9)) if len(known) == len(names) else "-"  # rounded to give 100%
        patterns = globs(names, [name for name, its in found.modules.items() if its != fmt])
        are_plain = not any("[" in pattern for pattern in patterns)  # a bracket is an escaped star
        short = patterns if are_plain and len(patterns) <= MOST_PATTERNS else spans(names)
        yield fmt, str(count), share if count else "", _listed(short)


def _gain_sentences(found: SearchResult) -> Iterator[str]:
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


def _method_sentences(found: SearchResult) -> Iterator[str]:
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
    batches = 0 if verified is None else verified.batches
    held_back = f"{batches} held-back batch{'es' if batches > 1 else ''}"
    if verified is not None and verified.passed:
        yield f"Verified on {held_back}: error {verified.error:.2g}."
    elif verified is not None:
        worst = "" if verified.worst is None else printable(verified.worst) or "its own parameters"
        where = f" (largest in the gradient of {worst})" if worst else ""
        yield (
            f"On {held_back} the error was {verified.error:.2g}{where}, so these were made wider: "
            f"{_listed(verified.raised)}; now it is {verified.error_after:.2g}."
        )
    yield from (f"{note[0].upper()}{note[1:].rstrip('.')}." for note in found.notes)


def _sensitive_cells(each: ModuleSensitivity) -> tuple[str, ...]:
    """Return a row of the sensitive modules. The error of the narrower format alone is measured, else estimated."""
    narrower, alone = each.narrower or "", "" if each.alone is None else f"{each.alone:.2g}"
    if each.alone is None and narrower in each.estimates:
        alone = f"~{each.estimates[narrower]:.1g}"
    return _shown_name(each.name), printable(each.kind), each.format, narrower, alone


def _shown_name(name: str) -> str:
    return printable(name) or "(the model itself)"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_PATTERNS
    return ", ".join(map(_shown_name, names[:MOST_PATTERNS])) + (f" and {more} more" if more > 0 else "")
