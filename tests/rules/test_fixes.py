"""Fixes of the source rules: what ran before runs after, and where that is not proven the fix is an unsafe one.

Random combinations are in tests/attack/test_fixes.py.
"""

import textwrap

import pytest
import torch

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text

from .running import fixed, outcome, without_scaler

HEAD = """\
import torch  # the models autocast by themselves
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 3)
scaler = torch.amp.GradScaler("cpu")


class NoScaler:
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass


"""
STEP = """\
for i in range(3):
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    {}
    scaler.step(optimizer)
    scaler.update()
"""


# The clip is between two branches of the same condition; `AMP` and `scaler` are set before.
BRANCHES = """\
for i in range(3):
    optimizer.zero_grad()
    loss = model(x).sum()
    if AMP:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    if AMP:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
"""


def script(text):
    return (HEAD + text).encode()


def in_step(lines):
    return STEP.replace("    {}\n", textwrap.indent(lines + "\n", "    "))


def findings(data):
    return check_text(data.decode(), "train.py", RuleSelection(SettingsByFolder(isolated=True)))[0].findings


SAFE = {
    "plain": in_step("clip_grad_norm_(model.parameters(), 0.1)"),
    "two clips": in_step("clip_grad_norm_(model.parameters(), 0.1)\nclip_grad_value_(model.parameters(), 0.05)"),
    "two clips under conditions": in_step(
        "if i >= 0:\n    clip_grad_norm_(model.parameters(), 0.1)\nif i > 0: clip_grad_value_(model.parameters(), 0.05)"
    ),
    "one by one": in_step("for p in model.parameters():\n    clip_grad_norm_(p, 0.1)"),
    "with a condition of its own": in_step(
        "for p in model.parameters():\n    if p.grad is None:\n        continue\n    clip_grad_norm_(p, 0.1)"
    ),
    "on one line": in_step("clip_grad_norm_(model.parameters(), 0.1); done = i"),
    "try and finally": in_step("try:\n    clip_grad_norm_(model.parameters(), 0.1)\nfinally:\n    done = i"),
    "None elsewhere": 'AMP = True\nscaler = torch.amp.GradScaler("cpu") if AMP else None\n'
    + in_step("clip_grad_norm_(model.parameters(), 0.1)"),
    "micro-batches before it": STEP.replace(
        "    scaler.scale(model(x).sum()).backward()\n    {}",
        "    for part in (x[:1], x[1:]):\n        scaler.scale(model(part).sum()).backward()\n"
        "    clip_grad_norm_(model.parameters(), 0.1)",
    ),
    "accumulation": "for i in range(4):\n    scaler.scale(model(x).sum() / 2).backward()\n    if i % 2 == 1:\n"
    "        clip_grad_norm_(model.parameters(), 0.1)\n        scaler.step(optimizer)\n        scaler.update()\n"
    "        optimizer.zero_grad()\n",
    "under a condition of its own": 'AMP = True\nscaler = torch.amp.GradScaler("cpu") if AMP else None\n' + BRANCHES,
    "beside FP32": "AMP = True\nfor i in range(3):\n    optimizer.zero_grad()\n    if AMP:\n"
    "        scaler.scale(model(x).sum()).backward()\n        clip_grad_norm_(model.parameters(), 0.1)\n"
    "        scaler.step(optimizer)\n        scaler.update()\n    else:\n        model(x).sum().backward()\n"
    "        clip_grad_norm_(model.parameters(), 0.1)\n        optimizer.step()\n",
    "no update": "for i in range(1):\n    scaler.scale(model(x).sum()).backward()\n    scaler.step(optimizer)\n",
    "plain backward": "for i in range(3):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
    "two plain backwards": "for i in range(3):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n"
    "    model(x).pow(2).sum().backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
}


@pytest.mark.parametrize("name", SAFE)
def test_what_is_fixed_trains_as_without_a_scaler(name, tmp_path):
    before = script(SAFE[name])
    assert outcome(before)[0] is None or "plain backward" in name, "which torch refuses unless the scaler is off"
    after = fixed(before, tmp_path)
    assert after != before
    assert [finding.rule.code for finding in findings(after) if finding.edits] == []
    assert after.count(b"unscale_(") <= 1
    error, weights = outcome(after)
    assert error is None
    assert torch.allclose(weights, outcome(without_scaler(before))[1], atol=1e-6)


@pytest.mark.parametrize("name", ["under a condition of its own", "beside FP32", "None elsewhere"])
def test_the_other_mode_is_left_as_it_is(name, tmp_path):
    """With AMP off there is no scaler to call, so the inserted line must not run."""
    after = fixed(script(SAFE[name]), tmp_path).replace(b"AMP = True", b"AMP = False")
    before = script(SAFE[name]).replace(b"AMP = True", b"AMP = False")
    error, weights = outcome(after)
    assert error == outcome(before)[0], "with an unguarded step both fail"
    assert error is not None or torch.equal(weights, outcome(before)[1])


