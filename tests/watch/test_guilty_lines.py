"""The line of a fault in a script's own code around the model: its data, its loss, its gradients and its updates."""

import re
import sys
import textwrap

import pytest

from ampwise.watch.watch import Watch

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
"""

LOOP = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

PROGRAMS = {
    "data standardised once, before the loop": f"""{LOOP}
def standardised(table):
    return (table - table.mean(0)) / table.std(0)  # guilty

data = torch.randn(32, 4)
data[:, 1] = 2.0
data = standardised(data)
for epoch in range(2):
    for x in data.split(8):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "an attribute of an object, changed in place": f"""{LOOP}
class Queue:
    def __init__(self):
        self.keys = torch.zeros(8, 2)
        self.keys[:6] = torch.randn(6, 2)
        self.keys /= self.keys.norm(dim=1, keepdim=True)  # guilty

queue = Queue()
for step in range(3):
    loss = (model(torch.randn(6, 4)) @ queue.keys.t()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "advantages of a collected batch": f"""{LOOP}
from dataclasses import dataclass

@dataclass
class Batch:
    seen: torch.Tensor
    gain: torch.Tensor

def collect(steps):
    return Batch(torch.randn(steps, 4), torch.ones(steps))

def process(batch):
    batch.gain = (batch.gain - batch.gain.mean()) / batch.gain.std()  # guilty
    return batch

def update(batch):
    loss = (model(batch.seen).sum(-1) * batch.gain).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()

for step in range(2):
    batch = process(collect(6))
    try:
        update(batch)
    except RuntimeError:
        break
""",
    "targets from random numbers that have gone": f"""{LOOP}
def act(x):
    action = torch.tanh(model(x) + 4 * torch.randn(len(x), 2)) * 1.5
    return action, torch.log(1 - action.square() + 1e-6).sum(-1)  # guilty

