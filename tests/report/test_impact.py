"""What a finding cost a run, computed from its record."""

from ampwise.finding import Place
from ampwise.report.impact import impact_of
from ampwise.runs.rows import CountedFinding, StepBucket, StepRow


def taken(*scales):
    return [StepBucket.of(StepRow(step=step, loss=1.0, scale=scale)) for step, scale in enumerate(scales, 1)]


def test_a_scale_that_varied_gives_a_range_of_effective_clips(make_run, rules):
    clip = CountedFinding(
        finding=rules["clip"].at(Place(file="train.py", line=31), "m", evidence={"limit": 1.0}),
        count=3,
        first_step=1,
        last_step=3,
    )
    assert impact_of(clip, make_run(steps=taken(65536.0, 512.0, 8.0))) == (
        "effective clip 1.5e-05 to 0.12 instead of 1"
    )
    assert "effective" not in impact_of(clip, make_run(steps=taken(1.0, 1.0, 1.0)))


def test_a_resume_costs_a_number_of_skips_only_where_the_scale_had_settled(make_run, rules):
    save = CountedFinding(finding=rules["save"].at(Place(file="train.py", line=40), "m"))
    settled, falling = [65536.0, *[1024.0] * 30], [2.0 ** (16 - step) for step in range(30)]
    assert impact_of(save, make_run(steps=taken(*settled))) == "about 6 skipped steps at each resume"
    assert impact_of(save, make_run(steps=taken(*falling))) == ""
    collapse = rules["save"].but(code="AMP607", name="scale-collapse").at(Place(step=2), "m")
    assert impact_of(save, make_run(steps=taken(*settled), findings=[CountedFinding(finding=collapse)])) == ""
