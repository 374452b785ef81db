"""Agents are run in folders of their own; what they print is graded, counted and shown."""

import json
import re
import sys

import pytest
from evals.__main__ import main
from evals.agents import advisor, ask, command_of, guide
from evals.page import as_page
from evals.scenarios import chosen
from evals.trials import as_text, by_excuse, run_trials

from ampwise.errors import BadInput


def agent(tmp_path, code):
    script = tmp_path / "agent.py"
    script.write_text(code)
    return [sys.executable, "-S", str(script)]


def test_an_agent_gets_the_question_the_files_and_the_skill(tmp_path):
    command = agent(tmp_path, "import os, sys\nprint(sys.stdin.read())\nprint(sorted(os.listdir()), os.getcwd())")
    (scenario,) = chosen(["clip-time"])
    plain = ask(command, scenario, skill=False, seconds=20)
    with_skill = ask(command, scenario, skill=True, seconds=20)
    assert scenario.question() in plain.text
    assert "['train.py']" in plain.text
    assert "name: mixed-precision" not in plain.text
    assert "name: mixed-precision" in with_skill.text
    assert "['mixed-precision', 'train.py']" in with_skill.text
    assert plain.text.splitlines()[-1] != with_skill.text.splitlines()[-1].replace("'mixed-precision', ", "")


def test_an_agent_that_fails_or_hangs_fails_its_trial(tmp_path):
    (scenario,) = chosen(["scaler-with-bf16"])
    crash = agent(tmp_path, "import sys\nprint('BF16 needs none')\nsys.exit('out of credit')")
    assert ask(crash, scenario, skill=False, seconds=20).error == "exit code 1: out of credit"
    hang = agent(tmp_path, "import time\nprint('No.', flush=True)\ntime.sleep(60)")
    (trial,) = run_trials(hang, [scenario], skills=[False], times=1, seconds=1)
    assert not trial.passed
    assert trial.marks[0].why == "no answer within 1 s"
    with pytest.raises(BadInput, match="cannot be started"):
        ask(["no-such-agent"], scenario, skill=False, seconds=1)


def test_the_tables_and_the_page(tmp_path, capsys):
    says = "As you are on a deadline, to be safe: <script>alert(1)</script> BF16 needs a GradScaler."
    command = f"{sys.executable} -S -c \"import sys; sys.stdin.read(); print('{says}')\""
    out = tmp_path / "out"
    assert main(["--agent", command, "-n", "2", "--jobs", "2", "-o", str(out), "scaler-with-bf16", "digits"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^all +0 of 4 +0 of 4$", text, re.MULTILINE)
    record = json.loads((out / "results.json").read_text())
    assert len(record["trials"]) == 8
    assert not any(trial["passed"] for trial in record["trials"])
    page = (out / "page.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert "to be safe" in page


def test_excuses_are_counted_and_decide_nothing(tmp_path):
    command = agent(tmp_path, "print('To be safe, measure it: BF16 does not need a GradScaler.')")
    trials = run_trials(command, chosen(["scaler-with-bf16"]), skills=[False, True], times=1, seconds=20)
    assert [trial.passed for trial in trials] == [True, True]
    assert by_excuse(trials) == [("to be safe", {False: 1, True: 1})]
    assert "to be safe" in as_text(trials)
    assert "1 of 1" in as_page(trials, {"agent": "a", "date": "d", "ampwise": "1", "times": 1, "command": "c"})


def test_the_built_in_agents():
    (clip,) = chosen(["clip-time"])
    assert "scaler.unscale_(optimizer)" in advisor.answer(clip.question())
    (scaler,) = chosen(["scaler-with-bf16"])
    assert "GradScaler" in advisor.answer(scaler.question())
    (ranks,) = chosen(["ddp-scalers"])
    assert "can differ slightly" in guide.answer(ranks.question())
    (kept,) = chosen(["half-model"])
    assert "model.half()" in guide.answer(kept.question())
    assert command_of("advisor")[1:] == ["-m", "evals.agents.advisor"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--agent: expected a command that reads a prompt on stdin, or advisor or guide."),
        (["--agent", "'"], "No closing quotation"),
        (["--agent", "guide", "-n", "0"], "expected numbers above zero"),
        (["--agent", "guide", "nonsense"], "nonsense"),
    ],
)
def test_errors_say_what_to_give(words, why, capsys):
    assert main(words) == 2
    assert why in capsys.readouterr().err


def test_scenarios_are_listed(capsys):
    assert main(["--list", "step"]) == 0
    assert "step/clip-time: time, just tell me" in capsys.readouterr().out
