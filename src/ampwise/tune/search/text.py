"""Show the result of a search on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampwise.finding import html
from ampwise.finding.terminal import console, printable, table
from ampwise.report.formatting import format_bytes, format_duration, format_percent
from ampwise.tune.search.arrangement import WIDEST
from ampwise.tune.search.build_result import globs, spans

if TYPE_CHECKING:
    from rich.console import Console

    from ampwise.tune.search.result import ModuleSensitivity, SearchResult

MOST_ROWS = 12
MOST_PATTERNS = 4
FORMAT_HEADINGS = ("format", "modules", "matmuls", "which")
SENSITIVE_HEADINGS = ("most sensitive", "class", "has", "not", "error alone")


def found_text(found: SearchResult) -> str:
    """Render the whole result without colour."""
    out = console(io.StringIO())
    with out.capture() as captured:
        show(out, found)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def show(out: Console, found: SearchResult) -> None:
    """Print the verdict first, then the numbers behind it."""
    from rich.text import Text

    _say(out, _headline(found), "bold")
    out.print()
    formats = table(FORMAT_HEADINGS[0])
    formats.add_column(FORMAT_HEADINGS[1], justify="right")
    formats.add_column(FORMAT_HEADINGS[2], justify="right")
    formats.add_column(FORMAT_HEADINGS[3])
    for row in _format_rows(found):
        formats.add_row(*map(Text, row))  # Text: a name is not markup
    out.print(formats)
    out.print()
    raised = [each for each in found.ranking if each.narrower is not None]
    if raised:
        _show_sensitive(out, raised)
        out.print()
    for sentence in _gain_sentences(found):
        _say(out, sentence)
    for sentence in _method_sentences(found):
        _say(out, sentence, "dim")


def _show_sensitive(out: Console, raised: Sequence[ModuleSensitivity]) -> None:
    from rich.text import Text

    sensitive = table(*SENSITIVE_HEADINGS[:-1])
    sensitive.add_column(SENSITIVE_HEADINGS[-1], justify="right")
    for each in raised[:MOST_ROWS]:
        sensitive.add_row(*map(Text, _sensitive_cells(each)))
    if len(raised) > MOST_ROWS:
        sensitive.add_row(f"… and {len(raised) - MOST_ROWS} more")
    out.print(sensitive)
    for each in raised[:MOST_ROWS]:
        for reason in each.reasons:
            _say(out, f"{_shown_name(each.name)}: {reason}")


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(printable(text), style=style, markup=False, soft_wrap=True)


def found_html(found: SearchResult) -> str:
    """Render the verdict, the formats, the sensitive modules with reasons, and the gain, for a notebook."""
    mood = "ok" if found.narrower else "warning"
    formats = [
        [html.code(fmt), html.text(count), html.text(share), html.code(which) if which else ""]
        for fmt, count, share, which in _format_rows(found)
    ]
    parts = [
        html.box(html.paragraph(f"{html.badge('search', mood)} {html.bold(_headline(found))}"), mood),
        html.table(FORMAT_HEADINGS, formats),
    ]
    raised = [each for each in found.ranking if each.narrower is not None]
    if raised:
        rows = []
        for each in raised[:MOST_ROWS]:
            name, *cells = _sensitive_cells(each)
            rows.append([html.code(name), *map(html.text, cells), "<br>".join(map(html.text, each.reasons))])
        parts.append(html.table((*SENSITIVE_HEADINGS, "why"), rows, left=4))
    parts += [html.paragraph(html.text(sentence)) for sentence in _gain_sentences(found)]
    parts += [html.paragraph(html.text(sentence), soft=True) for sentence in _method_sentences(found)]
    return "".join(parts)


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
    """Return the cells of SENSITIVE_HEADINGS. The error of the narrower format alone is measured, else estimated."""
    narrower, alone = each.narrower or "", "" if each.alone is None else f"{each.alone:.2g}"
    if each.alone is None and narrower in each.estimates:
        alone = f"~{each.estimates[narrower]:.1g}"
    return _shown_name(each.name), printable(each.kind), each.format, narrower, alone


def _shown_name(name: str) -> str:
    return printable(name) or "(the model itself)"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_PATTERNS
    return ", ".join(map(_shown_name, names[:MOST_PATTERNS])) + (f" and {more} more" if more > 0 else "")
