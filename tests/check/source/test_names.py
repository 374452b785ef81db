"""Imports in their spellings, undone to the names that torch gives."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.check.source.names import Imports, dotted_text
from ampwise.check.source.project import Project


def imports_of(text, package=""):
    imports = Imports(package)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.add(node)
    return imports


def expression(text):
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("statement", "name", "qualified"),
    [
        ("import torch", "torch.amp.GradScaler", "torch.amp.GradScaler"),
        ("import torch.cuda.amp", "torch.cuda.amp.GradScaler", "torch.cuda.amp.GradScaler"),
        ("import torch as th", "th.autocast", "torch.autocast"),
        ("import torch.cuda.amp as amp", "amp.autocast", "torch.cuda.amp.autocast"),
        ("from torch.cuda import amp", "amp.autocast", "torch.cuda.amp.autocast"),
        ("from torch.cuda import amp as precision", "precision.autocast", "torch.cuda.amp.autocast"),
        ("from torch.amp import autocast as ac", "ac", "torch.amp.autocast"),
        ("from torch.cuda.amp import *", "GradScaler", "torch.cuda.amp.GradScaler"),
        ("from torch.amp import *", "autocast", "torch.amp.autocast"),
        ("from torch.amp import *", "anything_else", None),
        ("from somewhere import *", "GradScaler", None),
        ("import numpy", "torch.autocast", None),
        (
            "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from mine import autocast",
            "autocast",
            "torch.amp.autocast",
        ),
        ("def f():\n    import torch.nn.functional as F", "F.relu", "torch.nn.functional.relu"),
    ],
)
def test_names_are_followed_to_where_they_come_from(statement, name, qualified):
    assert imports_of(statement).qualified(expression(name)) == qualified


@pytest.mark.parametrize(
    ("statement", "package", "qualified"),
    [
        ("from .engine import train", "project.tools", "project.tools.engine.train"),
        ("from ..engine import train", "project.tools", "project.engine.train"),
        ("from . import train", "project", "project.train"),
        ("from .engine import train", "", "engine.train"),
    ],
)
def test_relative_imports_start_at_the_package(statement, package, qualified):
    assert imports_of(statement, package).qualified(expression("train")) == qualified


@pytest.mark.parametrize("node", ["f().x", "a[0].b", "1", "(a or b).c"])
def test_what_is_no_chain_of_names_has_no_name(node):
    assert dotted_text(expression(node)) is None
    assert imports_of("import a").qualified(expression(node)) is None


names = st.lists(st.from_regex(r"[a-z]{1,3}[0-9]", fullmatch=True), min_size=1, max_size=5)


@given(names)
def test_a_dotted_text_is_what_was_written(parts):
    assert dotted_text(expression(".".join(parts))) == ".".join(parts)


@given(names, st.from_regex(r"[A-Z]{1,3}", fullmatch=True))
def test_an_alias_changes_no_name(parts, alias):
    module = ".".join(parts)
    plain, aliased = imports_of(f"import {module}"), imports_of(f"import {module} as {alias}")
    assert plain.qualified(expression(f"{module}.f")) == aliased.qualified(expression(f"{alias}.f")) == f"{module}.f"


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import accelerate\nrunner = accelerate.Accelerator()", True),
        ("from accelerate import Accelerator", True),
        ("from accelerate.utils import set_seed", False),
        ("import accelerated\nrunner = accelerated.Accelerator()", False),
        ("from mine import accelerate", False),
        ("import pytorch_lightning as pl\npl.seed_everything(0)", False),
        ("import pytorch_lightning as pl\nclass Net(pl.LightningModule): pass", True),
        ("import lightning.pytorch as pl\ntrainer = pl.Trainer()", True),
        ("import deepspeed\nengine, *_ = deepspeed.initialize(model=net)", True),
        ("from deepspeed.ops.adam import DeepSpeedCPUAdam", False),
        ("from apex import amp", True),
        ("from apex.optimizers import FusedAdam", False),
        ("from ignite.engine import Engine, Events", False),
        ("from fastai.vision.all import *", True),
        ("from mmcv import Config", False),
    ],
)
def test_a_framework_is_used_if_the_part_of_it_that_steps_is(statement, found):
    assert Project(["a.py"], {"a.py": statement}).code("a.py").uses_framework is found
