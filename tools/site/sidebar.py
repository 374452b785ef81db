"""Sphinx extension: the sidebar contains the index of rules, not each of more than a hundred rules.

They would also take half of the build time. Rules and pages generated from files are not in it: all pages of such a
folder share one sidebar, which is built once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from tools.site.links import FOLDER

__all__ = ["is_a_rule"]

BEFORE_THE_THEME = 400  # the theme builds its sidebar from the context


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", _leave_out)
    app.connect("html-page-context", _share, priority=BEFORE_THE_THEME)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def is_a_rule(docname: str) -> bool:
    return docname.startswith("rules/AMP")


def _leave_out(app: Sphinx, _doctree: nodes.document) -> None:
    """Mark rule pages as orphans, so that Sphinx does not warn that no toctree has them."""
    if is_a_rule(app.env.docname):
        app.env.metadata[app.env.docname]["orphan"] = True


def _share(_app: Sphinx, name: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if is_a_rule(name) or name.startswith(f"{FOLDER}/"):
        context["toctree"] = _once(name.rpartition("/")[0], context["toctree"])


_made: dict[tuple[Any, ...], str] = {}


def _once(folder: str, toctree: Callable[..., str]) -> Callable[..., str]:
    """Return a toctree function that builds a folder's sidebar once; links are relative to the folder."""

    def made(**options: Any) -> str:
        key = (folder, *sorted(options.items()))
        if key not in _made:
            _made[key] = toctree(**options)
        return _made[key]

    return made
