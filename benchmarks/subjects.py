"""The four models of the compare benchmark, each a factory for ``ampwise bench benchmarks.subjects:gpt2``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPT2_124M, GPT_4M, Shape

__all__ = ["GPT_1_3B", "RelevanceScorer", "ResNet50", "gpt", "gpt2", "gpt_1_3b", "relevance", "resnet50", "small_gpt"]

Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]

GPT_1_3B = Shape(name="GPT 1.3B", layers=24, width=2048, heads=16, vocabulary=50304, length=1024, batch=8)
RESNET_ROWS, RESNET_SIDE, RESNET_CLASSES = 128, 224, 1000
RELEVANCE_ROWS, PATCHES, FEATURES = 64, 256, 512


def gpt2(batch: int = GPT2_124M.batch) -> Made:
    """GPT-2 124M on sequences of 1,024 tokens."""
    return gpt(replace(GPT2_124M, batch=batch))


def gpt_1_3b(batch: int = GPT_1_3B.batch) -> Made:
    """A GPT of GPT-3 XL's size."""
    return gpt(replace(GPT_1_3B, batch=batch))


def small_gpt(batch: int = GPT_4M.batch) -> Made:
    """One for a CPU."""
    return gpt(replace(GPT_4M, batch=batch))


def gpt(shape: Shape) -> Made:
    """One of any size."""
    model = GPT(shape)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), model


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.around(x), inplace=True)


class ResNet50(nn.Module):
    """Four stages of bottlenecks."""

    def __init__(self, classes: int = RESNET_CLASSES, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            strides = [min(stage, 1) + 1, *[1] * (count - 1)]
            stages.append(
                nn.Sequential(*(Bottleneck(inputs if not i else 4 * inner, inner, s) for i, s in enumerate(strides)))
            )
            inputs = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.pool(F.relu(self.bn1(self.conv1(images)), inplace=True)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet50(batch: int = RESNET_ROWS) -> Made:
    """ResNet-50 on images of 224×224, in channels-last."""
    model = ResNet50().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, RESNET_SIDE, RESNET_SIDE).to(memory_format=torch.channels_last)
    labels = torch.randint(RESNET_CLASSES, (batch,))
    return model, (images, labels), lambda images, labels: F.cross_entropy(model(images), labels)


class RelevanceScorer(nn.Module):
    """Scores patches of an image against a query by two opposed heads: one for what can be left out, one for what is
    particular. What counts is the small difference of their scores, which is where few bits of mantissa hurt.
    """

    def __init__(self, features: int = FEATURES, layers: int = 4, heads: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            features, heads, 4 * features, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.query = nn.Linear(features, features)
        self.compress, self.particularize = _head(features), _head(features)

    def forward(self, patches: Tensor, query: Tensor) -> Tensor:
        encoded = self.encoder(patches + self.query(query).unsqueeze(1))
        tension = self.compress(encoded) - self.particularize(encoded)
        return tension.squeeze(-1)  # type: ignore[no-any-return]


def _head(features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Linear(features, 1))


def relevance(batch: int = RELEVANCE_ROWS) -> Made:
    """The scorer, trained to pick the patch that the query is of."""
    model = RelevanceScorer()
    patches = torch.randn(batch, PATCHES, FEATURES)
    wanted = torch.randint(PATCHES, (batch,))
    query = patches[torch.arange(batch), wanted] + 0.1 * torch.randn(batch, FEATURES)
    return model, (patches, query, wanted), lambda p, q, w: F.cross_entropy(model(p, q).float(), w)