def test_two_clips_carry_one_edit():
    """Whoever applies the edits of all findings, such as an editor, must not insert two `unscale_`."""
    first, second = findings(script(SAFE["two clips"]))
    assert (len(first.edits), len(second.edits)) == (1, 0)
    assert second.fix == "One `unscale_` before the clip in line 24 serves this one, too: not a second one."


UNSAFE = {
    "stepped in each micro-batch": (
        "for i in range(1):\n    optimizer.zero_grad()\n    scaler.scale(model(x).sum()).backward()\n"
        "    clip_grad_norm_(model.parameters(), 0.1)\n    scaler.step(optimizer)\n    if i > 5:\n"
        "        scaler.update()\n",
        "no `update()` follows here, and the next `unscale_` would then raise an error",
    ),
    "skips": (
        in_step("norm = clip_grad_norm_(model.parameters(), 0.1)\nif i == 1:\n    continue"),
        "the step may be skipped after the clip, and the next `unscale_` would then raise an error",
    ),
    "catches": (
        "for i in range(3):\n    try:\n        optimizer.zero_grad()\n        scaler.scale(model(x).sum()).backward()\n"
        "        clip_grad_norm_(model.parameters(), 0.1)\n        if i == 1: int('x')\n"
        "        scaler.step(optimizer)\n        scaler.update()\n    except ValueError:\n        pass\n",
        "an exception may be caught before the step, and the next `unscale_` would then raise an error",
    ),
    "another scaler": (
        "def train(scaler):\n"
        + textwrap.indent(in_step("clip_grad_norm_(model.parameters(), 0.1)"), "    ")
        + "train(scaler)\ntrain(NoScaler())\n",
        "it is unclear whether the scaler is always a GradScaler",
    ),
    "handed on": (
        "def train(scaler):\n"
        + textwrap.indent(in_step("clip_grad_norm_(model.parameters(), 0.1)"), "    ")
        + "train(scaler)\nlist(map(train, [NoScaler()]))\n",
        "it is unclear whether the scaler is always a GradScaler",
    ),
    "updated by the caller": (
        "def step(scaler):\n    optimizer.zero_grad()\n    scaler.scale(model(x).sum()).backward()\n"
        "    scaler.step(optimizer)\n\n\nupdates = {'after': scaler.update}\n",
        "the caller of this step may update the scale after it",
    ),
    "updated by another name": (
        "for i in range(3):\n    optimizer.zero_grad()\n    scaler.scale(model(x).sum()).backward()\n"
        "    scaler.step(optimizer)\n    (lambda: scaler)().update()\n",
        "there is an `update()` call that may be the scaler's",
    ),
    "scaled by hand": (
        "scaler.scale(x)\nfor i in range(3):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n"
        "    for p in model.parameters(): p.grad.mul_(65536.0)\n    scaler.step(optimizer)\n    scaler.update()\n",
        "the gradients may be scaled manually elsewhere",
    ),
    "no scaler in FP32": (
        "AMP = False\nif AMP:\n    scaler = torch.amp.GradScaler('cpu')\nelse:\n    scaler = None\n"
        "for i in range(3):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    if AMP:\n"
        "        scaler.step(optimizer)\n        scaler.update()\n",
        "the scaler may not exist yet at the backward",
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_cannot_be_proven_is_left_and_says_why(name, tmp_path):
    text, reason = UNSAFE[name]
    before = script(text)
    assert outcome(before)[0] is None
    assert fixed(before, tmp_path) == before
    (finding,) = findings(before)
    assert finding.edits
    assert not finding.safe
    assert finding.fix.endswith(f" Not a safe fix: {reason}.")


LEFT = {
    "unscaled after the clip": in_step("clip_grad_norm_(model.parameters(), 0.1)\nscaler.unscale_(optimizer)"),
    "each micro-batch": "for i in range(3):\n    optimizer.zero_grad()\n    for part in (x[:1], x[1:]):\n"
    "        scaler.scale(model(part).sum()).backward()\n        clip_grad_norm_(model.parameters(), 0.1)\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
    "in a condition": in_step("clip_grad_norm_(model.parameters(), 0.1)").replace(
        "    scaler.step(optimizer)", "    i >= 0 and scaler.step(optimizer)"
    ),
    "more gradients after the clip": in_step(
        "clip_grad_norm_(model.parameters(), 0.1)\nscaler.scale(model(x).sum()).backward()"
    ),
    "two optimizers": "other = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + in_step("clip_grad_norm_(model.parameters(), 0.1)").replace(
        "    scaler.update()", "    scaler.step(other)\n    scaler.update()"
    ),
    "over optimizers": "for i in range(1):\n    scaler.scale(model(x).sum()).backward()\n"
    "    for each in [optimizer]:\n        scaler.step(each)\n",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_would_break_is_never_made(name, tmp_path):
    before = script(LEFT[name])
    assert outcome(before)[0] is None
    assert fixed(before, tmp_path, "--unsafe-fixes") == before


def test_an_unscale_that_comes_late_is_to_be_moved():
    (finding,) = findings(script(LEFT["unscaled after the clip"]))
    assert finding.fix == "Move the `unscale_` of line 25 to before the clip; a second one would raise an error."


def some_optimized(choice):
    optimizer = f"optimizer = torch.optim.SGD({choice}, lr=0.1)\n"
    return script(optimizer + in_step("clip_grad_norm_(model.parameters(), 0.1)"))


def test_no_unscale_for_an_optimizer_of_only_some_of_the_clipped_parameters(tmp_path):
    """It would unscale those alone, and the clip would compare them with the others, scaled and never cleared."""
    before = some_optimized("[p for name, p in model.named_parameters() if name != 'bias']")
    (finding,) = findings(before)
    assert "clip only what the optimizer of line 21 has" in finding.fix
    assert fixed(before, tmp_path, "--unsafe-fixes") == before
    assert fixed(some_optimized("[p for p in model.parameters() if p.requires_grad]"), tmp_path) != before


def test_a_fix_that_needs_another_one_is_not_made_alone(tmp_path, capsys):
    """Scaling the loss is right, and makes the clip wrong: both are left, rather than half of it."""
    before = script(
        in_step("clip_grad_norm_(model.parameters(), 0.1)").replace("scaler.scale(model(x).sum())", "model(x).sum()")
    )
    assert fixed(before, tmp_path) == before
    assert "train.py:23:5: AMP108 not fixed: the fix would cause AMP101 (clip-scaled-grads)" in capsys.readouterr().err


# The other rules.


HALF = "import torch\nmodel = torch.nn.Linear(3, 1)\nmask = torch.tensor([True, False])\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # A product is added to something: twice the smallest number is -inf, in FP32 as well.
        (HALF + "m = mask.half()\nbias = m * -1e9\n", "AMP403"),
        # torch is known in another function only.
        (
            "from torch import nn, tensor, ones\nmodel = nn.Linear(3, 1)\n"
            "def other():\n    import torch\n    return torch\n"
            "def f(mask):\n    scores = ones(2).half()\n    scores[mask] = -1e9\n    return scores\n"
            "f(tensor([True, False]))\n",
            "AMP403",
        ),
        # What calls the old autocast gets FP16, the new one what was set.
        (
            "import torch\nmodel = torch.nn.Linear(3, 1)\ntorch.set_autocast_dtype('cuda', torch.bfloat16)\n"
            "with torch.cuda.amp.autocast(enabled=False): pass\ntorch.set_autocast_dtype('cuda', torch.float16)\n",
            "AMP310",
        ),
    ],
)
def test_fixes_of_other_rules_that_are_not_safe(text, code, tmp_path):
    before = text.encode()
    assert outcome(before)[0] is None
    assert code in [finding.rule.code for finding in findings(before)]
    assert fixed(before, tmp_path) == before


