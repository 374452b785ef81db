"""The Python on the pages about features runs, given what they take for granted; every command can be given."""

import dataclasses
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise.cli import build_parser
from ampwise.cli import commands as all_commands
from ampwise.train import engine as engines
from ampwise.train.precision.precision import EXTRA_PRECISIONS, ChosenPrecision

from .pages import Reading, commands, pieces

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16
ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md")), ROOT / "README.md"]
NOT_RUN = {  # fences that begin so, and what runs the same
    "from ampwise.integrations.lightning import Precision": "tests/integrations",
    "from ampwise.integrations.lightning import GuardCallback": "tests/integrations",
    "from ampwise.integrations.transformers import AmpwiseCallback": "tests/integrations",
    "from ampwise.integrations.transformers import GuardCallback": "tests/integrations",
    "from ampwise.integrations.accelerate import": "tests/integrations",
    "loss_scaler = NativeScaler": "tests/integrations",
    "self._guard = ampwise.GradScaler": "tests/integrations",
    "from ampwise.train.float8.torchao_backend import": "tests/train/float8, with torchao, which takes long to import",
    "sinks = Sinks(": "tests/runs/sinks",
    'engine = ampwise.Engine(model, optimizer, "bf16-pure")': "tests/train/low_bit, with torchao",
}
WIDE = 512  # below, a layer does not become FP8


def takes_for_granted(folder, width=8):
    """What the pages do not make themselves, new for each fence."""
    torch.manual_seed(0)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = [(torch.randn(8, 128), torch.randint(0, 3, (8,))) for _ in range(6)]
    engine, path = ampwise.Engine(model, optimizer, "fp32"), folder / "checkpoint.pt"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
    torch.save(saved, path)  # noqa: AMP204
    x, y = loader[0]
    return gan() | {
        "F": F,
        "Net": Net,
        "ampwise": ampwise,
        "batches": loader[:4],
        "criterion": nn.CrossEntropyLoss(),
        "engine": engine,
        "evaluate": lambda: model(x),
        "loader": loader,
        "loss": F.cross_entropy(model(x), y),
        "loss_fn": lambda x, y: F.cross_entropy(model(x), y),
        "model": model,
        "optimizer": optimizer,
        "padding": 0,
        "path": path,
        "scaler": ampwise.GradScaler("cpu"),
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "torch": torch,
        "x": x,
        "y": y,
    }


class Net(nn.Module):
    """Has the names that the pages name."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.wte = nn.Embedding(classes, width)
        self.body = nn.Sequential(nn.Linear(128, width), nn.Tanh())
        self.body.router = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.lm_head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.body(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.lm_head(x) + F.linear(x, self.wte.weight)


def gan():
    generator, discriminator = nn.Linear(2, 128), nn.Linear(128, 1)

    def engine_of(network):
        return ampwise.Engine(network, torch.optim.Adam(network.parameters()), "fp32")

    return {
        "D": discriminator,
        "G": generator,
        "discriminating": engine_of(discriminator),
        "fool_loss": lambda fake: F.softplus(-fake).mean(),
        "gan_loss": lambda real, fake: F.softplus(-real).mean() + F.softplus(fake).mean(),
        "generating": engine_of(generator),
        "noise": lambda: torch.randn(8, 2),
    }


class Feature(Reading):
    """Only its Python; on the CPU, where there is no GPU."""

    def _python(self, piece):
        if piece.text.startswith(tuple(NOT_RUN)):
            piece = dataclasses.replace(piece, not_run="see there")
        if not torch.cuda.is_available():
            piece = dataclasses.replace(piece, text=piece.text.replace('"cuda"', '"cpu"'))
        self.names |= takes_for_granted(self.folder, WIDE if "fp8" in self.page.name else 8)
        self._mean_what_it_means(piece.text)
        super()._python(piece)
        if "def make(" in piece.text:
            self.names["make"]()
        if "def loss_fn(" in piece.text and "def make(" not in piece.text:
            assert self.names["engine"].step(self.names["loss_fn"], self.names["x"], self.names["y"]).loss > 0

    def _mean_what_it_means(self, text):
        """Where a page takes something else for granted by the same name."""
        if "for real in loader" in text:
            self.names["loader"] = [torch.randn(8, 128) for _ in range(2)]
        if "loss_fn(model(x), y)" in text:
            self.names["loss_fn"] = nn.CrossEntropyLoss()
        if "p.grad" in text:
            self.names["loss"].backward()

    def _console(self, piece):
        pass

    def _text(self, piece):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "notify-send"  # what an alert starts
    program.touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    real, fp8 = engines.choose_precision, ChosenPrecision(EXTRA_PRECISIONS["fp8"], "in a test")
    monkeypatch.setattr(
        engines, "choose_precision", lambda asked, device: fp8 if asked == "fp8" else real(asked, device)
    )
    return tmp_path


def is_a_feature(page):
    return page.parent in (ROOT, ROOT / "docs") and page.stem != "start"


def with_python():
    return [page for page in PAGES if is_a_feature(page) and any(piece.language == "python" for piece in pieces(page))]


@pytest.mark.parametrize("page", with_python(), ids=lambda page: page.stem)
def test_its_python_runs(page, folder):
    Feature(page, folder, warm=None, names={}).go()


def test_few_are_not_run():
    fences = [piece.text for page in with_python() for piece in pieces(page) if piece.language == "python"]
    assert len(fences) >= 30
    for start in NOT_RUN:
        assert sum(text.startswith(start) for text in fences) == 1, f"{start}: no such fence, or several"


# --- commands

PLACEHOLDER = re.compile(r"[\[\]…|]|^NAME$")


def test_every_command_can_be_given():
    shown = {
        shlex.join(words)
        for page in PAGES
        for piece in pieces(page)
        for words, _ in commands(piece)
        if words[0] == "ampwise"
    }
    assert len(shown) > 100
    for command in sorted(shown):
        words = shlex.split(command)[1:]
        words = words[: next((at for at, word in enumerate(words) if word in ("|", "&&", ">", ">>", "<")), None)]
        if any(map(PLACEHOLDER.search, words)):
            assert words[0] in all_commands()  # a summary, such as [-o RUN]
            continue
        args, unknown = build_parser(words).parse_known_args(words)
        assert not unknown, command
        assert args.command is importlib.import_module(f"ampwise.cli.{words[0]}"), command
