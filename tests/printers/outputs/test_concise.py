from ampwise.finding import Severity
from ampwise.printers.outputs import concise


def test_one_line_each_and_a_summary(finding):
    findings = [
        finding("overflow", parameter="blocks.0.weight", step=4, severity=Severity.WARNING),
        finding(file="train.py", line=12, column=5),
    ]
    assert concise.render(findings) == (
        "train.py:12:5: AMP101 [error] clip-scaled-grads: gradients are still scaled\n"
        "blocks.0.weight at step 4: AMP101 [warning] clip-scaled-grads: overflow\n"
        "Found 2 findings (1 error, 1 warning).\n"
    )


def test_hostile_text_stays_on_its_line(finding):
    text = concise.render([finding("a\nb\x1b[2J[red]", file="x\ny.py")])
    assert text.splitlines()[0] == r"x\ny.py: AMP101 [error] clip-scaled-grads: a\nb\x1b[2J[red]"


def test_colour_is_by_severity(finding):
    assert "\x1b[1;33mAMP101\x1b[0m" in concise.render([finding(severity=Severity.WARNING)], colour=True)
