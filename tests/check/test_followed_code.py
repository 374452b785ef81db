"""A step is checked wherever it stands: in methods nobody calls, callbacks, any kind of loop, generators, threads."""

import textwrap

import pytest

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.check.selectors import SelectorLayer

HEAD = "import functools, torch\nfrom torch.amp import GradScaler, autocast\n"
SETUP = "model = make()\noptimizer = torch.optim.Adam(model.parameters())\nscaler = GradScaler()\n"
BACKWARD = "with autocast('cuda'):\n    loss = model(x)\nscaler.scale(loss).backward()\n"
APPLY = (
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()\n"
    "optimizer.zero_grad()\n"
)
STEP = BACKWARD + APPLY  # clips scaled gradients


def block(head, body):
    return f"{head}\n{textwrap.indent(body, '    ')}"


def of_self(text):
    for name in ("model", "scaler", "optimizer"):
        text = text.replace(f"{name}.", f"self.{name}.").replace(f"({name})", f"(self.{name})")
        text = text.replace(f"{name} =", f"self.{name} =").replace(f"{name}(x", f"self.{name}(x")
    return text


INIT = block("def __init__(self):", of_self(SETUP))
EPOCH = block("for x in loader:", STEP)
MAIN = block("def main(*args):", SETUP + EPOCH)
TRAIN = block("def train(x):", STEP)
BACK = block("def back(x):", BACKWARD)

