"""What `ampwise align` is asked about in the tests."""

import torch
import torch.nn.functional as F
from torch import nn

from .models import CodeTied, LanguageModel

__all__ = ["aligned", "looks_at_values", "odd_mlp", "small_head", "tied", "tied_by_code"]


def odd_mlp(batch=4096):
    model = nn.Sequential(nn.Linear(1021, 4093), nn.GELU(), nn.Linear(4093, 1021))
    return model, torch.randn(batch, 1021), lambda x: model(x).square().mean()


def aligned(batch=4096):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1000))
    return model, (torch.randn(batch, 1024), torch.randint(1000, (batch,))), lambda x, y: F.cross_entropy(model(x), y)


def small_head(batch=4096):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 10))
    return model, (torch.randn(batch, 1024), torch.randint(10, (batch,))), lambda x, y: F.cross_entropy(model(x), y)


def _language(model, batch, length=512):
    tokens = torch.randint(1000, (batch, length))
    return model, (tokens, tokens), lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def tied(batch=8):
    return _language(LanguageModel(50257, 768), batch)


def tied_by_code(batch=8):
    return _language(CodeTied(50257, 768), batch)


def looks_at_values(batch=8):
    model = nn.Linear(13, 21)

    def loss_fn(x):
        return model(x).sum() * (2.0 if x.sum().item() > 0 else 1.0)

    return model, torch.ones(batch, 13), loss_fn
