from ampwise.finding import Edit, Severity
from ampwise.report.printers.outputs import concise


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


def test_a_star_marks_what_fix_fixes_and_the_summary_counts(finding):
    edits = [Edit(1, 1, 1, 1, "x")]
    findings = [
        finding(file="a.py", line=1, edits=edits),
        finding(file="a.py", line=2, edits=edits, safe=False),
        finding(file="a.ipynb", cell=2, line=3, column=1),
    ]
    assert concise.render(findings) == (
        "a.ipynb:cell 2:3:1: AMP101 [error] clip-scaled-grads: gradients are still scaled\n"
        "a.py:1: AMP101 [*] [error] clip-scaled-grads: gradients are still scaled\n"
        "a.py:2: AMP101 [error] clip-scaled-grads: gradients are still scaled\n"
        "Found 3 findings (3 errors).\n"
        "[*] 1 fixable with `ampwise check --fix a.py` (1 more with `--unsafe-fixes`).\n"
    )
