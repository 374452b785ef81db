"""The results as one HTML page that works offline: tables, and each answer with its marks; everything escaped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ampwise.report.page.templates import GENERATOR_MARK, finalize
from evals.scenarios import all_scenarios
from evals.trials import SKILL, Trial, by_excuse, by_pressure, by_scenario, skills_of


def as_page(trials: Sequence[Trial], about: dict[str, Any]) -> str:
    """Return the page, in the style of ampwise's reports."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("ampwise.report.page").joinpath("page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        mark=Markup(GENERATOR_MARK),
        css=Markup(style),
        about=about,
        skills=skills_of(trials),
        skill_names=SKILL,
        scenarios=all_scenarios(),
        rows=by_scenario(trials),
        pressures=by_pressure(trials),
        excuses=by_excuse(trials),
        trials=trials,
    )
