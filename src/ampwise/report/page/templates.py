"""Render page templates into one self-contained file with styles, script and data.

Text from a record becomes markup: escaped, with `names` as code and exponents as superscripts.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ampwise.finding.strict_json import dumps
from ampwise.finding.terminal import printable
from ampwise.report.page.syntax import coloured

GENERATOR_MARK = '<meta name="generator" content="ampwise report">'  # identifies a page that ampwise wrote
STYLES = ("vendor/uPlot.min.css", "page.css")
LIBRARY = "vendor/uPlot.iife.min.js"
EVERY_PAGE = "common.js"
LONGEST_STATEMENT = 200  # characters of a line of a fix
# What reads as code without backquotes: calls, dotted and snake_case names, options, assignments of an argument.
CODE = re.compile(
    r"(?<![\w./@-])(?:--[a-z][\w-]*(?:=\w+)?"
    r"|[a-z]\w*=(?:&#39;[\w.]*&#39;|[\w.*+-]*[\w*])"
    r"|(?!(?:e\.g|i\.e)\b)@?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\((?!s\))(?:[^()]|\([^()]{0,99}\)){0,200}\)){1,9}(?::\d+)?"
    r"|[A-Za-z]\w*_\w*)"
)


def render_template(
    name: str,
    shown: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    *,
    scripts: tuple[str, ...] = (),
    styles: tuple[str, ...] = (),
    live: float = 0,
) -> str:
    """Render a template.

    shown: its variables. data: the numbers of its charts. scripts: besides the one of every page, in the order of their
    dependencies; a page without them has no charts. styles: additional style sheets. live: seconds between polls of the
    server; 0 for none.
    """
    script = _script(scripts)
    # Only our script runs, and nothing is fetched, whatever a record contains.
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "style-src 'unsafe-inline'"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy.append(f"script-src 'sha256-{digest}'")
    if live:
        policy.append("connect-src 'self'")
    packed = ""
    if data is not None:  # compressed to a fifth of the size, which browsers can unpack; equal data gives equal text
        packed = base64.b64encode(gzip.compress(dumps(data, indent=None).encode(), mtime=0)).decode()
    return template(name).render(
        dict(shown) | shared_variables(),
        mark=Markup(GENERATOR_MARK),
        policy="; ".join(policy),
        css=Markup("\n".join(_asset(style) for style in (*STYLES, *styles))),
        script=Markup(script),
        data=packed,
        live=live,
    )


def shared_variables() -> dict[str, Any]:
    """Return the variables that every template may use."""
    return {"parts": template("parts.html").module}


@cache
def template(name: str) -> Template:
    """Return a template that escapes its variables, and raises for undefined ones."""
    environment = Environment(
        loader=PackageLoader("ampwise.report", "page"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(name)


@cache
def _script(names: tuple[str, ...]) -> str:
    ours = "\n".join(_asset(name) for name in (EVERY_PAGE, *names))
    return f"{_asset(LIBRARY) if names else ''}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- text from a record ----------------------------------------------------------------------------------------------


def finalize(value: Any) -> Any:
    """Make every value that a template prints safe: no characters that hide or reorder others."""
    return value if isinstance(value, (Markup, int, float)) else printable(str(value))


def prose(text: str) -> Markup:
    """Return text as markup: `names` in backquotes, lines of code, and what else reads as code, become code.

    >>> prose("`a<b>` is\\n  less than scaler.step(x)")
    Markup('<code>a&lt;b&gt;</code> is<br><code class="indented">  less than scaler.step(x)</code>')
    >>> prose("Call scaler.step(x) with max_norm=1.")
    Markup('Call <code>scaler.step(x)</code> with <code>max_norm=1</code>.')
    """
    lines = text.split("\n")
    blocks = []
    for number, line in enumerate(lines):
        # In a fix, the lines around an indented one, or between two statements, are code too.
        is_code = line.startswith(" ") or (number > 0 and "`" not in line and is_statement(line))
        if is_code:
            blocks.append(Markup('<code class="indented">{}</code>').format(printable(line)))
            continue
        parts = re.split("`([^`]+)`", str(escape(printable(line))))
        for place, part in enumerate(parts):
            part = part if place % 2 else re.sub(r"\b2\*\*(-?\d+)", r"2<sup>\1</sup>", part)
            parts[place] = f"<code>{part}</code>" if place % 2 else CODE.sub(r"<code>\g<0></code>", part)
        blocks.append(Markup("".join(parts)))
    return Markup("<br>").join(blocks)


def is_statement(line: str) -> bool:
    """Return whether a line is Python: "scaler.update()", "if x > 0:", but not "Use `amp`." or "fix"."""
    if len(line) > LONGEST_STATEMENT or line.rstrip().endswith(".") or not re.search(r"[(=]|:$", line):
        return False
    try:
        ast.parse(f"{line}\n    pass" if line.rstrip().endswith(":") else line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def raised(text: str) -> Markup:
    """Return text with the exponents of powers of two as superscripts.

    >>> raised("at most 2^-24")
    Markup('at most 2<sup>−24</sup>')
    """
    escaped = str(escape(printable(text)))
    return Markup(re.sub(r"2\^(-?\d+)", lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", escaped))


def source(text: str) -> Markup:
    """Return code with syntax colours, escaped line by line."""
    return Markup("\n").join(coloured(text.split("\n")))


def plain(text: str) -> str:
    """Return prose without its backquotes, for a title."""
    return text.replace("`", "")


def joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


FILTERS = {"prose": prose, "source": source, "raised": raised, "plain": plain, "joined": joined}