SCRIPTS = {
    "a method that nobody calls": block("class T:", INIT + block("def optimize_parameters(self, x):", of_self(STEP))),
    "objects made in a setup method": block(
        "class T:", INIT.replace("__init__", "setup") + block("def train_step(self, x):", of_self(STEP))
    ),
    "a method split in two": block(
        "class T:",
        INIT
        + block("def back(self, x):", of_self(BACKWARD))
        + block("def update(self, x):", "self.back(x)\n" + of_self(APPLY)),
    ),
    "a base class's objects": block("class B:", INIT)
    + block("class T(B):", block("def step(self, x):", of_self(STEP))),
    "a base class's loop": block(
        "class B:", INIT + block("def fit(self):", block("for x in self.data:", "self.back(x)\n" + of_self(APPLY)))
    )
    + block("class T(B):", block("def back(self, x):", of_self(BACKWARD))),
    "a class made in a function": block(
        "def build():", block("class T:", INIT + block("def step(self, x):", of_self(STEP)))
    ),
    "a class method": block("class T:", block("@classmethod\ndef step(cls, model, optimizer, scaler, x):", STEP)),
    "a callable object": block("class T:", INIT + block("def __call__(self, x):", of_self(STEP))) + "T()(1)\n",
    "a function held by an attribute": block(
        "class T:",
        INIT.rstrip()
        + "\n    self.run = self.back\n"
        + block("def back(self, x):", of_self(BACKWARD))
        + block("def fit(self):", block("for x in self.data:", "self.run(x)\n" + of_self(APPLY))),
    ),
    "a nested function": block("def main():", SETUP + TRAIN + "for x in loader:\n    train(x)\n"),
    "a nested function that is returned": block("def make_step(model, optimizer, scaler):", TRAIN + "return train\n"),
    "a callback": SETUP + TRAIN + "engine = Runner(train)\nengine.run(loader)\n",
    "a callback by keyword": block("def main():", SETUP + TRAIN + "Runner(step_fn=train).run()\n"),
    "a function in a table": SETUP + TRAIN + "MODES = {'train': train}\nMODES[mode](x)\n",
    "another name for a function": SETUP + BACK + "run = back\n" + block("for x in loader:", "run(x)\n" + APPLY),
    "a compiled function": SETUP + BACK + "run = torch.compile(back)\n" + block("for x in loader:", "run(x)\n" + APPLY),
    "a compiled function by decorator": SETUP + "@torch.compile\n" + TRAIN + "for x in loader:\n    train(x)\n",
    "a partial": SETUP
    + block("def back(model, by, x):", BACKWARD.replace("scaler", "by"))
    + "run = functools.partial(back, model, by=scaler)\n"
    + block("for x in loader:", "run(x)\n" + APPLY),
    "a function that is passed": SETUP
    + BACK
    + block("def loop(fn):", block("for x in loader:", "fn(x)\n" + APPLY))
    + "loop(back)\n",
    "a lambda": SETUP + "step = lambda x: train(x)\n" + TRAIN + "for x in loader:\n    step(x)\n",
    "many helpers deep": SETUP
    + BACK
    + "".join(f"def a{i}(x): {f'a{i + 1}' if i < 5 else 'back'}(x)\n" for i in range(6))
    + block("for x in loader:", "a0(x)\n" + APPLY),
    "the main guard": block("if __name__ == '__main__':", SETUP + EPOCH),
    "spawned processes": MAIN
    + "if __name__ == '__main__':\n    torch.multiprocessing.spawn(main, args=(1,), nprocs=2)\n",
    "fire": "import fire\n" + MAIN + "fire.Fire(main)\n",
    "hydra": "import hydra\n@hydra.main(config_path='.')\n" + MAIN + "main()\n",
    "typer": "import typer\napp = typer.Typer()\n@app.command()\n" + MAIN + "app()\n",
    "a thread": SETUP + "def work():\n" + textwrap.indent(EPOCH, "    ") + "Thread(target=work).start()\n",
    "a map": SETUP + TRAIN + "list(map(train, loader))\n",
    "a comprehension": SETUP + TRAIN + "losses = [train(x) for x in loader]\n",
    "global objects": block("def setup():", "global scaler, model, optimizer\n" + SETUP)
    + TRAIN
    + "setup()\ntrain(1)\n",
    "objects in a dictionary": block(
        "for x in loader:", STEP.replace("scaler", "state['scaler']").replace("optimizer", "state['optimizer']")
    ),
    "try": SETUP + block("for x in loader:", block("try:", STEP) + "except RuntimeError:\n    continue\n"),
    "try around the backward": SETUP
    + block("for x in loader:", block("try:", BACKWARD) + "except RuntimeError:\n    continue\n" + APPLY),
    "try, else and finally": SETUP
    + block(
        "for x in loader:",
        "try:\n    loss = model(x)\nexcept RuntimeError:\n    continue\n"
        + block("else:", "scaler.scale(loss).backward()")
        + block("\nfinally:", APPLY),
    ),
    "a raise that is caught": SETUP
    + block(
        "for x in loader:",
        block("try:", "if bad(x):\n    raise ValueError\n" + BACKWARD) + "except ValueError:\n    pass\n" + APPLY,
    ),
    "while true": SETUP
    + block("while True:", "try:\n    x = next(batches)\nexcept StopIteration:\n    break\n" + STEP),
    "while with a walrus": SETUP + block("while (x := next(batches, None)) is not None:", STEP),
    "a walrus in the backward": SETUP
    + block("for x in loader:", "(scaled := scaler.scale(model(x))).backward()\n" + APPLY),
    "an else of a loop": SETUP + block("for x in loader:", BACKWARD) + block("else:", APPLY),
    "match": SETUP
    + block(
        "for x in loader:",
        block("match mode:", block("case 'amp':", STEP) + "case _:\n    loss.backward()\n    optimizer.step()\n"),
    ),
    "a generator": SETUP
    + block("def steps():", block("for x in loader:", STEP + "yield loss\n"))
    + "for loss in steps():\n    print(loss)\n",
    "a generator that only computes gradients": SETUP
    + block("def batches():", block("for x in loader:", BACKWARD + "yield x\n"))
    + block("for x in batches():", APPLY),
    "async": block("async def main():", SETUP + block("async for x in loader:", STEP)) + "asyncio.run(main())\n",
    "an awaited helper": SETUP
    + "async "
    + BACK
    + block("async def main():", block("async for x in loader:", "await back(x)\n" + APPLY)),
    "recursion": SETUP + TRAIN + "    train(x)\ntrain(1)\n",
    "one line": SETUP
    + "for x in loader: scaler.scale(model(x)).backward(); "
    + APPLY.strip().replace("\n", "; ")
    + "\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_is_checked_wherever_it_is(name):
    choice = RuleSelection(SettingsByFolder(isolated=True), SelectorLayer(select=("AMP101",)))
    report, _ = check_text(HEAD + SCRIPTS[name], "train.py", choice)
    assert [finding.rule.code for finding in report.findings] == ["AMP101"], HEAD + SCRIPTS[name]
    assert report.notes == report.unreadable == []
