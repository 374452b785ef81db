"""Render page templates into one self-contained file with styles, script and data.

Text from a record becomes markup: escaped, with `names` as code and exponents as superscripts.
"""

from __future__ import annotations

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

__all__ = ["GENERATOR_MARK", "finalize", "render_template", "shared_variables", "template"]

GENERATOR_MARK = '<meta name="generator" content="ampwise report">'  # identifies a page that ampwise wrote
STYLES = ("vendor/uPlot.min.css", "page.css")
LIBRARY = "vendor/uPlot.iife.min.js"


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

    shown: its variables. data: the numbers of its charts. scripts: in the order of their dependencies; a page without
    scripts has no charts. styles: additional style sheets. live: seconds between polls of the server; 0 for none.
    """
    script = _script(scripts) if scripts else ""
    # Only our script runs, and nothing is fetched, whatever a record contains.
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "style-src 'unsafe-inline'"]
    if script:
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
    ours = "\n".join(_asset(name) for name in names)
    return f"{_asset(LIBRARY)}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- text from a record ----------------------------------------------------------------------------------------------


def finalize(value: Any) -> Any:
    """Make every value that a template prints safe: no characters that hide or reorder others."""
    return value if isinstance(value, (Markup, int, float)) else printable(str(value))


def prose(text: str) -> Markup:
    """Return text as markup: `names` in backquotes and indented lines become code.

    >>> prose("`a<b>` is\\n  less")
    Markup('<code>a&lt;b&gt;</code> is<br><code class="indented">  less</code>')
    """
    lines = []
    for line in text.split("\n"):
        if line.startswith(" "):
            lines.append(Markup('<code class="indented">{}</code>').format(printable(line)))
        else:
            lines.append(Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(line))))))
    return Markup("<br>").join(lines)


def raised(text: str) -> Markup:
    """Return text with the exponents of powers of two as superscripts.

    >>> raised("at most 2^-24")
    Markup('at most 2<sup>−24</sup>')
    """
    escaped = str(escape(printable(text)))
    return Markup(re.sub(r"2\^(-?\d+)", lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", escaped))


def source(text: str) -> Markup:
    """Return lines of code, escaped line by line."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def diff_lines(text: str) -> list[tuple[str, str]]:
    """Return the lines of a unified diff, each with its kind: "added", "removed", "head" or "same"."""
    kinds = {"+": "added", "-": "removed"}
    return [
        ("head" if line.startswith(("---", "+++", "@@")) else kinds.get(line[:1], "same"), line.expandtabs(4))
        for line in text.splitlines()
    ]


def joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


FILTERS = {"prose": prose, "source": source, "raised": raised, "diff_lines": diff_lines, "joined": joined}
