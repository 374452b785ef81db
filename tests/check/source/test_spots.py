"""How a message names another line: plain where it is in the same file and cell, in full elsewhere."""

import json

from ampwise.check.source.project import Project
from ampwise.finding.registry import find_rule
from ampwise.rules.amp1xx_order import clip_scaled_grads

BACKWARD = "from helper import limit\ndef step(model, opt, scaler, loss):\n    scaler.scale(loss).backward()\n"
REST = "    scaler.step(opt)\n    scaler.update()\n"
HELPER = "from torch.nn.utils import clip_grad_norm_\ndef limit(model):\n    clip_grad_norm_(model.parameters(), 1.0)\n"


def message(project, path):
    [finding] = [found for found in clip_scaled_grads.check_source(project.code(path)) if found.place.file == path]
    assert finding.rule is find_rule("AMP101")
    return finding.message


def test_in_the_same_file_the_number_is_enough():
    text = f"{HELPER}\n{BACKWARD}    clip_grad_norm_(model.parameters(), 1.0)\n{REST}"
    assert message(Project(["a.py"], {"a.py": text}), "a.py").endswith("the loss scale from line 7")


def test_in_another_file_it_is_named():
    texts = {"train.py": f"{BACKWARD}    limit(model)\n{REST}", "helper.py": HELPER}
    assert message(Project(list(texts), texts), "helper.py").endswith("the loss scale from line 3 of train.py")


def test_in_another_cell_it_is_named():
    cells = [
        f"import torch\n{HELPER}",
        "scaler = torch.amp.GradScaler('cuda')\nscaler.scale(loss).backward()",
        "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(opt)\nscaler.update()",
    ]
    notebook = {
        "cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": text} for text in cells],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    project = Project(["n.ipynb"], {"n.ipynb": json.dumps(notebook)})
    assert message(project, "n.ipynb").endswith("the loss scale from line 2 of cell 2")
