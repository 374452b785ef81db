import re

from ampwise.finding import Edit, Severity
from ampwise.report.printers.outputs import full


def test_a_finding_in_a_file(finding, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("loss.backward()\n    clip_grad_norm_(parameters, 1.0)\n")
    place = {"file": str(script), "line": 2, "column": 5, "end_line": 2, "end_column": 37}
    text = full.render([finding(evidence={"scale": 65536.0, "ratio": 1 / 3}, **place)])
    assert text.replace(str(script), "train.py") == (
        "error[AMP101] clip-scaled-grads: gradients are still scaled\n"
        "  --> train.py:2:5\n"
        "  2 | clip_grad_norm_(parameters, 1.0)\n"
        "    | ^^^^^^^^^^^^^^^\n"
        "  = scale: 65536\n"
        "  = ratio: 0.333333\n"
        "  help: Call scaler.unscale_(optimizer) first.\n"
        "\n"
        "Found 1 finding (1 error).\n"
    )


def test_a_finding_without_a_file(finding):
    text = full.render([finding("overflow", severity=Severity.INFO, parameter="w", step=3, fix="Lower the scale.")])
    assert text == (
        "note[AMP101] clip-scaled-grads: overflow\n"
        "  --> w at step 3\n"
        "  help: Lower the scale.\n"
        "\n"
        "Found 1 finding (1 note).\n"
    )


def test_a_finding_nowhere_has_no_arrow(finding):
    assert "-->" not in full.render([finding()])


def test_later_lines_of_a_message_cannot_pass_for_a_finding(finding):
    lines = full.render([finding("first\nerror[AMP999] forged: x", fix="one\ntwo")]).splitlines()
    assert lines[1] == "  error[AMP999] forged: x"
    assert lines[3] == "        two"


def test_hostile_text_is_literal(finding):
    text = full.render([finding("[red]a\x1b[31m", file="\x1b]0;x\x07.py", evidence={"k\n": "v\x1b"})])
    assert r"[red]a\x1b[31m" in text
    assert r"--> \x1b]0;x\x07.py" in text
    assert r"= k\n: v\x1b" in text


def test_colour_changes_only_the_colour(finding, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    findings = [finding(file=str(script), line=1, column=1, evidence={"a": 1})]
    coloured = full.render(findings, colour=True)
    assert coloured != full.render(findings)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == full.render(findings)


def test_what_fix_fixes_has_a_star_in_colour_too(finding):
    findings = [finding(file="-", line=1, edits=[Edit(1, 1, 1, 2, "y")])]
    coloured = full.render(findings, colour=True, texts={"-": "x = 1\n"})
    plain = full.render(findings, texts={"-": "x = 1\n"})
    assert plain.startswith("error[AMP101] [*] clip-scaled-grads: ")
    assert plain.endswith("[*] 1 fixable with `ampwise check --fix -`.\n")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_a_terminals_width_is_kept_and_the_carets_stay_under_their_code(finding):
    line = f"loss = first_{'x' * 30}(1) + second_{'y' * 30}(2) + bad(3)\n"
    start = line.index("bad(3)") + 1
    place = {"file": "a.py", "line": 1, "column": start, "end_line": 1, "end_column": start + len("bad(3)")}
    text = full.render([finding("word " * 40, fix="word " * 40, **place)], texts={"a.py": line}, width=70)
    assert max(map(len, text.splitlines())) <= 70
    code, marks = [each for each in text.splitlines() if " | " in each]
    assert code[marks.index("^") : marks.rindex("^") + 1] == "bad(3)"
