"""The examples of integrations, run as they are."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
NEEDS = {"lightning": "pytorch_lightning", "transformers": "transformers", "accelerate": "accelerate"}
SCRIPTS = sorted(EXAMPLES.glob("*/*.py"))
LAST_WORDS = {
    "accelerate/train.py": r"loss 1\.\d+, skipped 0",
    "lightning/fabric.py": r"loss [01]\.\d+, skipped 0",
    "lightning/guarded.py": r"61 steps, passed over: \[\(0, 5\), \(0, 6\), \(0, 7\)\]",
    "lightning/train.py": r"32 steps, loss 0\.\d+",
    "timm/train.py": r"loss \d\.\d+, updates 16, skipped 0",
    "torchtune/recipe.py": r"loss [0-3]\.\d+, skipped 1",
    "transformers/guarded.py": r"16 steps, saved after 16",
    "transformers/train.py": r"\{.*'train_loss'.*\}",
}
WATCHED = ("lightning/train.py", "transformers/train.py")


def name_of(script):
    return script.relative_to(EXAMPLES).as_posix()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_it_runs(script, capsys):
    pytest.importorskip(NEEDS.get(script.parent.name, "torch"))
    if script.parent.name == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks, which are no failures where a user runs it
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr()
    assert re.fullmatch(LAST_WORDS[name_of(script)], said.out.strip().splitlines()[-1])
    assert ("keeps the record" in said.err) == (name_of(script) in WATCHED)


def test_the_page_lists_them_all():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({name_of(script)})" in page for script in SCRIPTS)
