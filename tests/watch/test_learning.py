"""Training that runs, and does not learn what it should: small scripts, each with the one finding that it must have.

``# expect: AMP620`` marks the line that a finding is to name. Scripts of ``FINE`` look like a mistake and are right.
"""

import re
import runpy
import textwrap

import pytest

from ampwise.runs.rows import fold_consequences
from ampwise.watch.watch import Watch

SETUP = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))


def mlp(*extra):
    return nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 4))


def batch():
    return torch.randn(32, 8), torch.randint(0, 4, (32,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def train(model, optimizer, steps=40, draw=batch):
    for _ in range(steps):
        inputs, labels = draw()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

"""

FAULTS = {
    "a prediction of shape (n, 1) against targets of shape (n)": """
        model, target = nn.Linear(8, 1), torch.randn(32)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(x), target)  # expect: AMP640
            loss.backward()
            optimizer.step()
    """,
    "the same by hand, and divided": """
        model, target = nn.Linear(8, 1), torch.randn(32)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = ((target - model(x)) ** 2).mean()  # expect: AMP640
            loss = loss / 2
            loss.backward()
            optimizer.step()
    """,
    "the same in a criterion, with a branch": """
        class Smooth(nn.Module):
            def forward(self, prediction, target):
                error = prediction - target  # expect: AMP640
                return torch.where(error.abs() < 1, error.square(), error.abs()).mean()

        model, target, criterion = nn.Linear(8, 1), torch.randn(32), Smooth()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = criterion(model(x), target) + 0.01 * model.weight.square().sum()
            loss.backward()
            optimizer.step()
    """,
    "probabilities for a loss that takes their logarithms": """
        model = nn.Sequential(mlp(), nn.Softmax(-1))
        criterion = nn.NLLLoss()

        def loss_of(inputs, labels):
            return criterion(model(inputs), labels)  # expect: AMP642

        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()
    """,
    "raw outputs for a loss that takes logarithms": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.001)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)  # expect: AMP642
            loss.backward()
            optimizer.step()
    """,
    "a softmax before the cross entropy": """
        class Normalised(Net):
            def __init__(self):
                super().__init__()
                self.softmax = nn.Softmax(-1)
            def forward(self, x):
                return self.softmax(super().forward(x))  # expect: AMP641

        model = Normalised()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a sigmoid before a loss that applies it, beside another": """
        model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())  # expect: AMP641
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            out = model(x).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(out, (y % 2).float()) + 0.1 * out.square().mean()
            loss.backward()
            optimizer.step()
    """,
    "one autocast region around all steps": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # expect: AMP116
            for _ in range(20):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                optimizer.step()
    """,
    "layers replaced before a shorter second phase, whose optimizer was made before": """
        model = Net()
        first = Adam(model.parameters(), lr=0.01)
        train(model, first, steps=120)
        second = Adam(model.parameters(), lr=0.01)  # expect: AMP621
        model.head = nn.Linear(16, 4)
        train(model, second, steps=100)
    """,
    "a layer replaced in the middle, whose predecessor keeps its gradients": """
        model = Net()
        optimizer = Adam(model.parameters(), lr=0.01)  # expect: AMP620
        for step in range(90):
            if step == 40:
                model.head = nn.Linear(16, 4)
            inputs, labels = batch()
            loss = F.cross_entropy(model(inputs), labels)
            model.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a parameter that is converted, and no longer one of its module": """
        class Gated(Net):
            def __init__(self):
                super().__init__()
                self.gate = nn.Parameter(torch.ones(8, dtype=torch.float64)).float()  # expect: AMP620
                self.shift = nn.Parameter(torch.zeros(8))
            def forward(self, x):
                return super().forward(x * self.gate + self.shift)

        model = Gated()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a criterion with parameters, forgotten": """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.log_scale = nn.Parameter(torch.zeros(4))
            def forward(self, out, y):
                return F.cross_entropy(out * self.log_scale.exp(), y)

        model, criterion = mlp(), Scaled()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP620
        for _ in range(40):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    """,
    "an encoder, forgotten": """
        encoder, head = nn.Linear(8, 16), nn.Linear(16, 4)
        optimizer = Adam(head.parameters())  # expect: AMP620
        train(nn.Sequential(encoder, nn.ReLU(), head), optimizer)
    """,
    "modules in a plain list are in no optimizer": """
        class Listed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
                self.out = nn.Linear(8, 4)
            def forward(self, x):
                for layer in self.layers:
                    x = torch.relu(layer(x))
                return self.out(x)

        model = Listed()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP620
        train(model, optimizer)
    """,
    "a layer replaced after the optimizer was made": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP621
        model.head = nn.Linear(16, 4)
        train(model, optimizer)
    """,
    "a model copied after the optimizer was made": """
        model = mlp()
        optimizer = Adam(model.parameters())  # expect: AMP621
        model = copy.deepcopy(model)
        train(model, optimizer)
    """,
    "a model made anew in each fold, with one optimizer": """
        optimizer = None
        for fold in range(2):
            model = mlp()
            optimizer = optimizer or SGD(model.parameters(), lr=0.1)  # expect: AMP621
            train(model, optimizer)
    """,
    "zero_grad between backward and step": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            F.cross_entropy(model(x), y).backward()
            optimizer.zero_grad()  # expect: AMP622
            optimizer.step()
    """,
    "everything is frozen but the input": """
        model = mlp().requires_grad_(False)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x.requires_grad_()), y).backward()
            optimizer.step()  # expect: AMP622
    """,
    "no backward pass": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            optimizer.step()  # expect: AMP622
    """,
    "a loss made into a leaf": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.tensor(F.cross_entropy(model(x), y).item(), requires_grad=True)
            loss.backward()  # expect: AMP623
            optimizer.step()
    """,
    "a detached output whose loss requires gradients again": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).detach(), y)
            loss.requires_grad = True
            loss.backward()  # expect: AMP623
            optimizer.step()
    """,
    "the step forgotten": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP624
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
    """,
    "a learning rate of zero": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.0)  # expect: AMP625
        train(model, optimizer)
    """,
    "a warm-up by integer division": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP625
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
        for _ in range(40):
            train(model, optimizer, steps=1)
            scheduler.step()
    """,
    "a learning rate below the resolution": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=1e-12)  # expect: AMP625
        train(model, optimizer)
    """,
    "clipped to nothing": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1e-8)  # expect: AMP625
            optimizer.step()
    """,
    "the graph cut within the model": """
        class Cut(Net):
            def forward(self, x):
                return self.head(torch.relu(self.encoder(x)).detach())

        model = Cut()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP627
        train(model, optimizer)
    """,
    "the graph cut by NumPy between two models": """
        encoder, head = mlp(), nn.Linear(4, 4)
        optimizer = SGD([*encoder.parameters(), *head.parameters()], lr=0.1)  # expect: AMP627
        for _ in range(40):
            optimizer.zero_grad()
            features = torch.from_numpy(encoder(x).detach().numpy())
            F.cross_entropy(head(features), y).backward()
            optimizer.step()
    """,
    "one encoder, two optimizers, one backward pass": """
        encoder, one, two = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        first = SGD([*encoder.parameters(), *one.parameters()], lr=0.1)
        second = SGD([*encoder.parameters(), *two.parameters()], lr=0.1)
        for _ in range(20):
            first.zero_grad()
            second.zero_grad()
            h = encoder(x)
            (F.cross_entropy(one(h), y) + F.cross_entropy(two(h), y)).backward()
            first.step()
            second.step()  # expect: AMP628
    """,
    "weights tied by their data": """
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
                self.head.weight.data = self.embedding.weight.data
            def forward(self, ids):
                return self.head(self.embedding(ids))

        model = Tied()
        optimizer = SGD(model.parameters(), lr=0.1)  # expect: AMP629
        train(model, optimizer, draw=lambda: (torch.randint(0, 20, (16,)), torch.randint(0, 20, (16,))))
    """,
    "a tie broken by a new parameter": """
        embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        head.weight = nn.Parameter(head.weight.clone())  # expect: AMP629
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, draw=lambda: (torch.randint(0, 20, (16,)), torch.randint(0, 20, (16,))))
    """,
    "a tie broken by loading": """
        embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)  # expect: AMP629
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, draw=lambda: (torch.randint(0, 20, (16,)), torch.randint(0, 20, (16,))))
    """,
    "evaluation leaves its mode on": """
        model = mlp(nn.Dropout(0.5))
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(4):
            train(model, optimizer, steps=10)
            model.eval()  # expect: AMP630
            with torch.no_grad():
                model(x)
    """,
    "set to evaluation before the training": """
        model = mlp(nn.BatchNorm1d(16))
        model.eval()  # expect: AMP630
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "evaluated in training mode": """
        model = mlp(nn.Dropout(0.5))
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            train(model, optimizer, steps=10)
            with torch.no_grad():
                for _ in range(5):
                    model(batch()[0])  # expect: AMP631
    """,
    "functional dropout that never stops": """
        class Dropping(Net):
            def forward(self, x):
                return self.head(F.dropout(self.encoder(x), 0.3))  # expect: AMP632

        model = Dropping()
        train(model, SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            model(x)
    """,
    "attention that drops in evaluation": """
        class Attending(Net):
            dropout = 0.1
            def forward(self, x):
                q = self.encoder(x)[:, None]
                y = F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)  # expect: AMP632
                return self.head(y[:, 0])

        model = Attending()
        train(model, SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            model(x)
    """,
    "a captured step that misses the gradients from a pause on": """
        class Captured(Adam):
            empty = False
            def step(self):
                self.empty |= all(p.grad is None for p in self.param_groups[0]["params"])
                if not self.empty:
                    super().step()

        model = mlp()
        optimizer = Captured(model.parameters(), lr=1e-3)  # expect: AMP625
        for step in range(70):
            optimizer.zero_grad()
            if step != 30:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "a scheduler never stepped": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)  # expect: AMP633
        train(model, optimizer, steps=60)
    """,
    "a warm-up never stepped": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))  # expect: AMP625
        train(model, optimizer, steps=60)
    """,
    "an epoch's schedule in each step": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for _ in range(60):
            train(model, optimizer, steps=1)
            scheduler.step()  # expect: AMP634
    """,
    "a schedule of too few steps": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)  # expect: AMP634
        for _ in range(60):
            train(model, optimizer, steps=1)
            scheduler.step()
    """,
    "a cosine that turns in each epoch": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        for _ in range(50):
            train(model, optimizer, steps=1)
            scheduler.step()  # expect: AMP635
    """,
    "the first batch, again and again": """
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        model = mlp()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: next(iter(loader)))  # expect: AMP636
    """,
    "clipped after the step": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            clip_grad_norm_(model.parameters(), 1.0)  # expect: AMP637
    """,
    "clipped before the backward pass": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            clip_grad_norm_(model.parameters(), 1.0)  # expect: AMP637
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "a generator that is used up": """
        model = mlp()
        params = model.parameters()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(params, 1.0)  # expect: AMP637
            optimizer.step()
    """,
    "a schedule of steps that moves with each micro-batch": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 60))
        for _ in range(60):
            optimizer.zero_grad()
            for _ in range(8):
                (F.cross_entropy(model(x), y) / 8).backward()
                scheduler.step()  # expect: AMP634
            optimizer.step()
    """,
    "NaN in gradients replaced by a hook": """
        def clean(gradient):
            return torch.where(torch.isfinite(gradient), gradient, 0.0)  # expect: AMP638

        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        distance.weight.register_hook(clean)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * (step % 2)).abs().sqrt()).mean().backward()
            optimizer.step()
    """,
    "NaN in gradients overwritten by hand": """
        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * (step % 2)).abs().sqrt()).mean().backward()
            bad = distance.weight.grad != distance.weight.grad
            distance.weight.grad.masked_fill_(bad, 0.0)  # expect: AMP638
            optimizer.step()
    """,
    "NaN in gradients overwritten in their data": """
        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * (step % 2)).abs().sqrt()).mean().backward()
            distance.weight.grad.data.nan_to_num_()  # expect: AMP638
            optimizer.step()
    """,
    "NaN in gradients replaced": """
        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * 0.0).abs().sqrt()).mean().backward()
            for parameter in [*model.parameters(), *distance.parameters()]:
                parameter.grad = torch.nan_to_num(parameter.grad)  # expect: AMP638
            optimizer.step()
    """,
    "a mean over ignored positions": """
        model, labels = mlp(), y.clone()
        labels[::2] = -100
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), labels, reduction="none")  # expect: AMP639
            loss.mean().backward()
            optimizer.step()
    """,
    "gradients never cleared": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=1e-3)
        for _ in range(20):
            F.cross_entropy(model(x), y).backward()  # expect: AMP208
            optimizer.step()
    """,
    "an average in BF16": """
        model = mlp()
        ema = copy.deepcopy(model).to(torch.bfloat16)  # expect: AMP408
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(80):
            train(model, optimizer, steps=1)
            with torch.no_grad():
                for average, weight in zip(ema.parameters(), model.parameters()):
                    average.mul_(0.999).add_(weight, alpha=0.001)
    """,
    "both factors of an adapter, zero": """
        class Adapted(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base.requires_grad_(False)
                self.down = nn.Parameter(torch.empty(2, 8))
                self.up = nn.Linear(2, 4, bias=False)
                self.reset()
            def reset(self):
                nn.init.zeros_(self.up.weight)
                nn.init.constant_(self.down, 0.0)  # expect: AMP626
            def forward(self, x):
                return self.base(x) + self.up(x @ self.down.T)

        model = Adapted(mlp())
        train(model, SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))
    """,
    "all gradients zero": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * 0.0).backward()  # expect: AMP626
            optimizer.step()
    """,
}

