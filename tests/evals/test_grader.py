"""The grader: answers that were labelled by hand, how claims are read, and what code in the sandbox may do."""

import re
from pathlib import Path

import pytest
from evals.grade import grade
from evals.labelled import labelled, misgraded
from evals.sandbox import Sandbox
from evals.scenarios import all_scenarios, chosen
from evals.statements import all_statements, code_blocks, prose_of

from ampwise.finding.registry import find_rule
from ampwise.tune.advise.claims import IDEAS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(seconds=3) as box:
        yield box


def test_seen_answers_are_graded_as_labelled(sandbox):
    answers = labelled("seen")
    assert len(answers) >= 120
    wrong = [(each.scenario, each.kind, graded.failed) for each, graded in misgraded(answers, sandbox)]
    assert not wrong


@pytest.mark.nightly  # minutes of forks, for figures that change with the grader only
def test_the_published_error_rates_are_those_of_now(sandbox):
    page = (ROOT / "docs" / "evals.md").read_text(encoding="utf-8")
    for which in ("seen", "unseen"):
        answers = labelled(which)
        wrong = list(misgraded(answers, sandbox))
        passed = sum(not each.right for each, _ in wrong)
        unclear = sum(each.right and graded.unclear for each, graded in wrong)
        right = sum(each.right for each in answers)
        failed = len(wrong) - passed - unclear
        row = f"| {which} | {passed} of {len(answers) - right} | {unclear} of {right} | {failed} of {right} |"
        assert row in page


def test_each_question_has_right_and_wrong_answers():
    labels = {(each.scenario, each.right) for which in ("seen", "unseen") for each in labelled(which)}
    assert {(name, right) for name in all_scenarios() for right in (True, False)} == labels


def test_scenarios_name_statements_that_have_a_source():
    scenarios, statements = all_scenarios(), all_statements()
    assert len(scenarios) >= 40
    assert {fact for each in scenarios.values() for fact in (*each.facts, *each.traps)} == set(statements)
    assert all(each.source.startswith("https://github.com/") for each in scenarios.values() if each.source)
    sections = re.findall(r'<a id="([\w-]+)"></a>', (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"))
    for statement in statements.values():
        page, _, section = statement.see.partition("#")
        if page == "docs/claims.md":
            assert section in sections, statement.name
        else:
            assert statement.see in IDEAS or find_rule(statement.see), statement.name


@pytest.mark.parametrize(
    ("prose", "side"),
    [
        ("BF16 needs a GradScaler.", True),
        ("BF16 does not need a GradScaler.", False),
        ("It is not true that BF16 needs a GradScaler.", False),
        ("It is not the case that BF16 does not need a GradScaler.", True),
        ('"BF16 needs a GradScaler" is a myth.', False),
        ("Many guides say that BF16 requires loss scaling. That is wrong.", False),
        ("Myth: BF16 needs a GradScaler.", False),
        ("Many guides say that BF16 requires loss scaling.", None),
        ("> BF16 needs a GradScaler", None),
        ("Does BF16 need a GradScaler?", None),
        ("If BF16 needed a GradScaler, you would see zeros.", None),
        ("BF16 and GradScaler.", None),
        ("bfloat16 still **requires** a `GradScaler`", True),
        ("FP16 needs a GradScaler. BF16 is wider.", None),
        ("BF16 is wider. It does not need a GradScaler.", False),
        ("```python\nuse('BF16 needs a GradScaler')\n```", None),
        ("```python\n# BF16 needs a GradScaler\n```", True),
    ],
)
def test_what_is_claimed(prose, side):
    sides = all_statements()["bf16-needs-a-scaler"].sides(prose_of(prose), asked=True)
    assert {each.asserts for each in sides} == (set() if side is None else {side})


def test_a_fact_that_is_not_found_is_unclear_and_a_wrong_one_fails(sandbox):
    (scenario,) = chosen(["scaler-with-bf16"])
    evasive = grade(scenario, "There are different opinions about that.", sandbox)
    wrong = grade(scenario, "BF16 needs a GradScaler.", sandbox)
    assert (evasive.passed, evasive.unclear, wrong.passed, wrong.unclear) == (False, True, False, False)


def test_code_is_the_last_python_block():
    answer = "```python\na\n```\ntext\n~~~py\nb\n~~~\n```console\n$ c\n```\n    ```\n"
    assert code_blocks(answer) == ["a\n", "b\n"]
    assert code_blocks("```python\nnever closed") == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("import socket\nsocket.create_connection(('localhost', 1))", "is refused in the sandbox"),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen is refused in the sandbox"),
        ("import os\nos.system('true')", "os.system is refused in the sandbox"),
        ("open('/tmp/evals-should-not-exist', 'w')", "open outside of the folder is refused in the sandbox"),
        ("import os\nos.remove('/tmp/evals-should-not-exist')", "os.remove outside of the folder is refused"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)", "os.kill is refused in the sandbox"),
        ("while True: pass", "it ran longer than 1 s"),
        ("import os\nos._exit(0)", "the process ended before the test did"),
        ("import sys\nsys.exit(0)", "the code does not run: SystemExit: 0"),
        ("import torch\ntorch.zeros(2**36)", "the code does not run: RuntimeError"),
        ("print('all is right')\nx = 2", "x is 2"),
        ("open('inside', 'w').write('x')\nx = 1", None),
    ],
)
def test_the_sandbox(code, wrong, sandbox):
    sandbox.seconds = 1 if "while" in code else 3
    found = sandbox.run(code, "expect(x == 1, f'x is {x}')")
    assert (found is None) if wrong is None else (wrong in found)
    assert not Path("/tmp/evals-should-not-exist").exists()


def test_a_guess_of_the_result_is_no_result(sandbox):
    code = "import os\nfor file in range(3, 40):\n    try: os.write(file, b'0' * 16 + b'\\n')\n    except OSError: pass"
    assert sandbox.run(code, "expect(x == 1, 'x is 2')") is not None
    assert sandbox.run("x = 1", "expect(x == 1, 'x is 2')") is None  # and it is still there


def test_answers_that_are_none(sandbox):
    (scenario,) = chosen(["clip-time"])
    for answer, why in (("", "it is empty"), ("x" * 200_001, "it is longer than 200,000 characters")):
        assert [mark.why for mark in grade(scenario, answer, sandbox).failed] == [why]
