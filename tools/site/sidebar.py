"""The sidebar names the list of rules, not each rule: a hundred and more names on every page help nobody.

They would also take half of the time to build. Rules, and pages made of files, have no place of their own in it: those
of a folder have the same sidebar, which is made once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from tools.site.links import FOLDER

__all__ = ["is_a_rule"]

BEFORE_THE_THEME = 400  # whose sidebar is made of what is in the context then


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", _leave_out)
    app.connect("html-page-context", _share, priority=BEFORE_THE_THEME)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def is_a_rule(docname: str) -> bool:
    return docname.startswith("rules/AMP")


def _leave_out(app: Sphinx, _doctree: nodes.document) -> None:
    """Say that this page is in no list of contents, which Sphinx would otherwise warn of."""
    if is_a_rule(app.env.docname):
        app.env.metadata[app.env.docname]["orphan"] = True


def _share(_app: Sphinx, name: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if is_a_rule(name) or name.startswith(f"{FOLDER}/"):
        context["toctree"] = _once(name.rpartition("/")[0], context["toctree"])


_made: dict[tuple[Any, ...], str] = {}


def _once(folder: str, toctree: Callable[..., str]) -> Callable[..., str]:
    """Links are relative, so that a sidebar serves one folder."""

    def made(**options: Any) -> str:
        key = (folder, *sorted(options.items()))
        if key not in _made:
            _made[key] = toctree(**options)
        return _made[key]

    return made