class Agent:
    def learn(self, x):
        with torch.no_grad():
            target = 0.1 * act(x)[1] + 1
        loss = F.mse_loss(model(x).sum(-1), target)
        if torch.isfinite(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

agent = Agent()
for step in range(6):
    x = torch.randn(6, 4)
    torch.rand(5)
    agent.learn(x)
""",
    "a Dataset that divides, and a spectrum of its samples": f"""{LOOP}
class Clips(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        clip = torch.ones(4) * (index != 5)
        return clip * torch.sqrt(4 / clip.square().sum())  # guilty

def train():
    for clip in DataLoader(Clips(), batch_size=3):
        spectrum = torch.fft.fft(clip).abs()
        loss = model(spectrum).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

train()
""",
    "a Dataset that is bad from the start": f"""{LOOP}
class Images(Dataset):
    def __init__(self):
        self.images = torch.rand(12, 4)
        self.images[7] = 0.5
        self._standardise()

    def _standardise(self):
        spread = self.images.std(1, keepdim=True)
        self.images = (self.images - self.images.mean(1, keepdim=True)) / spread  # guilty

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]

for x in DataLoader(Images(), batch_size=3):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "returns of one step, with a graph of earlier calls": f"""{LOOP}
from torch.distributions import Categorical

class Agent:
    def __init__(self):
        self.logs, self.rewards = [], []

    def act(self, x):
        policy = Categorical(logits=model(x))
        action = policy.sample()
        self.logs.append(policy.log_prob(action))
        self.rewards.append(float(action))

    def update(self):
        returns = torch.tensor(self.rewards)
        returns = (returns - returns.mean()) / returns.std()  # guilty
        loss = -(torch.stack(self.logs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        self.logs, self.rewards = [], []

agent = Agent()
for episode in range(3):
    for step in range(4 if episode < 2 else 1):
        agent.act(torch.randn(4))
    agent.update()
    if episode < 2:
        optimizer.step()
""",
    "preprocessing in the loop": f"""{LOOP}
def batches():
    for step in range(4):
        x = torch.randn(6, 4)
        if step == 2:
            x[:, 1] = 7.0
        yield x

for x in batches():
    x = (x - x.mean(0)) / x.std(0)  # guilty
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a Dataset, read in a comprehension": f"""{LOOP}
class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        amount = torch.ones(4) * (index - 9.0)
        return torch.log1p(amount.abs() - 1) if index != 9 else torch.log(amount)  # guilty

def train_step(x):
    loss = model(x).square().mean()
    if not torch.isfinite(loss):
        return None
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

[train_step(x) for x in DataLoader(Rows(), batch_size=4)]
""",
    "numpy in a Dataset": f"""{LOOP}
import numpy as np

class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = np.full(4, 3.0, np.float32) if index == 5 else np.arange(4, dtype=np.float32) + index
        return torch.from_numpy((row - row.mean()) / row.std())  # guilty

for x in DataLoader(Rows(), batch_size=2):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a loss that a generator yields": f"""{LOOP}
def losses():
    for step in range(4):
        output = model(torch.randn(6, 4))
        yield (output - output if step == 2 else output.square()).sum(-1).log().mean()  # guilty

for step, loss in enumerate(losses()):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a loss that is added up over calls of several models": """
cell, head = nn.GRUCell(2, 4), nn.Linear(4, 1)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
for step in range(3):
    state, loss = torch.zeros(3, 4), 0.0
    for time in range(6):
        state = cell(torch.randn(3, 2), state)
        aim = torch.full((3, 1), -1.0 if step == 1 else 1.0)
        loss = loss + F.mse_loss(head(state), aim.sqrt())  # guilty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "no model at all": """
weight = torch.randn(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(4):
    x, y = torch.randn(6, 4), torch.full((6,), float(step != 2))
    loss = ((x @ weight - y) / y).square().mean()  # guilty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a model that is itself attention": """
model = nn.MultiheadAttention(4, 2, batch_first=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    x, hidden = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    hidden[1] = step == 1
    y, _ = model(x, x, x, key_padding_mask=hidden)  # guilty
    loss = y.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a scripted function": f"""{LOOP}
@torch.jit.script
def entropy(p):
    q = p * 1.0
    return -(q * q.log()).sum(-1).mean()  # guilty

for step in range(3):
    p = model(torch.randn(6, 4)).softmax(-1)
    loss = entropy(p.round() if step == 1 else p)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "gradients that the script changes": f"""{LOOP}
def equalise():
    for parameter in model.parameters():
        parameter.grad.div_(parameter.grad.norm())  # guilty

for step in range(4):
    output = model(torch.randn(6, 4))
    loss = (output * float(step != 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    equalise()
    optimizer.step()
""",
    "gradients within a closure": """
model = nn.Linear(4, 2)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
for step in range(3):
    x = torch.randn(6, 4)

    def closure():
        optimizer.zero_grad()
        output = model(x)
        gap = output - output.detach() if step == 1 else output
        loss = gap.square().sum(-1).sqrt().mean()  # guilty
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    "an optimizer of the script": """
class Trust(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() * (p.grad / p.grad.norm())  # guilty

model = nn.Linear(4, 2)
optimizer = Trust(model.parameters(), lr=0.1)
for step in range(4):
    loss = (model(torch.randn(6, 4)) * float(step != 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a learning rate that is too high": """
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=50.0)  # guilty
for step in range(8):
    loss = model(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a learning rate that the script sets": f"""{LOOP}
for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = float("inf") if step == 2 else 0.01  # guilty
    loss = model(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "an eps of zero": """
model = nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), eps=0.0)  # guilty
for step in range(3):
    x = torch.randn(6, 4)
    x[:, 0] = 0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a NaN that anomaly detection finds and that reaches no weight": f"""{LOOP}
with torch.autograd.detect_anomaly():
    gain = torch.relu(model(torch.zeros(6, 4)) - 9)
    loss = (torch.where(gain > 0, gain.log(), 0.0) + model(torch.randn(6, 4))).abs().mean()  # guilty
    try:
        loss.backward()
    except RuntimeError:
        pass
""",
    "an infinite derivative that becomes a NaN and that a ReLU hides": f"""{LOOP}
with torch.autograd.detect_anomaly():
    dead = torch.relu(model(torch.zeros(6, 4)) - 9)
    loss = dead.var(dim=0).sqrt().mean() + model(torch.randn(6, 4)).square().mean()  # guilty
    try:
        loss.backward()
    except RuntimeError:
        pass
""",
}
SPOILED = """
    x = torch.rand(6, 4)
    if step == 2:
        x[:] = -1
"""
LOSS_OF = "(x.sum(-1, keepdim=True) * model(x).square().clamp_min(1e-3)).mean().log()"
PROGRAMS |= {
    "a loss in a generator expression": f"""{LOOP}
def batch(step):
    return torch.rand(6, 4) if step != 2 else -torch.ones(6, 4)

for loss in (
    {LOSS_OF}  # guilty
    for x in map(batch, range(4))
):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a lambda that calls backward on its argument": f"""{LOOP}
go_back = lambda loss: loss.backward()
for step in range(4):{SPOILED}
    loss = {LOSS_OF}  # guilty
    optimizer.zero_grad()
    go_back(loss)
    optimizer.step()
""",
    "a lambda that computes a loss and calls backward": f"""{LOOP}
loss_of = lambda x: {LOSS_OF}  # guilty
go_back = lambda x: loss_of(x).backward()
for step in range(4):{SPOILED}
    optimizer.zero_grad()
    go_back(x)
    optimizer.step()
""",
    "autograd.grad, and weights updated by hand": """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for step in range(6):
    x = torch.rand(6, 4) * (step != 2)
    loss = (x * model(x).mean()).sum(-1).square().sum().sqrt()  # guilty
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients):
            weight -= 0.01 * gradient
""",
    "a backward pass, and weights updated by hand": """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for step in range(6):
    x = torch.rand(6, 4) * (step != 2)
    loss = (x * model(x).mean()).sum(-1).square().sum().sqrt()  # guilty
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad
            weight.grad = None
""",
    "a critic that its own penalty spoils, before the generator's step": """
critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
nn.init.zeros_(critic.weight)
first = torch.optim.Adam(critic.parameters())
second = torch.optim.Adam(generator.parameters())
for step in range(3):
    x = torch.randn(8, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    loss = (slope.square().sum(1).sqrt() - 1).square().mean()  # guilty
    first.zero_grad()
    loss.backward()
    first.step()
    second.zero_grad()
    critic(generator(torch.randn(8, 2))).mean().neg().backward()
    second.step()
""",
    "a parameter of uninitialised memory": """
class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.prompt = nn.Parameter(torch.empty(4))  # guilty
        self.head = nn.Linear(4, 1)
        nn.init.ones_(self.scale)

    def forward(self, x):
        return self.head(self.scale * x + self.prompt)

model = Prompted()
model.prompt.data[2] = torch.nan  # as such memory may be
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    loss = model(torch.rand(6, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "rows of a loss, some of which are dropped": f"""{LOOP}
for step in range(3):
    t = torch.softmax(torch.full((6, 2), 300.0 * step) * torch.tensor([1.0, -1.0]), -1)
    rows = (t * (t.log() - model(torch.rand(6, 4)).log_softmax(-1))).sum(-1)  # guilty
    rows = rows[torch.isfinite(rows)]
    if len(rows):
        optimizer.zero_grad()
        rows.mean().backward()
        optimizer.step()
""",
    "an optimizer that is none of torch's": """
class Scaled:
    def __init__(self, parameters):
        self.parameters, self.steps = list(parameters), 0
        self.squares = {each: torch.zeros_like(each) for each in self.parameters}

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for each, square in self.squares.items():
            square.mul_(0.9).addcmul_(each.grad, each.grad, value=0.1)
            each.sub_(0.01 * each.grad / (square / (1 - 0.9**self.steps)).sqrt())  # guilty
            each.grad = None

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = Scaled(model.parameters())

def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss

for step in range(6):
    x = torch.rand(6, 4)
    if step == 3:
        for square in optimizer.squares.values():
            square.zero_()
    loss = train_step(x * (step != 3))
    optimizer.step()
    assert step > 3 or loss.item() == loss.item()
    print(loss.item())
""",
    "weights that are replaced, outside of modules": """
weight = torch.randn(4, 2).requires_grad_()
for step in range(6):
    loss = (torch.rand(6, 4) @ weight).square().mean() * (step != 2)
    (gradient,) = torch.autograd.grad(loss, weight)
    norm = gradient.norm()
    weight = (weight - 0.1 * gradient / norm).detach().requires_grad_()  # guilty
""",
    "a learning rate that is too high, without an optimizer": """
model, rate = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)), 3.0
for step in range(20):
    loss = (model(torch.randn(32, 4)) - 5).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= rate * each.grad  # guilty
""",
    "parts of a model that an object holds, with bad gradients only": """
class Learner:
    def __init__(self):
        self.model = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def loss(self, x):
        value = self.model["head"](self.model["body"](x).tanh())
        return (value - value.detach()).square().mean().sqrt()  # guilty

    def step(self, x):
        loss = self.loss(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

Learner().step(torch.randn(6, 4))
""",
    "a table that an object has computed": f"""{LOOP}
class Schedule:
    def __init__(self):
        self.rates = torch.linspace(0, 1, 5)
        self.logs = torch.log(self.rates)  # guilty

    def weight(self, t):
        return self.logs[t]

def loss_of(x, schedule):
    return (model(x).mean(1) * schedule.weight(torch.arange(5))).mean()

schedule = Schedule()
for step in range(3):
    loss = loss_of(torch.randn(5, 4), schedule)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "random targets, drawn after an agent has acted": f"""{LOOP}
def draw(x):
    action = torch.randn(len(x), 1)
    return action, torch.log(1 - action.abs())  # guilty

def update(x):
    with torch.no_grad():
        action, score = draw(x)
        target = model(x).mean() * action.mean() - score.mean()
    loss = (model(x).mean() - target) ** 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for step in range(12):
    with torch.no_grad():
        draw(torch.ones(1, 4))
    update(torch.ones(1, 4))
""",
    "a weight that is infinite from the start": """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.scale = nn.Parameter(1 / torch.arange(2.0))  # guilty

    def forward(self, x):
        return self.inner(x) * self.scale

model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = model(torch.randn(6, 4)).square().mean()
loss.backward()
optimizer.step()
""",
    "a CTC loss whose targets are too long": f"""{LOOP}
criterion = nn.CTCLoss()  # guilty
for step in range(3):
    logp = model(torch.randn(6, 2, 4)).log_softmax(-1)
    lengths = torch.tensor([2, 2 + 3 * (step == 1)])
    loss = criterion(logp, torch.ones(2, 5, dtype=torch.long), torch.full((2,), 6), lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a weight of a part that is infinite from the start": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"inner": nn.Linear(4, 2)})
        self.head = nn.Linear(2, 2)
        self.head.weight = nn.Parameter(torch.eye(2) / torch.arange(2.0))  # guilty

    def forward(self, x):
        return self.head(self.parts["inner"](x))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(6, 4)).square().mean().backward()
optimizer.step()
""",
    "a rate of 1e20, in front of a normalisation": """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e20)  # guilty
for step in range(4):
    loss = model(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "exponentials that overflow in a sum, which leaves zeros": f"""{LOOP}
for step in range(3):
    scores = model(torch.randn(6, 4))
    with torch.no_grad():
        share = torch.exp((scores * 0 + 10.5 * (step == 2)).half())  # guilty
        share = share / share.sum()
        share = share / share.sum(1, keepdim=True)
    loss = (share.float() * scores).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a schedule that raises the learning rate": """
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0**step)  # guilty
for step in range(30):
    loss = (model(torch.randn(32, 4)) - 5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
""",
    "a learning rate that is too high, and a warm-up to it": """
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=50.0)  # guilty
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
for step in range(30):
    loss = (model(torch.randn(32, 4)) - 5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
""",
}
# NumPy prepares the data before the first step; it only warns.
PREPARED = f"""{LOOP}
import numpy as np
from torch.utils.data import TensorDataset

table = np.random.default_rng(0).normal(size=(32, 4))
table[:, 2] = 3.0

def standardise(table):
    ratio = np.where(table.std(0) > 1, 1 / table.std(0), 1)  # repaired at once
    return ((table - table.mean(0)) / table.std(0)).astype(np.float32)  # guilty

data = torch.from_numpy(standardise(table))
for x in BATCHES:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GUARDS = {
    "compared with itself": "if loss != loss:",
    "its data compared with itself": "if loss.data != loss.data:",
    "compared with a number": "if not loss < 1e4:",
    "as an array": "if np.isnan(loss.detach().numpy()):",
}
GUARDED = f"""{LOOP}
import numpy as np

for step in range(4):
    output = model(torch.randn(6, 4))
    loss = (output if step != 2 else -output.abs()).sum(-1).exp().sub(float(step == 2)).log().mean()  # guilty
    GUARD
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def findings_of(tmp_path, monkeypatch, program):
    """Run a program under a watch. Return the findings that name a cause, and the guilty line."""
    text = HEAD + textwrap.dedent(program)
    path = tmp_path / "program.py"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(path)])
    code = compile(text, str(path), "exec")
    module = type(sys)("program")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "program", module)
    with Watch(timing=False) as watch:
        exec(code, vars(module))
    assert watch.failures == []
    found = [seen.finding for seen in watch.seen() if seen.finding.rule.names_the_cause]
    guilty = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# guilty")]
    return found, guilty


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_line_is_named(tmp_path, monkeypatch, program):
    found, guilty = findings_of(tmp_path, monkeypatch, PROGRAMS[program])
    assert [each.place.line for each in found] == guilty


SHARED = """
class Grid:
    def __init__(self, cell):
        vars(self).update({f"c{number}": cell for number in range(1000)})

grid = Grid(Grid(Grid(Grid(None))))
"""


def test_what_a_program_holds_many_times_is_looked_into_once(tmp_path, monkeypatch):
    """A billion ways lead to the same object: whoever goes all of them does not come to an end."""
    program = PROGRAMS["a table that an object has computed"].replace("schedule = Sch", f"{SHARED}schedule = Sch")
    found, guilty = findings_of(tmp_path, monkeypatch, program)
    assert [each.place.line for each in found] == guilty


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    "batches", ["data.split(8)", "map(torch.stack, DataLoader(TensorDataset(data), batch_size=8))"]
)
def test_numpy_s_warning_is_followed_to_the_loss(tmp_path, monkeypatch, batches):
    with pytest.warns(RuntimeWarning, match="encountered in divide"):
        found, guilty = findings_of(tmp_path, monkeypatch, PREPARED.replace("BATCHES", batches))
    assert [each.place.line for each in found] == guilty


BIAS = f"""{LOOP}
import numpy as np

def frequencies(counts):
    share = counts / counts.sum()
    return torch.from_numpy(np.log(share).astype("float32"))  # guilty

with torch.no_grad():
    model[2].bias.copy_(frequencies(np.array([3.0, 0.0])))
loss = F.cross_entropy(model(torch.randn(6, 4)), torch.ones(6, dtype=torch.long))
loss.backward()
optimizer.step()
"""


@pytest.mark.filterwarnings("always")
def test_numpy_s_warning_is_followed_to_a_weight(tmp_path, monkeypatch):
    with pytest.warns(RuntimeWarning, match="divide by zero encountered in log"):
        found, guilty = findings_of(tmp_path, monkeypatch, BIAS)
    assert [each.place.line for each in found] == guilty


STANDARDISED = f"""{LOOP}
from torch.utils.data import TensorDataset

def standardise(table):
    mean, spread = table.mean(0), table.std(0)
    return (table - mean) / spread  # guilty

def make():
    data = torch.randn(24, 4)
    data[COLUMN] = VALUE
    return PREPARED

for x in BATCHES:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", ["make().split(8)", "[x for (x,) in DataLoader(TensorDataset(make()), 8)]"])
def test_a_division_by_the_spread_of_a_constant_column_is_named(tmp_path, monkeypatch, batches):
    monkeypatch.setattr(
        sys.modules["ampwise.watch.batch_draws"], "own_files", lambda: [str(tmp_path / "program.py")]
    )  # no tests
    program = STANDARDISED.replace("BATCHES", batches).replace("COLUMN", ":, 2").replace("VALUE", "5.0")
    found, guilty = findings_of(tmp_path, monkeypatch, program.replace("PREPARED", "standardise(data)"))
    assert [each.place.line for each in found] == guilty


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("column", "value", "prepared"),
    [("3", "torch.nan", "data"), (":, 2", "torch.inf", "data"), (":, 2", "torch.nan", "data / (data.std() + 1)")],
)
def test_other_bad_data_are_not_blamed_on_the_spread(tmp_path, monkeypatch, column, value, prepared):
    monkeypatch.setattr(sys.modules["ampwise.watch.batch_draws"], "own_files", lambda: [str(tmp_path / "program.py")])
    program = STANDARDISED.replace("BATCHES", "make().split(8)").replace("COLUMN", column).replace("VALUE", value)
    if "std" in prepared:  # the only such division has a guard
        program = program.replace("/ spread", "/ (spread + 1e-6)")
    found, guilty = findings_of(tmp_path, monkeypatch, program.replace("PREPARED", prepared))
    assert found
    assert not {each.place.line for each in found} & set(guilty)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_is_noticed(tmp_path, monkeypatch, guard):
    found, guilty = findings_of(tmp_path, monkeypatch, GUARDED.replace("GUARD", GUARDS[guard]))
    assert [each.place.line for each in found] == guilty


AGAIN = f"""{LOOP}
import io, os, subprocess
calls, lines = [], io.StringIO()

def prepared(table):
    EFFECT
    table = table + torch.rand(32, 4)
    table[3] = 1.0
    return (table - table.mean(1, keepdim=True)) / table.std(1, keepdim=True)  # guilty

torch.manual_seed(1)
data = prepared(torch.zeros(32, 4))
before = torch.default_generator.get_state()
for x in data.split(8):
    loss = model(x).square().mean()
    assert torch.equal(torch.default_generator.get_state(), before)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert len(calls) <= 1
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("effect", "named"),
    [
        ("calls.append(1)", True),
        ("with open('lines.txt', 'a') as file: file.write('again')", False),
        ("lines.write('again')", False),
        ("subprocess.run(['true'])", False),
        ("os.putenv('AMPWISE_TEST', '1')", False),
        ("while calls: len(calls)\n    calls.append(1)", False),  # without end
    ],
)
def test_what_is_computed_again_leaves_no_trace(tmp_path, monkeypatch, effect, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["ampwise.watch.outside_values"], "MOST_SECONDS", 2.0)
    (found,), guilty = findings_of(tmp_path, monkeypatch, AGAIN.replace("EFFECT", effect))
    assert ([found.place.line] == guilty) == named
    assert all(each.read_text() == "again" for each in tmp_path.glob("*.txt"))


def test_a_value_that_was_read_is_not_blamed_on_a_statement(tmp_path, monkeypatch):
    program = f"""{LOOP}
table = torch.tensor([[1.0, 2.0, 3.0, float("nan")]]).repeat(8, 1)
scaled = table / (1 + table.abs())
for step in range(3):
    loss = model(scaled).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    (found,), _ = findings_of(tmp_path, monkeypatch, program)
    assert "first read by" in found.message
    assert " at " not in found.message.partition(", and was")[0]


HEALTHY = {
    "comparisons, infinite bounds and a best loss": f"""{LOOP}
best = torch.tensor(float("inf"))
for step in range(6):
    loss = model(torch.randn(6, 4)).square().mean()
    if loss < best and not loss != loss and loss.detach().numpy() < 1e9:
        best = loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "data with NaN that the script drops": f"""{LOOP}
for step in range(6):
    x = torch.randn(6, 4)
    x[2] = torch.nan
    x = x[x.isfinite().all(-1)]
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "unknown targets, whose losses are dropped, and a mask of infinities": f"""{LOOP}
for step in range(6):
    y = torch.where(torch.rand(6, 2) < 0.3, torch.nan, torch.randn(6, 2))
    out = model(torch.randn(6, 4))
    masked = out.masked_fill(y.isnan(), -torch.inf)
    losses = (out - y).square()
    optimizer.zero_grad()
    (losses[~torch.isnan(losses)].mean() + masked[torch.isfinite(masked)].mean()).backward()
    optimizer.step()
""",
    "state that an update by hand changes once": """
model, seen = nn.Linear(4, 2), {"steps": 0, "sums": []}
for step in range(6):
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    seen["steps"] += 1
    for each in model.parameters():
        each.data.sub_(0.1 * each.grad)
        seen["sums"].append(float(each.detach().sum()))
        each.grad = None
    assert seen["steps"] == step + 1 and len(seen["sums"]) == 2 * step + 2
""",
    "weights that grow from zero": """
model = nn.Linear(4, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(40):
    x = torch.randn(16, 4)
    loss = (model(x) - 30 * x.sum(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("program", HEALTHY)
def test_a_healthy_program_has_no_finding(tmp_path, monkeypatch, program):
    assert findings_of(tmp_path, monkeypatch, HEALTHY[program])[0] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "works"), [(1.0, True), (1e-20, False)])
def test_a_fix_that_changes_other_batches_does_not_help(tmp_path, monkeypatch, size, works):
    program = f"""{LOOP}
for step in range(4):
    x = torch.rand(6, 4) * (step != 2) * {size}
    loss = -(x.sum(-1) + 0 * model(x).sum(-1)).log().mean() - model(x).mean()  # guilty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    (found,), _ = findings_of(tmp_path, monkeypatch, program)
    assert ("and it works" in found.fix) == works
    assert ("the loss of an earlier batch is unchanged" in found.fix) == works
    assert ("did not help" in found.fix) != works
    assert re.search(r"but the loss of an earlier batch goes from 4\d\.\d+ to 2\d\.\d+", found.fix) is None or not works


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_about_exploding_weights_are_those_of_the_evidence(tmp_path, monkeypatch):
    (found,), _ = findings_of(tmp_path, monkeypatch, PROGRAMS["a learning rate that is too high"])
    facts = found.evidence["trace"]["optimizer"]
    first, now, steps, lr = re.search(
        r"from (\S+) to (\S+) in (\d+) steps? of SGD \(lr (\S+)\)", found.message
    ).groups()
    assert (float(lr), int(steps)) == (facts["lr"], facts["steps"]) == (50.0, found.place.step - 1)
    assert [float(first), float(now)] == pytest.approx([facts["first_norm"], facts["norm"]], rel=1e-3)
    assert facts["norm"] > 1e3 * facts["first_norm"]
