"""The five models of the search benchmark, small enough to train a thousand steps in emulated formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import GPT, Shape
from benchmarks.subjects import RelevanceScorer, ResNet50

__all__ = ["MODELS", "Chain", "Task", "chain"]

Batch = tuple[Tensor, ...]

OTHERS = 10**9  # added to a step for numbers that have nothing to do with its own


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its loss, and a batch for each step: the same numbers for the same step."""

    name: str
    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Callable[[int], Batch]
    lr: float = 1e-3


def gpt(device: torch.device) -> Task:
    """Predicts the next letter of words from a small vocabulary; the head has the weights of the embedding."""
    shape = Shape(name="small GPT", layers=2, width=64, heads=4, vocabulary=64, length=32, batch=16)
    model = GPT(shape).to(device)
    words = torch.randint(1, 64, (32, 6))
    text = (
        torch.cat([words[torch.randint(32, (4096,))], torch.zeros(4096, 1, dtype=torch.long)], 1).flatten().to(device)
    )

    def batch(step: int) -> Batch:
        starts = torch.randint(len(text) - shape.length - 1, (shape.batch, 1), generator=_numbers(step))
        tokens = text[(starts + torch.arange(shape.length + 1)).to(device)]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Task(name="a small GPT", model=model, loss=model, batch=batch)


def resnet(device: torch.device) -> Task:
    """Ten classes of images, a pattern each with twice as much noise, and some labels wrong."""
    model = ResNet50(classes=10, blocks=(1, 1, 1, 1), width=8).to(device)
    patterns = torch.randn(10, 3, 32, 32, device=device)

    def batch(step: int) -> Batch:
        labels = torch.randint(10, (32,), generator=_numbers(step)).to(device)
        noise = torch.randn(32, 3, 32, 32, generator=_numbers(step + 2 * OTHERS)).to(device)
        return patterns[labels] + 2.0 * noise, _some_wrong(labels, 10, step)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    return Task(name="a small ResNet", model=model, loss=loss, batch=batch)


class MixtureOfExperts(nn.Module):
    """A router picks two of eight experts for each token. All are computed, so that shapes do not depend on it."""

    def __init__(self, width: int, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        shares = self.router(given).float().softmax(-1)
        top = shares.topk(self.chosen, -1)
        weights = torch.zeros_like(shares).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
        outputs = torch.stack([expert(given) for expert in self.experts], -1)
        return x + (outputs * weights.unsqueeze(-2)).sum(-1)


def moe(device: torch.device) -> Task:
    """Points of several clusters, each with a rule of its own for the label; some are wrong."""
    width, clusters, classes = 64, 8, 10
    model = nn.Sequential(nn.Linear(16, width), MixtureOfExperts(width), nn.LayerNorm(width), nn.Linear(width, classes))
    model.to(device)
    centres, rules = 3 * torch.randn(clusters, 16), torch.randn(clusters, 16, classes)

    def batch(step: int) -> Batch:
        which = torch.randint(clusters, (128,), generator=_numbers(step))
        around = torch.randn(128, 16, generator=_numbers(step + 2 * OTHERS))
        labels = torch.einsum("ni,nic->nc", around, rules[which]).argmax(-1)
        return (centres[which] + around).to(device), _some_wrong(labels, classes, step).to(device)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), labels)

    return Task(name="a mixture of experts with a router", model=model, loss=loss, batch=batch)


class Contrastive(nn.Module):
    """Two towers; what goes together is to be more alike than what does not, by a temperature of 0.02."""

    def __init__(self, temperature: float = 0.02) -> None:
        super().__init__()
        self.image, self.text = _tower(48), _tower(24)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        one, two = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return (one @ two.T) * self.scale.exp()


def _tower(inputs: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32))


def contrastive(device: torch.device) -> Task:
    """Two noisy views of the same hidden numbers."""
    model = Contrastive().to(device)
    views = torch.randn(8, 48), torch.randn(8, 24)

    def batch(step: int) -> Batch:
        hidden = torch.randn(64, 8, generator=_numbers(step))
        seen = [hidden @ view for view in views]
        numbers = _numbers(step + OTHERS)
        noise = [torch.randn(each.shape, generator=numbers) for each in seen]
        return tuple((each + 2.0 * much).to(device) for each, much in zip(seen, noise, strict=True))

    def loss(image: Tensor, text: Tensor) -> Tensor:
        logits = model(image, text).float()
        labels = torch.arange(len(logits), device=device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Task(name="a contrastive model with a temperature", model=model, loss=loss, batch=batch)


def relevance(device: torch.device) -> Task:
    """Which of 16 patches is the query of? Some answers are wrong."""
    features, patches = 64, 16
    model = RelevanceScorer(features, layers=2, heads=4).to(device)

    def batch(step: int) -> Batch:
        numbers = _numbers(step)
        shown = torch.randn(32, patches, features, generator=numbers)
        wanted = torch.randint(patches, (32,), generator=numbers)
        query = shown[torch.arange(32), wanted] + 0.5 * torch.randn(32, features, generator=numbers)
        return shown.to(device), query.to(device), _some_wrong(wanted, patches, step).to(device)

    def loss(shown: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(shown, query).float(), wanted)

    return Task(name="a relevance scorer of two opposed heads", model=model, loss=loss, batch=batch)


MODELS: dict[str, Callable[[torch.device], Task]] = {
    "gpt": gpt,
    "resnet": resnet,
    "moe": moe,
    "contrastive": contrastive,
    "relevance": relevance,
}


class Chain(nn.Module):
    """Layers in a row, some of which subtract what is nearly equal: they do not stand few bits."""

    def __init__(self, layers: int, planted: tuple[int, ...], width: int = 32) -> None:
        super().__init__()
        self.shared = width // 2
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        for place in planted:
            with torch.no_grad():
                weight = self.layers[place].weight
                assert isinstance(weight, Tensor)
                weight[:, self.shared :] = -weight[:, : self.shared] * (1 + 1e-2 * torch.randn(width, self.shared))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            given = F.layer_norm(x, x.shape[-1:])[..., : self.shared]
            made = F.layer_norm(layer(torch.cat([given, given], -1)), x.shape[-1:])
            x = x + torch.tanh(made) / math.sqrt(len(self.layers))
        return x


def chain(layers: int, planted: tuple[int, ...], device: torch.device) -> Task:
    """A chain that is to shift what it is given."""
    model = Chain(layers, planted).to(device)

    def batch(step: int) -> Batch:
        return (torch.randn(64, 32, generator=_numbers(step)).to(device),)

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x.roll(1, -1))

    return Task(name=f"{layers} layers", model=model, loss=loss, batch=batch)


def _some_wrong(labels: Tensor, classes: int, step: int) -> Tensor:
    """One in five anything at all, so that the loss does not go to zero, where a percent of it is nothing."""
    numbers = _numbers(step + OTHERS)
    drawn = torch.randint(classes, labels.shape, generator=numbers).to(labels.device)
    wrong = torch.rand(labels.shape, generator=numbers).to(labels.device) < 0.2
    return torch.where(wrong, drawn, labels)


def _numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)
