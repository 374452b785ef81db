"""A run as one HTML file that needs nothing else: no script, no network, readable in the light and in the dark."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampwise.printers.terminal import printable
from ampwise.report.activations import ABOUT, HEADINGS, MOST_MODULES, Activation, activations_of
from ampwise.report.bars import bars, legend, span_of
from ampwise.report.chart import COLUMNS, chart
from ampwise.report.curves import thinned
from ampwise.report.facts import environment, modules, optimizer_names, sentences, settings, timing
from ampwise.report.layers import Layer, about_layers, headings, layers_of, title
from ampwise.report.looks import CSS
from ampwise.report.source_lines import kept_lines
from ampwise.report.verdict import happened, mood, opening, verdict, worst_first
from ampwise.report.wording import moment, one_line, percent, short

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["MARK", "page"]

MARK = '<meta name="generator" content="ampwise report">'  # by which an earlier page of ours is known
# The page runs nothing and fetches nothing, whatever a record has smuggled in.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_LAYERS = 400
MOST_KINDS = 1000  # modules with their kinds
MOST_FINDINGS = 300


def page(run: Run) -> str:
    """The whole file."""
    seen = worst_first(run.merged_findings())
    body = "".join(
        [
            _header(run),
            _findings(seen),
            _settings(run),
            _charts(run),
            _layers(layers_of(run)),
            _activations(activations_of(run)),
            _pairs("Where time goes", timing(run)),
            _list("What was fine", sentences(run, "what_was_fine")),
            _list("What was not measured", sentences(run, "not_measured")),
            _list("Trouble with this record", run.trouble),
            _modules(run),
            _pairs("Environment", [(str(name), short(value)) for name, value in _flat(environment(run))]),
            f'<footer class="soft">Record: <code>{_text(str(run.folder))}</code></footer>',
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(verdict(run))}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Text from a record: nothing in it is markup, and nothing hides or reorders characters."""
    return html.escape(printable(text))


