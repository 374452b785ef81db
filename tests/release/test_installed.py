"""The wheel in an environment with nothing else: what a user has after `pip install ampwise`, without torch."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from .conftest import clean, site_packages

pytestmark = pytest.mark.nightly  # `make release` has these, too
SCRIPT = """
import torch

scaler = torch.cuda.amp.GradScaler()
scaler.scale(loss).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""
FIXTURES = Path(__file__).parent / "fixtures"
READ = ["formats", "gpu", "advise --gpu h200", "explain AMP101", "gpu h200 --json", "check --help"]
NEEDS_TORCH = ["bench", "diff", "search", "align", "memory", "replay"]


@pytest.fixture
def here(tmp_path):
    """A folder with a script in it, as a user's."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_it_is_the_wheel_that_runs(installed, command, here):
    """Not the checkout, nor anything that is installed beside it."""
    code = "import ampwise, sys; print(ampwise.__file__); print(*sys.path, sep='\\n')"
    python = installed / "env" / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd=here, env=clean({}), capture_output=True, text=True, check=True)
    file, *paths = done.stdout.splitlines()
    assert Path(file).is_relative_to(site_packages(installed))
    others = {path for path in paths if path and not Path(path).resolve().is_relative_to(installed)}
    assert not [path for path in others if "site-packages" in path or path.endswith("src")]


def test_no_torch_is_there(installed, here):
    python = installed / "env" / "bin" / "python"
    done = subprocess.run([python, "-c", "import torch"], cwd=here, env=clean({}), capture_output=True, text=True)
    assert "No module named 'torch'" in done.stderr


def test_the_version(command, project, here):
    assert command("--version", cwd=here).stdout == f"ampwise {project['version']}\n"


@pytest.mark.parametrize("words", READ, ids="ampwise {}".format)  # an id "gpu" would ask for one
def test_what_reads_works_without_torch(command, here, words):
    done = command(*words.split(), cwd=here)
    assert done.stdout
    assert done.stderr == ""


def test_a_script_is_checked_and_fixed(command, here, project):
    told = command("check", "--output-format", "sarif", "train.py", cwd=here, code=1)
    (run,) = json.loads(told.stdout)["runs"]
    assert run["tool"]["driver"]["version"] == project["version"]
    assert {"AMP101", "AMP310"} <= {result["ruleId"] for result in run["results"]}
    assert '+scaler = torch.amp.GradScaler("cuda")' in command("check", "--diff", "train.py", cwd=here, code=1).stdout


def test_a_record_becomes_a_page(command, here):
    """Templates, scripts, styles and the vendored code are all there."""
    with zipfile.ZipFile(max(FIXTURES.glob("*.zip"))) as archive:
        archive.extractall(here)
    assert "clip-scaled-grads" in command("report", "record", cwd=here).stdout
    command("report", "record", "-o", "page.html", cwd=here)
    page = (here / "page.html").read_text()
    assert "uPlot" in page
    assert "AMP101" in page


def test_a_skill_is_written(command, here):
    command("skill", "-o", "skill", cwd=here)
    assert (here / "skill" / "SKILL.md").read_text().startswith("---\nname: mixed-precision\n")


@pytest.mark.parametrize("verb", NEEDS_TORCH)
def test_what_computes_says_what_to_install(command, here, verb):
    words = ["--params", "7B"] if verb == "memory" else ["train:make"]
    done = command(verb, *words, cwd=here, code=2)
    assert done.stderr == f"ampwise: error: ampwise {verb} needs torch: pip install 'ampwise[torch]'\n"


def test_an_agents_door_says_what_to_install(command, here):
    assert 'pip install "ampwise[mcp]"' in command("mcp", cwd=here, code=2).stderr


# --- with torch

TRAIN = """
import json, os, sys
sys.path.append({torch!r})
import torch

torch.optim.AdamW([torch.ones(1, requires_grad=True)])  # which loads what takes longest, before the fork

def trained():
    import ampwise
    from ampwise.numbers.census import cpu
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    engine = ampwise.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), "bf16", clip_norm=1.0)
    step = engine.step(lambda x: model(x).square().mean(), torch.ones(3, 4))
    counts = {{name: census.as_dict() for name, census in engine.census().items()}}
    return [ampwise.__file__, cpu._native is not None, step.skipped, step.loss, step.grad_norm, counts]

for before in [[], [{bare!r}]]:
    sys.stdout.flush()
    if os.fork() == 0:
        sys.path[:0] = before
        print(json.dumps(trained()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def trained(installed, bare_wheel, tmp_path_factory):
    """A step of the installed wheel, and one of the wheel that was made without a compiler; torch is loaded once."""
    here = tmp_path_factory.mktemp("trained")
    bare = here / "bare"
    with zipfile.ZipFile(bare_wheel) as archive:
        archive.extractall(bare)
    code = TRAIN.format(torch=str(Path(torch.__file__).parents[1]), bare=str(bare))
    python = installed / "env" / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd=here, env=clean({}), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files, *facts = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert Path(files[0]).is_relative_to(site_packages(installed))
    assert Path(files[1]).is_relative_to(bare)
    return facts


def test_a_step_is_trained(trained):
    _, (skipped, _), (loss, _), (norm, _), (counts, _) = trained
    assert not skipped
    assert loss > 0
    assert norm > 0
    assert set(counts) == {"weight", "bias"}


def test_without_a_compiler_the_same_is_counted_by_torch(trained):
    native, *facts = trained
    assert native == (True, False)
    assert all(with_c == without for with_c, without in facts)
