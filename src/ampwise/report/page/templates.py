"""The files that pages are made of, and a page made of them: styles, script and data all in one."""

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

from ampwise.report.page.markup import FILTERS, finalize
from ampwise.strict_json import dumps

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["MARK", "filled", "shared", "template"]

MARK = '<meta name="generator" content="ampwise report">'  # by which an earlier page of ours is known
STYLES = ("vendor/uPlot.min.css", "page.css")
LIBRARY = "vendor/uPlot.iife.min.js"


def filled(
    name: str,
    shown: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    *,
    scripts: tuple[str, ...] = (),
    styles: tuple[str, ...] = (),
    live: float = 0,
) -> str:
    """A template with its variables.

    data: what the scripts draw charts from. scripts: in the order in which they need each other; a page without has
    no charts either. styles: of its own. live: seconds after which it asks its server for what is new.
    """
    script = _script(scripts) if scripts else ""
    return template(name).render(
        dict(shown) | shared(),
        mark=Markup(MARK),
        policy=_policy(script, asks=bool(live)),
        css=Markup("\n".join(_asset(style) for style in (*STYLES, *styles))),
        script=Markup(script),
        data="" if data is None else _packed(data),
        live=live,
    )


def shared() -> dict[str, Any]:
    """What every template may use."""
    return {"parts": template("parts.html").module}


@cache
def template(name: str) -> Template:
    """A template that escapes what it is given, and refuses what it is not."""
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
    """The page runs our script and no other, and fetches nothing, whatever a record has smuggled in."""
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "style-src 'unsafe-inline'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed.append(f"script-src 'sha256-{digest}'")
    return "; ".join([*allowed, *(["connect-src 'self'"] if asks else [])])


def _packed(data: Mapping[str, Any]) -> str:
    """A fifth of the size; every browser unpacks it by itself. The same data always gives the same text."""
    return base64.b64encode(gzip.compress(dumps(data, indent=None).encode(), mtime=0)).decode()


@cache
def _script(names: tuple[str, ...]) -> str:
    ours = "\n".join(_asset(name) for name in names)
    return f"{_asset(LIBRARY)}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