def _prose(text: str) -> str:
    """Sentences from a record, in which `names` stand between backquotes."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(text))


def _lines(text: str) -> str:
    indents = (len(line) - len(line.lstrip(" ")) for line in text.split("\n"))
    lines = (_prose(line.lstrip(" ")) for line in text.split("\n"))
    return "<br>".join("&nbsp;" * indent + line for indent, line in zip(indents, lines, strict=True))


def _raised(text: str) -> str:
    """Escaped text in which powers of two have their exponents raised."""
    return re.sub(r"2\^(-?\d+)", lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", text)


def _header(run: Run) -> str:
    first, *others = opening(run)
    times = [moment(str(run.manifest[part])) for part in ("created", "finished") if run.manifest.get(part)]
    command = run.manifest.get("command")
    told = [*others, f"From {' to '.join(times)}." if len(times) == 2 else f"Begun {times[0]}." if times else ""]
    about = "".join(f'<p class="soft">{_prose(line)}</p>' for line in told if line)
    ran = f"<p><code>{_text(' '.join(map(str, command)))}</code></p>" if isinstance(command, list) and command else ""
    return f'<h1 class="{mood(run)}">{_prose(first)}</h1>\n{about}{ran}\n'


def _findings(seen: Sequence[Seen]) -> str:
    if not seen:
        return ""
    cards = "\n".join(_card(one) for one in seen[:MOST_FINDINGS])
    return f"<h2>Findings, worst first</h2>\n{cards}\n{_more(len(seen) - MOST_FINDINGS, 'findings')}"


def _card(seen: Seen) -> str:
    finding = seen.finding
    where = f"<p><code>{_text(str(finding.place))}</code></p>" if finding.place.as_dict() else ""
    told = "".join(
        f'<p class="soft">{_text(text)}</p>' for text in (one_line(finding.evidence), happened(seen)) if text
    )
    return (
        f'<article class="card {finding.severity}">'
        f'<h3><span class="tag {finding.severity}">{finding.severity}[{_text(finding.rule.code)}]</span> '
        f"<b>{_text(finding.rule.name)}</b>: {_lines(finding.message)}</h3>"
        f"{where}{_excerpt(seen)}{told}"
        f"<p><b>Fix:</b> {_lines(finding.fix)}</p></article>"
    )


def _excerpt(seen: Seen) -> str:
    lines = kept_lines(seen)
    if not lines:
        return ""
    gutter = len(str(max(lines)))
    drawn = "".join(
        f"<span{' class=here' if number == seen.finding.place.line else ''}>"
        f"<i>{number:{gutter}}  </i>{_text(line.expandtabs(4)[:400])}</span>"
        for number, line in lines.items()
    )
    return f"<pre>{drawn}</pre>"


def _settings(run: Run) -> str:
    rows = [[_text(f"{one.name}={short(one.value)}"), _prose(one.reason)] for one in settings(run)]
    if not rows:
        return ""
    return f"<h2>Suggested for the GradScaler</h2>\n{_table(['setting', 'why'], rows, ['name', 'text'])}"


def _charts(run: Run) -> str:
    points = thinned(run.steps, COLUMNS)
    names = optimizer_names(run)
    drawn = [
        chart("Loss", "loss", points, names=names),
        chart("Loss scale", "scale", points, powers_of_two=True, skips=True, names=names),
        chart("Norm of the gradients", "norm", points, skips=True, names=names),
        chart("Learning rate", "lr", points, names=names),
    ]
    charts = "\n".join(figure for figure in drawn if figure)
    if not charts:
        return ""
    merged = any(point.count > 1 for point in points)
    note = "A band spans from the lowest to the highest value of a stretch of steps, the line is its mean."
    told = f'<p class="soft">{note}</p>' if merged else ""
    return f'<h2>Over the steps</h2>\n{told}<div class="charts">\n{charts}\n</div>\n'


def _layers(layers: list[Layer]) -> str:
    if not layers:
        return ""
    span = span_of(layers)
    several = len({layer.optimizer for layer in layers}) > 1
    shown = layers[:MOST_LAYERS]
    drawn = [bars(layer, span) for layer in shown]
    rows = [_row(layer, picture, several) for layer, picture in zip(shown, drawn, strict=True)]
    numbers = headings(layers)
    top = ["layer", *numbers, _raised(f"2^{span.low} to 2^{span.high + 1}"), ""]
    words = "".join(f'<span class="key {fate}">{fate}</span>' for fate in legend(drawn))
    keys = f'<p class="soft keys">{words}</p>\n' if words else ""
    return (
        f'<h2>{title(layers)}</h2>\n<p class="soft">{_raised(_text(about_layers(layers)))}.</p>\n'
        f"{keys}{_table(top, rows, ['name', *[''] * len(numbers), 'left', 'text'])}"
        f"{_more(len(layers) - MOST_LAYERS, 'layers')}"
    )


def _row(layer: Layer, picture: str, several: bool) -> list[str]:
    owner = f" ({_text(layer.owner)})" if several else ""
    numbers = [percent(layer.share), f"{layer.norm:.3g}", f"{layer.census.amax:.3g}"]
    lost = [_text(percent(share)) for share in (layer.lost, layer.subnormal) if share is not None]
    return [f"<code>{_text(layer.name)}</code>{owner}", *numbers, *lost, picture, _text(", ".join(layer.notes))]


def _activations(found: list[Activation]) -> str:
    if not found:
        return ""
    rows = [[_text(cell) for cell in one.cells] for one in found[:MOST_MODULES]]
    named = [[f"<code>{name}</code>", *cells] for name, *cells in rows]
    return (
        f"<h2>Modules{', worst first' if len(found) > 1 else ''}</h2>\n"
        f'<p class="soft">{ABOUT}.</p>\n{_table(HEADINGS, named, ["name", "", "", ""])}'
        f"{_more(len(found) - MOST_MODULES, 'modules')}"
    )


def _modules(run: Run) -> str:
    found = modules(run)
    if not found:
        return ""
    rows = [[_text(part) for part in row] for row in found[:MOST_KINDS]]
    body = _table(["module", "kind", "precision"], rows, ["name", "text", "text"])
    more = _more(len(found) - MOST_KINDS, "modules")
    return f"<details><summary><h2>Kinds of modules ({len(found):,})</h2></summary>\n{body}{more}</details>\n"


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    rows = [[_text(name), _text(value)] for name, value in pairs]
    return f"<h2>{title}</h2>\n{_table([], rows, ['name', 'pair'])}" if rows else ""


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"<h2>{title}</h2>\n<ul>{''.join(f'<li>{_prose(line)}</li>' for line in lines)}</ul>\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str]) -> str:
    """A table of cells that are escaped already."""

    def cell(kind: str, name: str, text: str) -> str:
        return f"<{kind} class={name}>{text}</{kind}>" if name else f"<{kind}>{text}</{kind}>"

    named = ["left" if name else "" for name in classes]
    head = "".join(cell("th", name, text) for name, text in zip(named, headings, strict=False))
    body = "\n".join(
        f"<tr>{''.join(cell('td', name, text) for name, text in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>\n" if headings else ""
    return f'<div class="scroll"><table>\n{top}<tbody>\n{body}\n</tbody></table></div>\n'


def _more(number: int, what: str) -> str:
    told = f"… and {number:,} more {what}; <code>ampwise report --json</code> has all of them."
    return f'<p class="soft">{told}</p>\n' if number > 0 else ""


def _flat(environment: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Name and value of each leaf, with the names on the way joined by dots."""
    for name, value in environment.items():
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value
