"""The dtypes that CUDA autocast gives: our lists against torch's own, and names followed to what they hold."""

import ast
import re
from pathlib import Path

import pytest

from ampwise.check.source.project import Project
from ampwise.check.source.tensor_dtypes import HALF, KEEPS, LIKELY_HALF, SINGLE, TAKES_HALF, TAKES_SINGLE, tensor_dtypes

# These are made of operations on torch's lists, or go by another name there.
COMPOSED = {
    "square": "torch.square(x)",
    "softmin": "F.softmin(x, 0)",
    "normalize": "F.normalize(x)",
    "cross_entropy": "F.cross_entropy(x, x)",
    "pairwise_distance": "F.pairwise_distance(x, x)",
    "norm": "x.norm()",
    "vector_norm": "torch.linalg.vector_norm(x)",
    "matrix_norm": "torch.linalg.matrix_norm(x)",
}
# Those that a build of torch without CUDA can be asked about.
KEPT = (
    "sigmoid",
    "tanh",
    "relu",
    "abs",
    "sqrt",
    "mean",
    "std",
    "var",
    "neg",
    "clone",
    "max",
    "min",
    "median",
    "sin",
    "cos",
    "erf",
    "detach",
    "t",
    "tril",
    "triu",
)


@pytest.fixture(scope="module")
def listed():
    """The operations on each list of torch's header."""
    import torch

    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    blocks = dict(re.findall(r"#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)+.*)", text))
    return {name: set(re.findall(r"_\((?:ADD_NS\()?(\w+)", block)) for name, block in blocks.items()}


def test_what_takes_half_is_on_the_list_of_torch(listed):
    assert listed["AT_FORALL_LOWER_PRECISION_FP"] >= TAKES_HALF


def test_what_takes_single_is_on_the_list_of_torch_or_made_of_what_is(listed):
    single = listed["AT_FORALL_FP32"] | listed["AT_FORALL_FP32_SET_OPT_DTYPE"]
    assert single >= TAKES_SINGLE - COMPOSED.keys()


def test_what_keeps_its_dtype_is_on_no_list(listed):
    assert not KEEPS & set().union(*listed.values())


def test_fake_tensors_agree(warm, tmp_path):
    calls = COMPOSED | {name: f"x.{name}()" for name in KEPT}
    script = f"""
import torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
torch.set_autocast_enabled("cuda", True)
with FakeTensorMode(), torch.no_grad():
    x = torch.empty(4, 4, device="cuda", dtype=torch.float16)
    for name, call in {calls!r}.items():
        print(name, str(eval(call).dtype).removeprefix("torch."))
"""
    done = warm.run("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == dict.fromkeys(COMPOSED, SINGLE) | dict.fromkeys(KEPT, HALF)
    assert set(KEPT) <= KEEPS


HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
layer, norm = nn.Linear(8, 8).to("cuda"), nn.LayerNorm(8)
def helper(z):
    return torch.sqrt(z.abs() * 2.0)  # model
"""


def dtype_of_last(body):
    """The dtype of what the last line of a function evaluates."""
    lines = "\n".join(f"        {line}" for line in body.split("\n"))
    text = f"{HEAD}\ndef main(x, model, flag):\n    with torch.autocast('cuda'):\n{lines}\n"
    code = Project(["main.py"], {"main.py": text}).code("main.py")
    site = max(code.statements, key=lambda site: (site.context.frame.function.name == "main", site.node.lineno))
    assert isinstance(site.node, ast.Expr)
    return tensor_dtypes(code).dtype(site.node.value, site.context)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x", None),
        ("layer(x)", HALF),
        ("norm(layer(x))", SINGLE),
        ("model(x)", LIKELY_HALF),
        ("model(x)['scores']", None),
        ("torch.sigmoid(layer(x)).mean()", HALF),
        ("(x @ x.T).softmax(-1)", SINGLE),
        ("layer(x) ** 2", SINGLE),
        ("layer(x) * layer(x) / 3", HALF),
        ("layer(x) * x", None),
        ("layer(x) + norm(x)", SINGLE),
        ("layer(x).float().relu()", SINGLE),
        ("layer(x).to(torch.float32)", SINGLE),
        ("x.half().view(4, -1)", HALF),
        ("torch.zeros(3)", SINGLE),
        ("z = layer(x)\nz = z.float()\nz", SINGLE),
        ("z = layer(x)\nif flag:\n    z = z.float()\nz", None),
        ("z = x\nz = layer(z)\nz = F.relu(z)\nz", HALF),
        ("for _ in range(3):\n    z = layer(x)\n    z.relu()\n    z = x\nz.relu()", None),
        ("z = layer(x)\nwith torch.no_grad():\n    z = norm(z)\nz", SINGLE),
        ("helper(layer(x))", HALF),
        ("helper(x)", None),
    ],
)
def test_names_and_operations_are_followed(body, expected):
    assert dtype_of_last(body) == expected


def test_nothing_is_half_where_autocast_is_off():
    body = "    with torch.autocast('cuda', enabled=False):\n        layer(x)\n        x @ x\n"
    code = Project(["main.py"], {"main.py": f"{HEAD}\ndef main(x):\n{body}"}).code("main.py")
    sites = [site for site in code.statements if site.context.frame.function.name == "main"]
    assert [tensor_dtypes(code).dtype(site.node.value, site.context) for site in sites] == [None, None]
