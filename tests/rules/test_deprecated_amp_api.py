"""Rewriting torch.cuda.amp: each finding's edits are complete by themselves, and what is doubtful stays."""

import runpy
import warnings
from pathlib import Path

import pytest

from ampwise.check.apply_edits import apply_fixes
from ampwise.check.source.project import Project
from ampwise.check.source.script import script_from_text
from ampwise.rules.amp3xx_formats.deprecated_amp_api import check_source

FIXED = Path(__file__).parent / "fixtures" / "fixed" / "deprecated_amp_api.py"


def findings_in(text, path="train.py"):
    return list(check_source(Project([path], {path: text}).code(path)))


def fixed(text, findings, path="train.py"):
    return apply_fixes(script_from_text(text, path), findings, unsafe=False).text


@pytest.mark.parametrize(
    "text",
    [
        "from torch.cuda.amp import autocast\n@autocast\ndef f(x): return x\n",
        "from torch.cuda.amp import autocast\nfrom functools import partial\ncast = partial(autocast, enabled=True)\n",
        "from torch.cuda.amp import autocast\ndef f(kind=autocast): return kind()\n",
        "from torch.cuda.amp import autocast\nautocast(*flags)\n",
        "from torch.cuda.amp import autocast\nautocast((flag))\n",
        "from torch.cuda.amp import autocast\ndef f(autocast): autocast()\n",
        "from torch.cuda.amp import autocast\nfrom torch import autocast\nautocast()\n",
        "from torch.cuda.amp import autocast\n__all__ = ['autocast']\n",
        "from torch.cuda.amp import *\nautocast()\n",
        "from torch.cuda.amp.grad_scaler import GradScaler, OptState\nGradScaler()\n",
        "try:\n    from torch.cuda.amp import GradScaler\nexcept ImportError:\n    GradScaler = None\n",
        "import torch\nif torch.__version__ >= '1.6':\n    scaler = torch.cuda.amp.GradScaler()\n",
        "import torch\ncontext = torch.cuda.amp.autocast\n",
        "import torch\nmake = torch.cuda.amp.GradScaler\nscaler = torch.cuda.amp.GradScaler()\n",
        "from torch.cuda import amp\namp.autocast()\nprint(amp)\n",
        "from torch.cuda import amp, nccl\namp.autocast()\n",
        "from torch.cuda.amp import custom_fwd\nf = custom_fwd(g)\n",
    ],
)
def test_reports_but_leaves_alone_what_cannot_be_rewritten_beyond_doubt(text):
    findings = findings_in(text)
    assert findings
    assert [finding.edits for finding in findings] == [()] * len(findings)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\ntorch.cuda.amp.autocast()\n", 'import torch\ntorch.amp.autocast("cuda")\n'),
        (
            "import torch\ntorch.cuda.amp.autocast(on, torch.half, cache_enabled=False)\n",
            'import torch\ntorch.amp.autocast("cuda", enabled=on, dtype=torch.half, cache_enabled=False)\n',
        ),
        (
            "import torch as t\nt.cuda.amp.GradScaler(1024.0, 2, enabled=on)\n",
            'import torch as t\nt.amp.GradScaler("cuda", 1024.0, 2, enabled=on)\n',
        ),
        ("import torch\ntorch.cpu.amp.autocast()\n", 'import torch\ntorch.amp.autocast("cpu")\n'),
        (
            "from torch.cuda.amp import autocast as cast\nwith cast(**words): pass\n",
            'from torch.amp import autocast as cast\nwith cast("cuda", **words): pass\n',
        ),
        (
            "import torch.cuda.amp as amp\nscaler = amp.GradScaler(\n    enabled=on,\n)\n",
            'import torch.amp as amp\nscaler = amp.GradScaler(\n    "cuda",\n    enabled=on,\n)\n',
        ),
        (
            "from torch.cuda import amp as mixed\nwith mixed.autocast(), mixed.autocast(): pass\n",
            'from torch import amp as mixed\nwith mixed.autocast("cuda"), mixed.autocast("cuda"): pass\n',
        ),
        (
            "from torch.cuda.amp import (\n    GradScaler,  # scales\n)\ndef f(s: GradScaler | None): pass\n",
            "from torch.amp import (\n    GradScaler,  # scales\n)\ndef f(s: GradScaler | None): pass\n",
        ),
    ],
)
def test_rewrites(before, after):
    assert fixed(before, findings_in(before)) == after
    assert findings_in(after) == []


@pytest.mark.parametrize("left", [*range(11), None])
def test_works_however_the_findings_are_split(left, tmp_path):
    """With any one finding left out (as by a ``noqa``), or any one made alone, the script still runs."""
    text = FIXED.read_text()
    findings = findings_in(text)
    assert len(findings) == 11
    ways = [findings] if left is None else [findings[:left] + findings[left + 1 :], [findings[left]]]
    for number, way in enumerate(ways):
        script = tmp_path / f"fixed{number}.py"
        script.write_text(fixed(text, way))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(script), run_name="__main__")


OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
NEW = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'


@pytest.mark.parametrize(
    ("name", "text", "is_old"),
    [
        ("requirements.txt", "numpy\ntorch==1.13.1\n", True),
        ("requirements-dev.txt", "torch[cuda]>=2.0,<3  # any\n", True),
        ("requirements.txt", "torch<2.4", True),
        ("requirements/base.txt", "torch~=2.1.0", True),
        ("pyproject.toml", "[project]\ndependencies = [\"torch>=1.10; python_version > '3.8'\"]\n", True),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = {version = "^2.0"}\n', True),
        ("setup.cfg", "[options]\ninstall_requires =\n    torch>=1.8\n", True),
        ("setup.py", "setup(install_requires=['torch >= 1.8'])\n", True),
        ("pyproject.toml", '[tool.ampwise]\ntarget-torch = "2.2"\n', True),
        ("requirements.txt", "torch\ntorchvision==0.13\ntorch-geometric==1.0\n# torch==1.0\n", False),
        ("requirements.txt", "torch==2.4.1+cu118", False),
        ("requirements.txt", "torch<2.5", False),
        ("ampwise.toml", 'target-torch = "2.6"', False),
    ],
)
def test_no_safe_fix_for_a_torch_without_the_new_names(name, text, is_old, tmp_path, monkeypatch, capsys):
    """The new name is an ImportError or an AttributeError there."""
    from ampwise.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    script, file = tmp_path / "src" / "train.py", tmp_path / name
    for each, content in ((script, OLD), (file, text)):
        each.parent.mkdir(exist_ok=True)
        each.write_text(content)
    if name == "ampwise.toml":  # the setting wins
        (tmp_path / "requirements.txt").write_text("torch==1.13")
    main(["check", "--output-format=full", "src"])
    said = capsys.readouterr().out
    assert "torch 2.4" in said
    assert ("Not a safe fix: " in said) == is_old
    main(["check", "--fix", "src"])
    assert script.read_text() == (OLD if is_old else NEW)
    main(["check", "--fix", "--unsafe-fixes", "src"])
    assert script.read_text() == NEW
