"""Render page templates into one self-contained file with styles, script and data."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ampwise.finding.strict_json import dumps
from ampwise.report.page.markup import FILTERS, finalize

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["GENERATOR_MARK", "render_template", "shared_variables", "template"]

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
    return template(name).render(
        dict(shown) | shared_variables(),
        mark=Markup(GENERATOR_MARK),
        policy=_policy(script, asks=bool(live)),
        css=Markup("\n".join(_asset(style) for style in (*STYLES, *styles))),
        script=Markup(script),
        data="" if data is None else _packed(data),
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


def _policy(script: str, *, asks: bool) -> str:
    """Return a Content-Security-Policy: only our script runs, and nothing is fetched, whatever a record contains."""
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "style-src 'unsafe-inline'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed.append(f"script-src 'sha256-{digest}'")
    return "; ".join([*allowed, *(["connect-src 'self'"] if asks else [])])


def _packed(data: Mapping[str, Any]) -> str:
    """Return compressed data, a fifth of the size, which browsers can unpack. Equal data gives equal text."""
    return base64.b64encode(gzip.compress(dumps(data, indent=None).encode(), mtime=0)).decode()


@cache
def _script(names: tuple[str, ...]) -> str:
    ours = "\n".join(_asset(name) for name in names)
    return f"{_asset(LIBRARY)}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
