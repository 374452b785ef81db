"""Sources that are large, or made to be slow: each is a function of a size, and about twice as long at twice the size.

``SOURCES`` maps a name to a function ``size -> {path: text}``. The first file of each is the one that trains.
"""

import json

HEAD = """\
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
import torch.nn.functional as F
from torch.nn import BCELoss

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = GradScaler()
"""
STEP = """\
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(x).masked_fill(y, -1e9).exp().log().mean() / (x + 1e-8), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "a.pt")
"""
SOURCES = {}


def source(function):
    SOURCES[function.__name__] = function
    return function


def indented(text, by=4):
    return "".join(f"{' ' * by}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def alone(text):
    return {"train.py": HEAD + text}


def in_loop(body, head="for i, (x, y) in enumerate(loader):\n"):
    return head + indented(body)


# -- functions and classes ---------------------------------------------------------------------------------


@source
def training_functions(size):
    return alone("".join(f"def train_{i}(model, loader):\n{indented(STEP)}" for i in range(size)))


@source
def plain_functions(size):
    return alone("".join(f"def f_{i}(a, b):\n    c = a + b\n    return c * {i}\n" for i in range(size)) + STEP)


@source
def chain_of_helpers(size):
    calls = "".join(f"def f_{i}(x):\n    x.grad.norm()\n    return f_{i + 1}(x)\n" for i in range(size))
    return alone(f"{calls}def f_{size}(x):\n    scaler.scale(x).backward()\n{STEP}f_0(x)\n")


@source
def fan_of_helpers(size):
    calls = "".join(f"    f_{i}(x)\n" for i in range(size))
    helpers = "".join(f"def f_{i}(x):\n    x.grad.norm()\n    optimizer.step()\n" for i in range(size))
    return alone(f"{helpers}def everything(x):\n{calls}{STEP}everything(x)\n")


@source
def every_function_calls_ten_others(size):
    def helper(i):
        return f"def f_{i}(x):\n    optimizer.step()\n" + "".join(f"    f_{(i * 7 + k) % size}(x)\n" for k in range(10))

    return alone("".join(map(helper, range(size))) + STEP)


@source
def layers_of_helpers(size):
    """Each layer calls all of the next: without a limit, ways multiply."""
    text = ""
    for i in range(size):
        layer, k = divmod(i, 5)
        calls = "".join(f"    f_{layer + 1}_{other}(x)\n" for other in range(5)) if i < size - 5 else "    pass\n"
        text += f"def f_{layer}_{k}(x):\n    optimizer.step()\n{calls}"
    return alone(text + STEP + "f_0_0(x)\n")


@source
def callers_of_one_long_helper(size):
    long = "def helper(x):\n" + "    scaler.scale(x).backward()\n    optimizer.step()\n" * 100
    return alone(long + "".join(f"def train_{i}(x):\n    helper(x)\n" for i in range(size)))


@source
def mutual_recursion(size):
    pairs = "".join(
        f"def even_{i}(x):\n    optimizer.step()\n    odd_{i}(x)\n    even_{(i + 1) % size}(x)\n"
        f"def odd_{i}(x):\n    scaler.update()\n    even_{i}(x)\n    odd_{(i + 1) % size}(x)\n"
        for i in range(size)
    )
    return alone(pairs + STEP)


@source
def nested_functions(size):
    text = ""
    for i in range(size // 20):
        for depth in range(20):
            text += f"{' ' * depth}def f_{i}_{depth}(x):\n"
        text += f"{' ' * 20}x = optimizer.step()\n"
    return alone(text + STEP)


@source
def classes_that_train(size):
    def one(i):
        return (
            f"class Trainer{i}:\n    def __init__(self, model):\n        self.model = model\n"
            f"        self.scaler = GradScaler()\n        self.optimizer = torch.optim.Adam(model.parameters())\n"
            f"    def step(self, loss):\n        self.scaler.scale(loss).backward()\n"
            f"        self.scaler.step(self.optimizer)\n        self.scaler.update()\n"
        )

    return alone("".join(map(one, range(size))))


@source
def class_with_methods(size):
    methods = "".join(
        f"    def m_{i}(self, x):\n        self.a_{i} = x\n        self.optimizer.step()\n"
        f"        self.m_{(i + 1) % size}(x)\n"
        for i in range(size)
    )
    return alone(f"class Trainer:\n    def __init__(self):\n        self.scaler = GradScaler()\n{methods}")


@source
def class_hierarchy(size):
    classes = "class C0:\n    def step(self, x):\n        self.optimizer.step()\n"
    classes += "".join(
        f"class C{i + 1}(C{i}):\n    def run_{i}(self, x):\n        self.step(x)\n        scaler.update()\n"
        for i in range(size)
    )
    return alone(classes + STEP)


@source
def attributes(size):
    lines = "".join(f"        self.a_{i} = self.a_{max(0, i - 1)}\n" for i in range(size))
    uses = "".join(f"        self.a_{i}.step()\n" for i in range(0, size, 10))
    return alone(
        f"class Trainer:\n    def __init__(self):\n        self.scaler = GradScaler()\n{lines}    def go(self, loss):\n"
        f"        self.scaler.scale(loss).backward()\n{uses}"
    )


@source
def autograd_functions(size):
    one = (
        "class Fn{i}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g @ g\n"
    )
    return alone("".join(one.format(i=i) for i in range(size)) + STEP)


# -- statements --------------------------------------------------------------------------------------------


@source
def long_function(size):
    return alone("def train(model, loader):\n" + indented(in_loop("x = x + 1\n" * size + STEP)))


@source
def many_loops(size):
    return alone(STEP * size)


@source
def many_backwards(size):
    return alone(in_loop("scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n" * size))


@source
def many_optimizers(size):
    made = "".join(f"opt_{i} = torch.optim.SGD(model.parameters())\n" for i in range(size))
    used = "".join(
        f"scaler.scale(loss_{i}).backward()\nscaler.unscale_(opt_{i})\nscaler.step(opt_{i})\nscaler.update()\n"
        for i in range(size)
    )
    return alone(made + in_loop(used))


@source
def many_scalers(size):
    made = "".join(f"scaler_{i} = GradScaler()\n" for i in range(size))
    used = "".join(f"scaler_{i}.scale(loss).backward()\nscaler_{i}.step(optimizer)\n" for i in range(size))
    return alone(made + in_loop(used))


@source
def questions_about_different_things(size):
    """Each ``if`` doubles the ways through the step."""
    asked = "".join(f"if flag_{i}:\n    loss.backward()\n" for i in range(size))
    return alone(in_loop(asked + "if (i + 1) % 4 == 0:\n    scaler.step(optimizer)\n    scaler.update()\n"))


@source
def questions_about_one_thing(size):
    asked = "".join("if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n" for i in range(size))
    return alone(in_loop(asked + "if (i + 1) % 4 == 0:\n    scaler.step(optimizer)\n    scaler.update()\n"))


@source
def some_paths_many_backwards(size):
    """As many paths as are followed, with ever more backwards on each: what AMP205 walked the file for."""
    asked = "".join(f"if flag_{i}:\n    optimizer.zero_grad()\n" for i in range(4))
    backwards = "".join(f"loss_{i} = crit_{i}(x)\nscaler.scale(loss_{i}).backward()\n" for i in range(size))
    return alone(
        in_loop(backwards + asked + "if (i + 1) % accum == 0:\n    scaler.step(optimizer)\n    scaler.update()\n")
    )


@source
def many_steps_of_many_paths(size):
    asked = "".join(f"if flag_{i}:\n    torch.nn.utils.clip_grad_norm_(model.parameters(), {i})\n" for i in range(6))
    step = in_loop(
        f"scaler.scale(loss).backward()\n{asked}if (i + 1) % accum == 0:\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    scheduler.step()\n"
    )
    return alone("".join(f"def train_{i}(loader):\n{indented(step)}" for i in range(size)))


@source
def elif_chain(size):
    chain = "".join(f"{'el' if i else ''}if mode == {i}:\n    optimizer.step()\n" for i in range(min(size, 800)))
    return alone("".join(in_loop(chain + "scaler.scale(loss).backward()\n") for _ in range(max(1, size // 800))))


@source
def nested_ifs(size):
    text = ""
    for i in range(size // 15):
        for depth in range(15):
            text += f"{' ' * depth}if a_{depth} > {i}:\n"
        text += f"{' ' * 15}scaler.step(optimizer)\n"
    return alone(in_loop(text + "scaler.scale(loss).backward()\n"))


@source
def nested_loops(size):
    text = ""
    for i in range(size // 15):
        for depth in range(15):
            text += f"{' ' * depth}for a_{depth} in range({i}):\n"
        text += f"{' ' * 15}scaler.scale(loss).backward()\n{' ' * 15}scaler.step(optimizer)\n"
    return alone(text)


@source
def nested_withs(size):
    text = ""
    for _ in range(size // 15):
        for depth in range(15):
            text += f"{' ' * depth}with torch.autocast('cuda', dtype=torch.float16, enabled={depth % 2 == 0}):\n"
        text += f"{' ' * 15}loss = torch.exp(model(x))\n{' ' * 15}scaler.scale(loss).backward()\n"
    return alone(text)


@source
def items_of_with(size):
    items = ", ".join("torch.autocast('cuda', dtype=torch.float16)" for _ in range(size))
    return alone(f"with {items}:\n    scaler.scale(model(x).exp().log()).backward()\n    optimizer.step()\n")


@source
def early_ends(size):
    return alone(in_loop("".join(f"if bad_{i}:\n    continue\nscaler.update()\n" for i in range(size)) + STEP))


@source
def tries(size):
    return alone(in_loop("try:\n    scaler.step(optimizer)\nexcept ValueError:\n    raise\n" * size + STEP))


@source
def matches(size):
    cases = "".join(f"    case {i}:\n        optimizer.step()\n" for i in range(size))
    return alone(in_loop(f"match mode:\n{cases}scaler.scale(loss).backward()\n"))


@source
def assignments_of_one_name(size):
    return alone(in_loop("loss = loss + model(x)\nscaler.scale(loss / 2).backward()\n" * size + STEP))


@source
def one_name_in_half(size):
    lines = "".join("    x = torch.matmul(x, x)\n    z = torch.log(x + 1e-8)\n" for _ in range(size))
    return alone(f'with torch.autocast("cuda", dtype=torch.float16):\n{lines}{STEP}')


@source
def names_in_a_row(size):
    lines = "".join(f"a_{i + 1} = a_{i}\n" for i in range(size))
    return alone("a_0 = optimizer\n" + lines + in_loop(f"scaler.scale(loss).backward()\na_{size}.step()\n"))


@source
def values_that_double(size):
    """Each name may be what two others are: the number of values doubles with each line."""
    lines = "".join(
        f"a_{i + 1} = a_{i} if flag else b_{i}\nb_{i + 1} = b_{i} if flag else a_{i}\n" for i in range(size)
    )
    step = in_loop(f"scaler.scale(loss).backward()\na_{size}.step()\n")
    return alone(f"a_0 = optimizer\nb_0 = scaler\n{lines}{step}")


@source
def losses_of_losses(size):
    lines = "".join(f"loss_{i + 1} = loss_{i} + aux_{i}\naux_{i + 1} = aux_{i} + loss_{i}\n" for i in range(size))
    step = "if (i + 1) % accum == 0:\n    scaler.step(optimizer)\n    scaler.update()\n"
    return alone(in_loop(f"loss_0 = model(x)\naux_0 = model(x)\n{lines}scaler.scale(loss_{size}).backward()\n{step}"))


@source
def kept_scales(size):
    lines = "".join(f"s_{i} = scaler.get_scale()\n" for i in range(size))
    uses = "".join(f"loss_{i} = loss_{i} / s_{i}\n" for i in range(size))
    return alone(lines + in_loop(uses + "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"))


@source
def checkpoints(size):
    saves = "".join(
        f"def save_{i}(path):\n    state = {{'optimizer': optimizer.state_dict()}}\n    state['epoch'] = {i}\n"
        f"    state.update(more={i})\n    torch.save(state, path)\n"
        for i in range(size)
    )
    return alone(saves + STEP)


@source
def checkpoint_of_many_entries(size):
    entries = ", ".join(f"'k_{i}': net_{i}.state_dict()" for i in range(size))
    return alone(STEP + f"state = {{{entries}, 'optimizer': optimizer.state_dict()}}\ntorch.save(state, 'a.pt')\n")


@source
def half_models(size):
    lines = "".join(f"net_{i} = Net().half()\nopt_{i} = torch.optim.Adam(net_{i}.parameters())\n" for i in range(size))
    return alone(lines + in_loop("loss.backward()\nopt_0.step()\n"))


@source
def reads_of_gradients(size):
    reads = "".join(f"n_{i} = p.grad.norm().item() / total_{i}\n" for i in range(size))
    step = in_loop(f"scaler.scale(loss).backward()\n{reads}scaler.step(optimizer)\n")
    return alone(f"def train():\n{indented(step)}")


@source
def threads(size):
    lines = "".join(f"Thread(target=f, args=(scaler, {i})).start()\n" for i in range(size))
    return alone(f"from threading import Thread\nfor i in range(8):\n{indented(lines)}{STEP}")


# -- expressions -------------------------------------------------------------------------------------------


@source
def long_sum(size):
    terms = " + ".join(f"loss_{i}" for i in range(min(size, 400)))
    step = "if (i + 1) % accum == 0:\n    scaler.step(optimizer)\n    scaler.update()\n"
    return alone(in_loop(f"loss = {terms}\nscaler.scale(loss).backward()\n" * max(1, size // 400) + step))


@source
def products_in_half(size):
    terms = " * ".join("(x + 1e-8)" for _ in range(min(size, 400)))
    lines = f"    y = {terms}\n    z = 1 / ({terms})\n" * max(1, size // 400)
    return alone(f'with torch.autocast("cuda", dtype=torch.float16):\n{lines}{STEP}')


@source
def long_attribute_chain(size):
    chain = ".".join(f"a{i}" for i in range(min(size, 400)))
    return alone(in_loop(f"x = {chain}\n{chain}.step()\n" * max(1, size // 400) + STEP))


@source
def nested_calls(size):
    """``f(f(f(...)))``, as deep as Python's parser goes."""
    depth = min(size, 80)
    call = "f(" * depth + "model(x).exp()" + ")" * depth
    return alone('with torch.autocast("cuda", dtype=torch.float16):\n' + f"    z = {call}\n" * (size // depth) + STEP)


@source
def chained_methods(size):
    chain = "".join(".exp()" for _ in range(min(size, 300)))
    lines = f"    z = torch.log(model(x){chain})\n" * max(1, size // 300)
    return alone(f'with torch.autocast("cuda", dtype=torch.float16):\n{lines}{STEP}')


@source
def calls_in_one_statement(size):
    return alone(in_loop(f"f({', '.join('scaler.scale(loss).backward()' for _ in range(size))})\n" + STEP))


@source
def arguments(size):
    given = ", ".join(f"scaler_{i}" for i in range(size))
    return alone(in_loop(f"f({given})\ng({given})\n" + STEP))


@source
def conditional_expressions(size):
    lines = "".join(f"(scaler.scale(loss) if a_{i} else loss).backward()\n" for i in range(size))
    return alone(in_loop(lines + "scaler.step(optimizer)\n"))


@source
def nested_conditional_expressions(size):
    inner = "x"
    for i in range(min(size, 60)):
        inner = f"(f(x) if a_{i} else {inner})"
    return alone(in_loop(f"y = {inner}\n" * max(1, size // 60) + STEP))


@source
def long_test(size):
    return alone(in_loop(f"if {' and '.join(f'a_{i}' for i in range(size))}:\n    scaler.step(optimizer)\n" + STEP))


@source
def huge_list(size):
    return alone(f"table = [{', '.join(f'{i}e5' for i in range(size))}]\n" + STEP)


@source
def huge_dictionary(size):
    return alone(f"table = {{{', '.join(f'{i}: model.half()' for i in range(size))}}}\n" + STEP)


@source
def long_line(size):
    return alone("; ".join(f"x_{i} = model(x).half()" for i in range(size)) + "\n" + STEP)


@source
def long_line_that_is_not_ascii(size):
    return alone("; ".join(f"scaler_{i} = torch.cuda.amp.GradScaler('é')" for i in range(size)) + "\n" + STEP)


@source
def strings(size):
    return alone("".join(f"text_{i} = 'scaler.step(optimizer) loss.backward() # noqa'\n" for i in range(size)) + STEP)


# -- names, comments, imports --------------------------------------------------------------------------------


@source
def deprecated_names(size):
    return alone("".join(f"s_{i} = torch.cuda.amp.GradScaler()\n" for i in range(size)))


@source
def deprecated_alias(size):
    return {"train.py": "from torch.cuda import amp\n" + "".join(f"s_{i} = amp.GradScaler()\n" for i in range(size))}


@source
def deprecated_imports(size):
    lines = "from torch.cuda.amp import autocast\n" * size
    return {"train.py": lines + "".join(f"with autocast():\n    x = {i}\n" for i in range(size))}


@source
def tests_of_type(size):
    return alone("".join(f"isinstance(s_{i}, torch.cuda.amp.GradScaler)\n" for i in range(size)))


@source
def names_of_scalers(size):
    functions = "".join(f"def f_{i}(x):\n    feature_scaler_{i} = StandardScaler()\n" for i in range(size))
    step = STEP.replace("scaler.scale(loss).backward()", "loss.backward()").replace(
        "scaler.step(optimizer)", "optimizer.step()"
    )
    return {"train.py": HEAD.replace("scaler = GradScaler()", "") + functions + step}


@source
def layers(size):
    return alone("".join(f"l_{i} = nn.Linear({1001 + 8 * i}, {1003 + 8 * i})\n" for i in range(size)) + STEP)


@source
def losses_of_bce(size):
    lines = "".join(f"crit_{i} = nn.BCELoss()\n" for i in range(size))
    uses = "".join(f"    l_{i} = crit_{i}(torch.sigmoid(model(x)), y)\n" for i in range(size))
    return alone(f"{lines}with torch.autocast('cuda'):\n{uses}{STEP}")


@source
def thresholds(size):
    lines = "".join(f"bf16_{i} = torch.cuda.get_device_capability()[0] >= 7\n" for i in range(size))
    return alone(lines + "dtype = torch.bfloat16\n")


@source
def comments_that_suppress(size):
    return alone("".join(f"s_{i} = torch.cuda.amp.GradScaler()  # noqa: AMP310, E501\n" for i in range(size)))


@source
def lines_in_one_statement(size):
    items = "".join("    torch.cuda.amp.GradScaler(),  # noqa: AMP310\n" for _ in range(size))
    return alone(f"all = [\n{items}]\n")


@source
def switches_of_tf32(size):
    return alone("torch.backends.cuda.matmul.allow_tf32 = False\n" * size + STEP)


@source
def spaces_in_imports(size):
    return {"train.py": "from a import" + " " * size * 20 + "(b\n" + HEAD}  # no Python at all


@source
def modules_in_a_row(size):
    files = {f"m_{i}.py": f"from m_{i + 1} import step\nGradScaler.step(x)\n" for i in range(size)}
    files[f"m_{size}.py"] = "def step(x):\n    scaler.unscale_(x)\n    x.grad.norm()\n"
    return {"train.py": f"from m_0 import step\n{HEAD}{STEP}step(x)\n", **files}


@source
def modules_that_import_all_others(size):
    number = int(size**0.5) + 2
    files = {}
    for i in range(number):
        imports = "".join(f"from m_{k} import step_{k}\n" for k in range(number) if k != i)
        calls = "".join(f"    step_{k}(x)\n" for k in range(number) if k != i)
        files[f"m_{i}.py"] = f"{imports}def step_{i}(x):\n    scaler.step(optimizer)\n    loss.backward()\n{calls}"
    return {"train.py": f"from m_0 import step_0\n{HEAD}{STEP}step_0(x)\n", **files}


@source
def modules_of_one_name(size):
    files = {f"p_{i}/util.py": "def step(x):\n    x.grad.norm()\n    scaler.unscale_(x)\n" for i in range(size)}
    trainers = {f"p_{i}/train.py": f"from util import step\n{HEAD}{STEP}step(x)\n" for i in range(size)}
    return {**trainers, **files}


@source
def trainers_that_import_one_module(size):
    helper = "def step(x):\n    scaler.unscale_(x)\n    x.grad.norm()\n"
    trainers = {f"t_{i}.py": f"from util import step\n{HEAD}{STEP}step(x)\n" for i in range(size)}
    return {**trainers, "util.py": helper}


@source
def imports_of_names(size):
    imports = "".join(f"from util import f_{i}\n" for i in range(size))
    helpers = "".join(f"def f_{i}(x):\n    x.grad.norm()\n" for i in range(size))
    return {"train.py": f"{imports}{HEAD}{STEP}", "util.py": helpers}


@source
def cells_of_a_notebook(size):
    cells = [HEAD, *(f"scaler_{i} = torch.cuda.amp.GradScaler()\n" for i in range(size)), STEP]
    code = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    return {"train.ipynb": json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code})}


@source
def magics_of_a_notebook(size):
    cells = [HEAD, "".join(f"%time x_{i} = 1\n!ls\n" for i in range(size)) + STEP]
    code = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    return {"train.ipynb": json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code})}


@source
def markers_in_a_notebook(size):
    cells = [HEAD, "".join(f"# %% cell{'-' * i} 1\n" for i in range(int((2 * size) ** 0.5))) + STEP]
    code = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    return {"train.ipynb": json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code})}