FINE = {
    "as many outputs as samples, and losses over pairs": """
        model, embed = nn.Linear(8, 32), nn.Linear(8, 1)
        optimizer = SGD([*model.parameters(), *embed.parameters()], lr=0.01)
        quantiles = torch.linspace(0.1, 0.9, 32)
        for _ in range(20):
            optimizer.zero_grad()
            (model(x) - torch.randn(32, 1)).square().mean().backward()  # 32 quantiles of each sample
            F.mse_loss(model(x), torch.randn(32, 32)).backward()
            z = embed(x)
            ((z - z.T).abs() - 1.0).square().mean().backward()  # distances of all pairs
            nearest = (embed(x) - quantiles).square().min(-1).values.mean()  # each to its nearest
            nearest.backward()
            optimizer.step()
    """,
    "a frozen backbone": """
        model = Net()
        model.encoder.requires_grad_(False)
        train(model, SGD(model.head.parameters(), lr=0.1))
    """,
    "a frozen backbone, in the optimizer": """
        model = Net()
        model.encoder.requires_grad_(False)
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a pretrained backbone left out of the optimizer": """
        model = Net()
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        train(model, SGD(model.head.parameters(), lr=0.1))
    """,
    "a fixed network in the loss": """
        model, critic = nn.Linear(8, 8), nn.Linear(8, 1).eval()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            critic(model(x)).square().mean().backward()
            optimizer.step()
    """,
    "unfrozen in a second phase": """
        model = Net()
        train(model, SGD(model.head.parameters(), lr=0.1))
        train(model, SGD(model.parameters(), lr=0.01))
    """,
    "a parameter group added later": """
        model = Net()
        optimizer = SGD(model.head.parameters(), lr=0.1)
        train(model, optimizer)
        optimizer.add_param_group({"params": model.encoder.parameters()})
        train(model, optimizer, steps=2)
    """,
    "a target network and an average": """
        model = mlp(nn.Dropout(0.1))
        target, average = copy.deepcopy(model).eval(), copy.deepcopy(model)
        optimizer = Adam(model.parameters())
        for step in range(40):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = target(x)
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
            if step % 10 == 0:
                target.load_state_dict(model.state_dict())
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.data.lerp_(fast.data, 0.01)
    """,
    "a copy in BF16 for inference": """
        model = mlp()
        half = copy.deepcopy(model).bfloat16()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(80):
            train(model, optimizer, steps=1)
            with torch.no_grad():
                for copied, weight in zip(half.parameters(), model.parameters()):
                    copied.copy_(weight)
    """,
    "two networks that play against each other": """
        maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        of_maker, of_judge = Adam(maker.parameters()), Adam(judge.parameters())
        for _ in range(40):
            of_judge.zero_grad()
            fake = maker(torch.randn(16, 4))
            (judge(fake.detach()).square().mean() + judge(torch.randn(16, 8)).sub(1).square().mean()).backward()
            of_judge.step()
            of_maker.zero_grad()
            judge(maker(torch.randn(16, 4))).sub(1).square().mean().backward()
            of_maker.step()
    """,
    "parts unused in some steps, or at the end": """
        class Parts(Net):
            def __init__(self):
                super().__init__()
                self.extra, self.pooler = nn.Linear(16, 16), nn.Linear(16, 16)
                self.turn = 0
            def forward(self, x):
                self.turn += 1
                h = torch.relu(self.encoder(x))
                h = self.extra(h) if self.turn % 3 == 0 else h
                self.pooled = self.pooler(h)
                return self.head(h)

        model = Parts()
        train(model, Adam(model.parameters()))
    """,
    "steps within steps, by functional_call": """
        from torch.func import functional_call
        model = mlp()
        optimizer = Adam(model.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            fast = dict(model.named_parameters())
            loss = F.cross_entropy(functional_call(model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads)}
            F.cross_entropy(functional_call(model, fast, (x,)), y).backward()
            optimizer.step()
    """,
    "LBFGS": """
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
        for _ in range(20):
            optimizer.step(closure)
    """,
    "a warm-up from zero, and a cosine down to zero": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        warm = lr_scheduler.LinearLR(optimizer, 1e-9, 1.0, total_iters=10)
        down = lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm, down], milestones=[10])
        for _ in range(60):
            train(model, optimizer, steps=1)
            scheduler.step()
    """,
    "a schedule per epoch, and restarts on purpose": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        for epoch in range(3):
            train(model, optimizer, steps=20)
            scheduler.step()
        restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
        for _ in range(40):
            train(model, optimizer, steps=1)
            restarts.step()
    """,
    "a plateau, and one scheduler instead of another": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        later = lr_scheduler.ExponentialLR(optimizer, 0.99)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        for epoch in range(3):
            train(model, optimizer, steps=20)
            scheduler.step()
    """,
    "accumulated gradients": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(40):
            (F.cross_entropy(model(x), y) / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "gradients cleared by hand": """
        model, other = mlp(), mlp()
        optimizer, second = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
        for _ in range(20):
            F.cross_entropy(model(x), y).backward()
            F.cross_entropy(other(x), y).backward()
            optimizer.step()
            second.step()
            for p in model.parameters():
                p.grad.data.zero_()
            for p in other.parameters():
                p.grad = None
    """,
    "an evaluation between the steps, and one of another kind": """
        model = mlp(nn.Dropout(0.5), nn.BatchNorm1d(16))
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            model.train()
            train(model, optimizer, steps=12)
            model.eval()
            with torch.no_grad():
                for _ in range(5):
                    model(batch()[0])
            model.train()
            with torch.no_grad():  # the spread of many predictions
                for _ in range(10):
                    model(batch()[0])
    """,
    "batch norm in evaluation mode, the rest in training": """
        model = mlp(nn.BatchNorm1d(16), nn.Dropout(0.1))
        model.train()
        model[1].eval()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "evaluation mode without an effect": """
        model = mlp(nn.Dropout(0.0))
        model.eval()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "dropout that evaluation switches off, and noise that it does not": """
        class Noisy(Net):
            def forward(self, x):
                h = F.dropout(self.encoder(x), 0.3, self.training)
                if self.training:
                    h = F.dropout(h, 0.1)
                return self.head(h + torch.randn_like(h))

        model = Noisy()
        train(model, SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            model(x)
    """,
    "the full batch in each step, and a loader for it": """
        loader = DataLoader(TensorDataset(x, y), batch_size=32)
        model = mlp()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (x, y))
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: next(iter(loader)))
    """,
    "a random batch of a shuffled loader": """
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        model = mlp()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: next(iter(loader)))
    """,
    "one batch to look at, once an epoch": """
        loader, shown = [DataLoader(TensorDataset(x, y), batch_size=8) for _ in range(2)]
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(12):
            for inputs, labels in loader:
                train(model, optimizer, steps=1, draw=lambda: (inputs, labels))
            inputs, labels = next(iter(shown))
    """,
    "a short run without a scheduler's step": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.StepLR(optimizer, 10)
        train(model, optimizer, steps=12)
    """,
    "sparse gradients": """
        model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4))
        sparse, dense = torch.optim.SparseAdam(model[0].parameters()), SGD(model[1].parameters(), lr=0.1)
        for _ in range(40):
            sparse.zero_grad()
            dense.zero_grad()
            F.cross_entropy(model(torch.randint(0, 50, (16, 3))), y[:16]).backward()
            sparse.step()
            dense.step()
    """,
    "inference alone": """
        model = mlp(nn.Dropout(0.5)).eval()
        with torch.no_grad():
            for _ in range(40):
                model(batch()[0])
    """,
    "weights tied as they should be": """
        embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        for module in (embedding, head):
            module.weight = nn.Parameter(torch.randn(20, 8))
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        train(model, SGD(model.parameters(), lr=0.1),
              draw=lambda: (torch.randint(0, 20, (16,)), torch.randint(0, 20, (16,))))
    """,
    "a policy that acts in training mode": """
        policy = mlp()
        optimizer = Adam(policy.parameters())
        for _ in range(20):
            with torch.no_grad():
                taken = [(s := torch.randn(1, 8), policy(s).argmax(1)) for _ in range(5)]
            for state, action in taken:
                optimizer.zero_grad()
                F.cross_entropy(policy(state), action).backward()
                optimizer.step()
    """,
    "an optimizer of the script's own": """
        model = Net()
        optimizer = SGD(model.head.parameters(), lr=0.1)
        for _ in range(40):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for p in model.encoder.parameters():
                p.data -= 0.1 * p.grad
    """,
    "an optimizer that only clears gradients": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    """,
    "an attack on a trained model": """
        model = mlp()
        train(model, SGD(model.parameters(), lr=0.1))
        delta = torch.zeros_like(x, requires_grad=True)
        optimizer = SGD([delta], lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            (-F.cross_entropy(model(x + delta), y)).backward()
            optimizer.step()
    """,
    "NaN in the data, and in a masked softmax, replaced": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            inputs = torch.where(torch.rand(32, 8) < 0.1, torch.nan, x)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.nan_to_num(inputs)), y).backward()
            optimizer.step()
    """,
    "the norm read after the step, and a second clip": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            clip_grad_norm_(model.parameters(), float("inf"))
    """,
    "a mean over the positions that count": """
        model, labels = mlp(), y.clone()
        labels[::2] = -100
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            each = F.cross_entropy(model(x), labels, reduction="none")
            (each[labels != -100].mean() + each.sum() / (labels != -100).sum()).backward()
            optimizer.step()
    """,
    "probabilities inside of the model, logits in the loss": """
        class Mixed(Net):
            def forward(self, x):
                mixed = torch.softmax(x, -1) * self.encoder.weight.sigmoid().mean()
                return self.head(torch.relu(self.encoder(mixed))) + self.head.bias.softmax(-1)

        model = Mixed()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + F.nll_loss(model(x).softmax(-1).log(), y)
            (loss + F.cross_entropy(5 * model(x).softmax(-1), y)).backward()
            optimizer.step()
    """,
    "an optimizer that applies the mean of eight gradients": """
        class Patient(SGD):
            count = 0
            def step(self):
                self.count += 1
                if self.count % 8 == 0:
                    super().step()

        model = mlp()
        train(model, Patient(model.parameters(), lr=0.1), steps=70)
    """,
    "a line that is fitted until nothing is left to learn": """
        model, target = nn.Linear(8, 1), x @ torch.randn(8, 1)
        optimizer = SGD(model.parameters(), lr=0.3)
        for _ in range(300):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()
    """,
    "attention that drops in training only, and another source of chance": """
        class Attending(Net):
            dropout, unused = 0.1, 0.0
            def forward(self, x):
                q = self.encoder(x + 0.01 * torch.randn_like(x))[:, None]
                p = self.dropout if self.training else 0.0
                y = F.scaled_dot_product_attention(q, q, q, dropout_p=p)
                y = F.scaled_dot_product_attention(y, q, q, dropout_p=self.unused)
                y = F.scaled_dot_product_attention(y, q, q, dropout_p=self.dropout if self.training else 0.0)
                return self.head(y[:, 0])

        model = Attending()
        train(model, SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            model(x)
    """,
    "a loss of log-probabilities, and differences within a prediction": """
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            scores = model(x)
            pairs = torch.where(y[:, None] > y, F.softplus(scores.T - scores), 0.0).mean()
            probabilities = torch.cat([scores.sigmoid(), 1 - scores.sigmoid()], 1)
            (pairs + F.nll_loss(probabilities.log(), y % 2)).backward()
            optimizer.step()
    """,
    "autocast around each step, and around all of them without its cache": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                optimizer.step()
            loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            for _ in range(20):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                optimizer.step()
    """,
    "questions about finite gradients, and about other values": """
        model = nn.Linear(8, 1)
        model.weight.register_hook(lambda gradient: torch.where(gradient.isfinite(), gradient, 0.0))
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for values in (torch.tensor([1.0, torch.nan]), model.weight.grad * torch.inf):
                values[torch.isnan(values)] = 0.0
            optimizer.step()
    """,
    "two optimizers that take turns": """
        model = mlp()
        first, second = SGD(model.parameters(), lr=0.1), Adam(model.parameters())
        for step in range(40):
            train(model, first if step % 2 else second, steps=1)
    """,
    "two losses, two passes, two optimizers of a shared encoder": """
        encoder, one, two = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        first = SGD([*encoder.parameters(), *one.parameters()], lr=0.1)
        second = SGD([*encoder.parameters(), *two.parameters()], lr=0.1)
        for _ in range(20):
            for optimizer, head in ((first, one), (second, two)):
                train(nn.Sequential(encoder, head), optimizer, steps=1)
    """,
}


def run(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SETUP + textwrap.dedent(text))
    with Watch(timing=False) as watch:
        runpy.run_path(str(script), run_name="__main__")
    assert not watch.failures
    return script.read_text().split("\n"), [each.finding for each in fold_consequences([*watch.findings])]


def expected_and_found(text, tmp_path):
    """Return the lines and codes that a script marks, and the findings of its run."""
    lines, found = run(text, tmp_path)
    marked = [
        (number, match[1]) for number, line in enumerate(lines, 1) if (match := re.search(r"expect: (\w+)", line))
    ]
    anywhere = [(None, code) for line in lines for code in re.findall(r"expect anywhere: (\w+)", line)]
    return marked + anywhere, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_finding_at_its_line(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert [(each.place.line, each.rule.code) for each in found] == expected, [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_what_looks_alike_and_is_right_has_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]


CHILDREN = """
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def worker(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(0):
        loss = model.module(torch.randn(8, 4, generator=generator)).mean()
        loss.backward()


def idle(rank):
    pass


if __name__ == "__main__":
    mp.start_processes(idle, nprocs=1, start_method="fork")
"""


@pytest.mark.parametrize("starts", [True, False])
def test_a_script_whose_processes_are_not_watched_is_checked(starts, tmp_path, warm):
    text = CHILDREN if starts else CHILDREN.replace("mp.start_processes", "(lambda *args, **kwargs: None)")
    (tmp_path / "train.py").write_text(text)
    done = warm.run("-m", "ampwise", "run", "-o", "run", "train.py", cwd=tmp_path)
    assert ("AMP320" in done.stderr) is starts, done.stderr
