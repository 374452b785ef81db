"""Rows, samples and findings for a record, made up by hypothesis or by hand."""

import json
import math

from hypothesis import strategies as st

from ampwise.finding import Place, Rule, Severity
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import binade_of
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow

numbers = st.none() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 65536.0, 2.0**-24])
scales = st.none() | st.integers(-126, 127).map(lambda exponent: 2.0**exponent)


@st.composite
def runs_of_rows(draw, optimizers=2, largest=24):
    """Rows of optimizers that take turns as they like, each with its own steps from 1 on."""
    taken = {}
    rows = []
    for order in range(draw(st.integers(0, largest))):
        optimizer = draw(st.integers(0, optimizers - 1))
        taken[optimizer] = taken.get(optimizer, 0) + 1
        rows.append(
            StepRow(
                optimizer=optimizer,
                step=taken[optimizer],
                seconds=order / 8,
                loss=draw(numbers),
                scale=draw(scales),
                norm=draw(numbers),
                skipped=draw(st.booleans()),
                lr=draw(numbers),
            )
        )
    return rows


def census_of(values, zeros=0, infs=0, nans=0):
    """A census of magnitudes, counted the plain way."""
    binades = {}
    for value in values:
        binades[binade_of(value)] = binades.get(binade_of(value), 0) + 1
    return Census(
        binades=binades,
        zeros=zeros,
        infs=infs,
        nans=nans,
        amax=max(values, default=0.0),
        amin=min(values, default=0.0),
        sum_squares=math.fsum(value * value for value in values if value < 1e100),
    )


magnitudes = st.floats(min_value=2.0**-149, max_value=1e38) | st.integers(-30, 30).map(lambda k: 2.0**k)
counts = st.integers(0, 3)
censuses = st.builds(census_of, st.lists(magnitudes, max_size=6), counts, counts, counts)


@st.composite
def samples(draw, optimizers=2):
    first = draw(st.integers(1, 10**6))
    steps = draw(st.integers(1, 5))
    return LayerSample(
        optimizer=draw(st.integers(0, optimizers - 1)),
        first=first,
        last=first + steps - 1,
        steps=steps,
        scale=draw(scales),
        layers=draw(st.dictionaries(st.sampled_from(["a", "b.weight", 'odd "name"\n', "ß"]), censuses)),
    )


def sample(step, optimizer=0, names=("weight", "bias"), scale=65536.0):
    """A small sample that differs from step to step."""
    values = [2.0 ** -(step % 20), 1.5 * 2.0 ** -(step % 7), 0.7]
    layers = {name: census_of(values, zeros=step % 3, infs=int(step % 50 == 0)) for name in names}
    return LayerSample(optimizer=optimizer, first=step, last=step, scale=scale, layers=layers)


def row(step, optimizer=0, **changes):
    values = {"seconds": step / 100, "loss": 2.0 + (step * 37 % 101) / 100, "norm": (step * 53 % 97) / 10}
    return StepRow(optimizer=optimizer, step=step, **(values | {"scale": 65536.0, "lr": 1e-3} | changes))


RULE = Rule(
    code="AMP998",
    name="made-up-for-tests",
    severity=Severity.WARNING,
    summary="Something.",
    why="Because.",
    fix="Do otherwise.",
    bad="this()",
    good="that()",
)
WORSE = RULE.but(code="AMP999", name="worse-made-up", severity=Severity.ERROR)


def seen(message="it went wrong", *, rule=RULE, line=3, rank=None, step=None, **parts):
    place = Place(file="train.py", line=line, rank=rank, step=step)
    return CountedFinding(finding=rule.at(place, message, evidence={"share": 0.25}), **parts)


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def change_manifest(folder, **changes):
    (folder / "manifest.json").write_text(json.dumps(manifest_of(folder) | changes))