BCE = """\
import torch
import torch.nn.functional as F
model = torch.nn.Linear(3, 1)
x, y = torch.ones(2, 3), torch.ones(2, 1)
"""


BCE_FIXED = """
with torch.autocast("cuda"):
    loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)
---
with torch.autocast("cuda"):
    out = model(x)
    p = torch.sigmoid(out)
    loss = F.binary_cross_entropy(p, y)
print(p)
---
with torch.autocast("cuda"):
    p = torch.sigmoid(model(x)
+ 1)
    loss = F.binary_cross_entropy(p, y)
"""
# The scores are changed after the sigmoid, or are those of another batch; or an attribute is called from anywhere.
BCE_LEFT = """
with torch.autocast("cuda"):
    out = model(x)
    p = torch.sigmoid(out)
    out.mul_(0)
    loss = F.binary_cross_entropy(p, y)
print(p)
---
for i in range(2):
    with torch.autocast("cuda"):
        out = model(x + i)
        if i == 0:
            p = torch.sigmoid(out)
        loss = F.binary_cross_entropy(p, y)
print(p)
---
with torch.autocast("cuda"):
    scores = [model(x)]
    loss = F.binary_cross_entropy(torch.sigmoid(*scores), y)
---
class Trainer:
    def __init__(self):
        self.loss = torch.nn.BCELoss()

    def run(self):
        with torch.autocast("cuda"):
            return self.loss(torch.sigmoid(model(x)), y)

trainer = Trainer()
trainer.run()
loss = getattr(trainer, "loss")(torch.sigmoid(model(x)), y)
"""


@pytest.mark.parametrize(
    ("text", "is_fixed"),
    [(text, texts is BCE_FIXED) for texts in (BCE_FIXED, BCE_LEFT) for text in texts.split("---\n")],
)
def test_binary_cross_entropy(text, is_fixed, tmp_path):
    before = f"{BCE}{text}\nmodel.bias.data.fill_(loss.item())\n".encode()
    error, weights = outcome(before)
    assert error is None
    assert [finding.rule.code for finding in findings(before)] == ["AMP402"]
    after = fixed(before, tmp_path)
    assert (after != before) is is_fixed
    error, weights_after = outcome(after)
    assert error is None
    assert torch.allclose(weights, weights_after)
