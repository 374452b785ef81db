"""Every piece of Python on the page about the Engine runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
PIECES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def names(tmp_path):
    """What the page takes for granted."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.body, model.lm_head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)
    model.body.router = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(10)]
    generator, discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
    engine, path = ampwise.Engine(model, optimizer, "fp32"), tmp_path / "checkpoint.pt"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
    torch.save(saved, path)

    def engine_of(network):
        return ampwise.Engine(network, torch.optim.Adam(network.parameters()), "fp32")

    return {
        "torch": torch,
        "F": F,
        "ampwise": ampwise,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "loader": loader,
        "evaluate": lambda: model(loader[0][0]),
        "padding": 0,
        "criterion": nn.CrossEntropyLoss(),
        "engine": engine,
        "path": path,
        "G": generator,
        "D": discriminator,
        "noise": lambda: torch.randn(8, 2),
        "generating": engine_of(generator),
        "discriminating": engine_of(discriminator),
        "gan_loss": lambda real, fake: F.softplus(-real).mean() + F.softplus(fake).mean(),
        "fool_loss": lambda fake: F.softplus(-fake).mean(),
    }


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.strip().splitlines()[0])
def test_it_runs(names, piece):
    if "for real in loader" in piece:
        names["loader"] = [x for x, _ in names["loader"]]
    exec(compile(piece, PAGE.name, "exec"), names)
    if "def loss_fn" in piece:
        assert names["engine"].step(names["loss_fn"], torch.randn(8, 4), torch.randint(0, 3, (8,))).loss > 0


def test_there_are_pieces():
    assert len(PIECES) >= 8
