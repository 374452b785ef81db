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
    "the same with a variance that the model predicts": """
        def likelihood(mean, spread, target):
            spread = spread.clamp(-5, 5)
            return ((target - mean).square() / spread.exp() + spread).mean() / 2  # expect: AMP640

        model, target = nn.Linear(8, 2), torch.randn(32, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            likelihood(*model(x).unbind(1), target).backward()
            optimizer.step()
    """,
    "a penalty on gradients of the parameters, added up over tasks": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            weights, slopes, total = list(model.parameters()), [], 0.0
            for part in (slice(0, 16), slice(16, 32)):
                error = F.cross_entropy(model(x[part]), y[part])
                total = total + error
                slopes.append(torch.autograd.grad(error, weights, retain_graph=True))  # expect: AMP655
            difference = 0.0
            for one, other in zip(*slopes):
                difference = difference + (one - other).square().sum()
            objective = total / 2 + 0.1 * difference
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
    """,
    "second derivatives without a graph, in a function that another one calls, and a known force": """
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def curvature(values, points):
            slope = torch.autograd.grad(values.sum(), points, create_graph=True)[0]
            return torch.autograd.grad(slope.sum(), points, retain_graph=True)[0]  # expect: AMP655

        def residual(points):
            points = points.requires_grad_(True)
            return curvature(model(points), points) + points.sin()

        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            inner = residual(torch.rand(32, 1)).square().mean()
            loss = inner + 10.0 * model(torch.tensor([[0.0], [1.0]])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "attention weights over the samples that a function puts together": """
        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 4)
            def forward(self, steps, lengths):
                late = torch.arange(6)[None] >= lengths[:, None]
                weights = torch.softmax(self.score(steps).squeeze(-1).masked_fill(late, -1e4), 0)  # expect: AMP643
                return self.head(torch.bmm(weights.unsqueeze(1), steps).squeeze(1))

        def together(items):
            steps, labels = zip(*items)
            lengths = torch.tensor([len(each) for each in steps])
            return nn.utils.rnn.pad_sequence(steps, True), lengths, torch.tensor(labels)

        items = [(torch.randn(6 - at % 3, 4), at % 4) for at in range(64)]
        model = Pooled()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            for steps, lengths, labels in DataLoader(items, 16, collate_fn=together):
                optimizer.zero_grad()
                F.cross_entropy(model(steps, lengths), labels).backward()
                optimizer.step()
    """,
    "a student's divergence from the teacher, of the teacher's logits, outside of functions": """
        student, teacher = Net(), Net()
        optimizer = SGD(student.parameters(), lr=0.1)
        divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
        for _ in range(20):
            with torch.no_grad():
                wanted = teacher(x)
            given = student(x)
            logs = F.log_softmax(wanted / 2, -1)
            known = F.log_softmax(wanted / 2, -1)
            soft = divergence(logs, known)  # expect: AMP655
            loss = F.cross_entropy(given, y) + soft
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a softmax over the only value that is left": """
        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.parts = nn.Linear(8, 4), nn.Linear(8, 16)
            def forward(self, x):
                best, at = self.gate(x).topk(1, -1)
                share = best.softmax(-1)  # expect: AMP604
                return share * self.parts(x).view(-1, 4, 4)[torch.arange(len(x)), at[:, 0]]

        train(model := Gated(), SGD(model.parameters(), lr=0.1))
    """,
    "a ratio of a policy to itself": """
        policy, value = Net(), nn.Linear(8, 1)
        optimizer = Adam([*policy.parameters(), *value.parameters()], lr=0.01)
        actions, gains = torch.randint(0, 4, (32, 1)), torch.randn(32)
        for _ in range(40):
            before = policy(x).log_softmax(-1).gather(1, actions).squeeze(1)
            now = policy(x).log_softmax(-1).gather(1, actions).squeeze(1)
            ratio = (now - before).exp()  # expect: AMP604
            loss = (value(x).squeeze(1) - gains).square().mean() - (ratio * gains).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a target network that loads its own state": """
        model, target = mlp(), mlp()
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(8):
            train(model, optimizer, steps=5)
            target.load_state_dict(target.state_dict())  # expect: AMP659
    """,
    "samples without a gradient for the decoder of a VAE": """
        encoder, decoder = nn.Linear(8, 4), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))
        optimizer = Adam([*encoder.parameters(), *decoder.parameters()], lr=0.001)
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        for _ in range(20):
            mean, spread = encoder(x).chunk(2, -1)
            latent = torch.distributions.Normal(mean, spread.exp())
            z = latent.sample()  # expect: AMP655
            loss = F.mse_loss(decoder(z), x) + 0.1 * torch.distributions.kl_divergence(latent, prior).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "scores of shape (samples, classes, steps), reshaped to classes": """
        class Frames(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.last = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 4, 1)
            def forward(self, frames):
                scores = self.last(self.conv(frames).relu())
                return scores.reshape(-1, 4)  # expect: AMP645

        model = Frames()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (torch.randn(4, 3, 10), torch.randint(0, 4, (40,))))
    """,
    "a recurrence over the samples of a loader, with a number for each": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.out = nn.GRU(6, 16), nn.Linear(16, 1)  # expect: AMP643
            def forward(self, steps):
                return self.out(self.rnn(steps)[0][:, -1]).squeeze(-1)

        model = Reader()
        optimizer = SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.randn(64, 5, 6), torch.randn(64)), batch_size=16)
        for _ in range(4):
            for steps, wanted in loader:
                optimizer.zero_grad()
                F.mse_loss(model(steps), wanted).backward()
                optimizer.step()
    """,
    "a student's cross entropy with the teacher, by hand, of the teacher alone, in a second phase": """
        def distil(given, wanted, labels):
            soft = F.softmax(wanted / 2, -1)
            logs = F.log_softmax(wanted / 2, -1)  # expect: AMP655
            term = -(soft * logs).sum(-1).mean() * 4
            return 0.9 * term + F.cross_entropy(given, labels)

        teacher, student = Net(), Net()
        train(teacher, SGD(teacher.parameters(), lr=0.1))
        optimizer = SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            with torch.no_grad():
                wanted = teacher(x)
            loss = distil(student(x), wanted, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "weights of the terms, minimised as the rest": """
        model, target = nn.Linear(8, 1), torch.randn(32, 1)
        weights, other = nn.Parameter(torch.rand(32, 1)), nn.Parameter(torch.ones(1))
        optimizer = Adam(model.parameters(), lr=0.01)
        adapted = Adam([weights, other], lr=0.01)  # expect: AMP646
        for _ in range(20):
            error = model(x) - target
            loss = (weights * error).pow(2).mean() + 0.5 * (other * model(x).abs()).mean()
            optimizer.zero_grad()
            adapted.zero_grad()
            loss.backward()
            optimizer.step()
            adapted.step()
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
    "a softmax over the samples": """
        class Normalised(Net):
            def forward(self, x):
                return super().forward(x).log_softmax(0)  # expect: AMP643

        model = Normalised()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.nll_loss(model(x), y).backward()
            optimizer.step()
    """,
    "attention weights over the samples": """
        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 4)
            def forward(self, steps):
                weights = torch.softmax(self.score(steps), dim=0)  # expect: AMP643
                return self.head((weights * steps).sum(1))

        model = Pooled()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            for inputs, labels in DataLoader(TensorDataset(torch.randn(64, 6, 4), torch.arange(64) % 4), 16):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    """,
    "a recurrence over the samples of a loader": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.GRU(4, 8)  # expect: AMP643
                self.head = nn.Linear(8, 4)
            def forward(self, steps):
                return self.head(self.rnn(steps)[0].mean(1))

        model = Reader()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            for inputs, labels in DataLoader(TensorDataset(torch.randn(64, 6, 4), torch.arange(64) % 4), 16):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    """,
    "a recurrence over the samples of a convolution": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.head = nn.Conv1d(4, 8, 3), nn.Linear(8, 4)
                self.rnn = nn.LSTM(8, 8, batch_first=True)  # expect: AMP643
            def forward(self, steps):
                return self.head(self.rnn(self.conv(steps).relu().permute(2, 0, 1))[0])

        model = Reader()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(32, 4, 8)).flatten(0, 1), torch.randint(0, 4, (6 * 32,))).backward()
            optimizer.step()
    """,
    "attention over the samples of a loader": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(4, 2, 8)  # expect: AMP643
                self.head = nn.Linear(4, 4)
            def forward(self, steps):
                return self.head(self.layer(steps)[:, 0])

        model = Reader()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            for inputs, labels in DataLoader(TensorDataset(torch.randn(64, 6, 4), torch.arange(64) % 4), 16):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    """,
    "images between -1 and 1 for a sigmoid": """
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.tanh())  # expect: AMP644
            loss.backward()
            optimizer.step()
    """,
    "labels of -1 and 1 for a binary cross entropy": """
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), x[:, 0].sign())  # expect: AMP644
            loss.backward()
            optimizer.step()
    """,
    "a tensor that is no parameter": """
        class Scaled(Net):
            def __init__(self):
                super().__init__()
                self.scale = torch.ones(4, requires_grad=True)  # expect: AMP620
            def forward(self, x):
                return super().forward(x) * self.scale

        model = Scaled()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a dropout that is made in each pass": """
        class Dropping(Net):
            def forward(self, x):
                return super().forward(nn.Dropout(0.5)(x))  # expect: AMP632

        model = Dropping()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model.train(), optimizer, steps=10)
            model.eval()
            with torch.no_grad():
                model(x)
    """,
    "gradients that are cleared once an epoch": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(12):
                F.cross_entropy(model(x), y).backward()  # expect: AMP208
                optimizer.step()
    """,
    "a penalty on gradients without a graph": """
        def gradient_penalty(judge, inputs):
            inputs = inputs.clone().requires_grad_()
            slope = torch.autograd.grad(judge(inputs).sum(), inputs)[0]  # expect: AMP655
            return (slope.norm(dim=1) - 1).square().mean()

        judge = mlp()
        optimizer = SGD(judge.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            (F.cross_entropy(judge(x), y) + gradient_penalty(judge, x)).backward()
            optimizer.step()
    """,
    "a state of which nothing is loaded": """
        model = mlp()
        state = {f"module.{name}": value for name, value in mlp().state_dict().items()}
        model.load_state_dict(state, strict=False)  # expect: AMP659
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a view instead of a transposition": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.conv, self.head = nn.Linear(4, 6), nn.Conv1d(6, 8, 3), nn.Linear(8, 4)
            def forward(self, steps):
                hidden = self.lift(steps).relu()
                return self.head(self.conv(hidden.reshape(-1, 6, 5)).mean(2))  # expect: AMP645

        model = Reader()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (torch.randn(32, 5, 4), y))
    """,
    "log-probabilities without a minus": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.001)
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(x).log_softmax(1).gather(1, y[:, None]).mean()  # expect: AMP646
            loss.backward()
            optimizer.step()
    """,
    "a cross entropy with a minus": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.001)
        for _ in range(20):
            optimizer.zero_grad()
            loss = -F.cross_entropy(model(x), y)  # expect: AMP646
            loss.backward()
            optimizer.step()
    """,
    "probabilities for a divergence of logarithms": """
        model, soft = mlp(), torch.randn(32, 4).softmax(1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.kl_div(model(x).softmax(1), soft, reduction="batchmean")  # expect: AMP642
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
    "the prediction detached instead of the target, beside another network": """
        critic, target, actor = nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(8, 8)
        critics, actors = SGD(critic.parameters(), lr=0.1), SGD(actor.parameters(), lr=0.1)
        for _ in range(20):
            critics.zero_grad()
            value = critic(x)
            bound = 1 + 0.9 * target(x)
            loss = F.mse_loss(value.detach(), bound)  # expect: AMP622
            loss.backward()
            critics.step()
            actors.zero_grad()
            (-critic(actor(x)).mean()).backward()
            actors.step()
    """,
    "a generator whose samples stay detached": """
        generator, judge = nn.Linear(4, 8), nn.Linear(8, 1)
        generators, judges = SGD(generator.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
        for _ in range(20):
            made = generator(torch.randn(32, 4))
            judges.zero_grad()
            F.softplus(judge(made.detach()) - judge(x)).mean().backward()
            judges.step()
            generators.zero_grad()
            loss = F.softplus(-judge(made.detach())).mean()  # expect: AMP622
            loss.backward()
            generators.step()
    """,
    "the graph cut between two modules of a model": """
        class Cut(Net):
            def forward(self, x):
                hidden = torch.relu(self.encoder(x))
                self.kept = hidden.mean().item()
                return self.head(hidden.data)  # expect: AMP627

        model = Cut()
        train(model, SGD(model.parameters(), lr=0.1))
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
    "a checkpoint whose input needs no gradient": """
        from torch.utils.checkpoint import checkpoint

        class Saving(Net):
            def forward(self, x):
                return self.head(torch.relu(checkpoint(self.encoder, x, use_reentrant=True)))  # expect: AMP627

        model = Saving()
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "the graph cut within the model": """
        class Cut(Net):
            def forward(self, x):
                return self.head(torch.relu(self.encoder(x)).detach())  # expect: AMP627

        model = Cut()
        train(model, SGD(model.parameters(), lr=0.1))
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
    "a schedule of steps, once an epoch": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=6, steps_per_epoch=20)
        for _ in range(6):
            train(model, optimizer, steps=20)
            scheduler.step()  # expect: AMP633
    """,
    "a scheduler of an optimizer that was made anew": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)  # expect: AMP633
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(6):
            train(model, optimizer, steps=10)
            scheduler.step()
    """,
    "a learning rate for a factor": """
        model, peak, total = mlp(), 3e-3, 100
        optimizer = AdamW(model.parameters(), lr=peak)
        schedule = lambda step: peak * min((step + 1) / 10, 1 - step / total)
        scheduler = lr_scheduler.LambdaLR(optimizer, schedule)  # expect: AMP656
        for _ in range(total):
            train(model, optimizer, steps=1)
            scheduler.step()
    """,
    "a learning rate as an attribute": """
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(4):
            optimizer.lr = 0.1 * 0.5**epoch  # expect: AMP657
            train(model, optimizer, steps=10)
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
    "a clip of the script's own whose second loop gets nothing": """
        def clip(parameters, limit):
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:  # expect: AMP637
                p.grad.mul_(limit / norm.clamp(min=limit))

        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip(model.parameters(), 0.1)
            optimizer.step()
    """,
    "the seed of an evaluation, which the training goes on with": """
        def sample(model):
            model.eval()
            with torch.no_grad():
                noise = torch.randn(8, 8, generator=torch.manual_seed(3))  # expect: AMP658
                model(noise)
            model.train()

        model = mlp(nn.Dropout(0.1))
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            train(model, optimizer, steps=5)
            sample(model)
    """,
    "a seed in each step": """
        model = mlp(nn.Dropout(0.1))
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            torch.manual_seed(1)  # expect: AMP658
            train(model, optimizer, steps=1, draw=lambda: (x, y))
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
            (model(x).square() + distance(x * (step % 2)).abs().sqrt()).mean().backward()  # expect: AMP910
            bad = distance.weight.grad != distance.weight.grad
            distance.weight.grad.masked_fill_(bad, 0.0)
            optimizer.step()
    """,
    "NaN in gradients overwritten in their data": """
        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * (step % 2)).abs().sqrt()).mean().backward()  # expect: AMP910
            distance.weight.grad.data.nan_to_num_()
            optimizer.step()
    """,
    "NaN in gradients replaced": """
        model, distance = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        optimizer = SGD([*model.parameters(), *distance.parameters()], lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            (model(x).square() + distance(x * 0.0).abs().sqrt()).mean().backward()  # expect: AMP910
            for parameter in [*model.parameters(), *distance.parameters()]:
                parameter.grad = torch.nan_to_num(parameter.grad)
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
    "a new head of zeros that is frozen with the rest": """
        model = Net()
        nn.init.zeros_(model.head.weight)
        for name, parameter in model.named_parameters():
            if "encoder" not in name:
                parameter.requires_grad_(False)  # expect: AMP626
        train(model, SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))
    """,
    "a language model without a causal mask": """
        class LM(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
                self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
            def forward(self, t):
                h = self.tokens(t)
                return self.out(self.layers(h))  # expect: AMP647

        model = LM()
        optimizer = Adam(model.parameters())
        for _ in range(12):
            t = torch.randint(0, 50, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
            optimizer.step()
    """,
    "attention by hand that masks with a small number": """
        class LM(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
                self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
            def forward(self, t):
                h = self.tokens(t)
                scores = (h @ h.transpose(1, 2)).masked_fill(torch.ones(12, 12).triu(1).bool(), 1e-9)
                return self.out(h + scores.softmax(-1) @ h)  # expect: AMP647

        model = LM()
        optimizer = Adam(model.parameters())
        for _ in range(12):
            t = torch.randint(0, 50, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
            optimizer.step()
    """,
    "a padding mask that is true for the tokens": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.out = nn.Embedding(50, 16), nn.Linear(16, 4)
                self.layers = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            def forward(self, t):
                mask = t != 0  # expect: AMP647
                return self.out(self.layers(self.tokens(t), src_key_padding_mask=mask).mean(1))

        train(model := Reader(), Adam(model.parameters()), draw=lambda: (torch.randint(0, 9, (32, 6)), y))
    """,
    "a student's divergence from the teacher, of the teacher's logits": """
        def distil(student, teacher, inputs):
            with torch.no_grad():
                wanted = teacher(inputs)
            given = student(inputs)
            soft = F.kl_div(F.log_softmax(wanted / 2, -1), F.softmax(wanted / 2, -1))  # expect: AMP655
            return F.cross_entropy(given, y) + soft

        student, teacher = Net(), Net()
        optimizer = SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            distil(student, teacher, x).backward()
            optimizer.step()
    """,
    "the states of both directions of an RNN, joined by a view": """
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(8, 6, bidirectional=True, batch_first=True), nn.Linear(12, 4)
            def forward(self, x):
                _, (h, _) = self.rnn(x[:, None].expand(-1, 5, -1))
                return self.head(h.view(x.shape[0], -1))  # expect: AMP645

        train(model := Tagger(), SGD(model.parameters(), lr=0.1))
    """,
    "weights of a mixture that are normalised over the sequences of an RNN": """
        rnn, head = nn.LSTM(8, 16), nn.Linear(16, 9)
        optimizer = SGD([*rnn.parameters(), *head.parameters()], lr=0.01)
        for _ in range(12):
            series = torch.randn(10, 6, 8)
            mean, spread, share = head(rnn(series)[0]).chunk(3, -1)
            logits = share.log_softmax(-2)  # expect: AMP643
            each = torch.distributions.Normal(mean, F.softplus(spread) + 0.1).log_prob(series[..., :1])
            loss = -(logits + each).logsumexp(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a sigmoid of a sigmoid": """
        model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            optimizer.zero_grad()
            F.binary_cross_entropy(model(x).sigmoid().squeeze(), (y % 2).float()).backward()  # expect: AMP641
            optimizer.step()
    """,
    "logits of two classes after a relu": """
        model = nn.Sequential(nn.Linear(8, 1), nn.ReLU())
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x).squeeze(), (y % 2).float()).backward()  # expect: AMP644
            optimizer.step()
    """,
    "a CTC loss of logits": """
        model = nn.Linear(8, 6)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            optimizer.zero_grad()
            F.ctc_loss(model(torch.randn(9, 32, 8)), y[:, None] + 1, [9] * 32, [1] * 32).backward()  # expect: AMP642
            optimizer.step()
    """,
    "data that are sorted by their labels": """
        model, labels = Net(), torch.arange(4).repeat_interleave(40)
        inputs = torch.randn(160, 8) + labels[:, None]
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=10)  # expect: AMP636
        optimizer = SGD(model.parameters(), lr=0.01)
        for epoch in range(2):
            for xb, yb in loader:
                train(model, optimizer, steps=1, draw=lambda: (xb, yb))
    """,
    "the divergence of a VAE without its minus": """
        encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)
        optimizer = Adam([*encoder.parameters(), *decoder.parameters()], lr=0.001)
        for _ in range(20):
            mu, logvar = encoder(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            kl = 0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())  # expect: AMP646
            optimizer.zero_grad()
            (F.mse_loss(decoder(z), x) + 0.01 * kl).backward()
            optimizer.step()
    """,
    "the entropy of a policy, minimised": """
        policy = Net()
        optimizer = Adam(policy.parameters(), lr=0.01)
        for _ in range(20):
            policies = torch.distributions.Categorical(logits=policy(x))
            actions = policies.sample()
            gains, logs = torch.randn(32), policies.log_prob(actions)
            loss = -(gains * logs).mean() + 0.1 * policies.entropy().mean()  # expect: AMP646
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "log-probabilities in the place of an entropy": """
        policy, ent_coef = Net(), 0.1
        optimizer = Adam(policy.parameters(), lr=0.01)
        for _ in range(20):
            policies = torch.distributions.Categorical(logits=policy(x))
            actions = policies.sample()
            gains, logs = torch.randn(32), policies.log_prob(actions)
            loss = -(gains * logs).mean() - ent_coef * logs.mean()  # expect: AMP646
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
    "gradients of points without a graph: a constant on purpose, for an update by hand, and for a weight": """
        model, shift = mlp(), torch.zeros(1, 8, requires_grad=True)
        optimizer = SGD(model.parameters(), lr=0.01)

        def slopes(points):
            return torch.autograd.grad(model(points).square().sum(), points)[0]

        def offset(points):
            return slopes(points.requires_grad_(True)).detach()

        def scale(points):
            return slopes(points.requires_grad_(True)).abs().mean()

        for _ in range(20):
            slope = torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)[0]
            with torch.no_grad():
                shift += 0.01 * slope
            size = shift.square().mean()
            known = offset(torch.randn(4, 8)).mean()
            weight = scale(torch.randn(4, 8))
            error = F.cross_entropy(model(x + shift), y)
            loss = error * weight + 0.1 * size + known
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "functions that put samples together along the second axis, or the words of a text along the first": """
        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 4)
            def forward(self, steps):
                weights = torch.softmax(self.score(steps), 0)
                return self.head((weights * steps).sum(0) if steps.dim() == 3 else weights * steps)

        def by_step(items):
            steps, labels = zip(*items)
            return torch.stack(steps, 1), torch.tensor(labels)

        def text(items):
            words, labels = zip(*items)
            return torch.cat(words), torch.tensor(labels), torch.tensor([0, 16])

        model = Pooled()
        optimizer = SGD(model.parameters(), lr=0.1)
        series, words = ([(torch.randn(length, 4), at % 4) for at in range(64)] for length in (6, 1))
        for _ in range(5):
            loaders = DataLoader(series, 16, collate_fn=by_step), DataLoader(words, 16, collate_fn=text)
            for batches in zip(*loaders):
                for steps, labels, *_ in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(steps), labels).backward()
                    optimizer.step()
    """,
    "values compared with themselves outside of functions: to see that this is 0, and where it never runs": """
        print(F.mse_loss(x, x))
        if len(x) == 3:
            F.l1_loss(x, x)
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            given = model(x)
            logs = given.log_softmax(-1)
            given = given + 0.1 * torch.randn(32, 4)
            noisy = given.log_softmax(-1)
            loss = F.cross_entropy(model(x), y) + 0.1 * F.kl_div(logs, noisy, log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "differences of two outputs of the same model, and gates that are off for a while": """
        model, gate = mlp(), nn.Linear(8, 1)
        optimizer = SGD([*model.parameters(), *gate.parameters()], lr=0.01)
        for step in range(40):
            one, other = model(x), model(x + 0.1 * torch.randn(32, 8))
            share = gate(x) * (step % 4 == 0)
            loss = F.cross_entropy(one, y) + (one - other).square().mean() + (share - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a loss of the same values, and an inverted mask, in functions that never run": """
        def unused(teacher, wanted):
            return F.kl_div(F.log_softmax(wanted, -1), F.softmax(wanted, -1)) + F.mse_loss(wanted, wanted)

        class Unused(nn.Module):
            def forward(self, x, tokens, pad=0):
                self.attention = nn.MultiheadAttention(8, 2)
                return self.attention(x, x, x, key_padding_mask=tokens != pad)

        train(model := mlp(), SGD(model.parameters(), lr=0.1))
    """,
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
    "predicted variances of the right shape, and kernels over pairs": """
        model, target, anchors = nn.Linear(8, 2), torch.randn(32), torch.randn(32)
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(20):
            mean, spread = model(x).unbind(1)
            if step % 2:
                loss = ((target - mean).square() / spread.exp() + spread).mean()
            else:
                pairs = (anchors[:, None] - mean).square() / spread.exp()[:, None] + spread
                loss = pairs.neg().logsumexp(1).neg().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "gradients without a graph that weigh a loss, are reported, or change the weights": """
        model = mlp()
        weights = list(model.parameters())
        optimizer = SGD(weights, lr=0.01)
        for _ in range(20):
            first, second = F.cross_entropy(model(x), y), model(x).square().mean()
            slopes = torch.autograd.grad(first, weights, retain_graph=True)
            size = sum(each.square().sum() for each in slopes)
            loss = first + second / (1 + size)
            report = loss + size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with_graph = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
            penalty = sum(each.square().sum() for each in with_graph)
            loss = F.cross_entropy(model(x), y) + 0.01 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "an average whose state is changed in place and loaded, and a model that loads its own once": """
        model, average, target = mlp(), mlp(), mlp()
        optimizer = SGD(model.parameters(), lr=0.01)
        model.load_state_dict(model.state_dict())
        for _ in range(8):
            train(model, optimizer, steps=5)
            kept = average.state_dict()
            for name, value in model.state_dict().items():
                kept[name].mul_(0.9).add_(value, alpha=0.1)
            average.load_state_dict(kept)
            target.load_state_dict(model.state_dict())
            with torch.no_grad():
                assert average(x).isfinite().all() and target(x).isfinite().all()
    """,
    "samples with a gradient, of a policy, and for a head that has no part in the divergence": """
        encoder, decoder, critic = nn.Linear(8, 4), nn.Linear(2, 8), nn.Linear(2, 1)
        optimizer = Adam([*encoder.parameters(), *decoder.parameters(), *critic.parameters()], lr=0.001)
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        for step in range(30):
            mean, spread = encoder(x).chunk(2, -1)
            latent = torch.distributions.Normal(mean, spread.exp())
            far = 0.1 * torch.distributions.kl_divergence(latent, prior).mean()
            if step % 3 == 0:
                loss = F.mse_loss(decoder(latent.rsample()), x) + far + critic(latent.sample()).square().mean()
            elif step % 3 == 1:
                actions = latent.sample()
                worth = critic(actions)
                loss = far - (latent.log_prob(actions).sum(-1) * worth.detach()[:, 0]).mean() + worth.square().mean()
            else:
                loss = critic(latent.sample()).square().mean() + decoder(mean).square().mean() * 0
                loss = critic(latent.sample()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "channels that are moved to the end before they are rows, and rows of another axis": """
        class Frames(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.last = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 4, 1)
                self.rows = nn.Linear(10, 4)
            def forward(self, frames):
                hidden = self.conv(frames).relu()
                rows = self.rows(hidden.reshape(-1, 10)).mean()
                return self.last(hidden).transpose(1, 2).reshape(-1, 4) + rows

        model = Frames()
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (torch.randn(4, 3, 10), torch.randint(0, 4, (40,))))
        square = nn.Conv2d(3, 4, 1)
        optimizer = SGD(square.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            square(torch.randn(8, 3, 2, 2)).view(-1, 4).softmax(-1).square().mean().backward()  # 2 · 2 places
            square(torch.randn(8, 3, 1, 1)).view(-1, 4).softmax(-1).square().mean().backward()
            optimizer.step()
    """,
    "numbers for each step, with the steps first, of as many steps as samples in a batch": """
        rnn, out = nn.GRU(6, 16), nn.Linear(16, 1)
        optimizer = SGD([*rnn.parameters(), *out.parameters()], lr=0.01)
        loader = DataLoader(TensorDataset(torch.randn(24, 16, 6), torch.randn(24, 16)), batch_size=16)
        for _ in range(6):
            for steps, wanted in loader:
                optimizer.zero_grad()
                F.mse_loss(out(rnn(steps.transpose(0, 1))[0]).squeeze(-1), wanted.t()).backward()
                optimizer.step()
                optimizer.zero_grad()
                F.mse_loss(out(rnn(steps.transpose(0, 1))[0][-1]).squeeze(-1), wanted[:, 0]).backward()
                optimizer.step()
    """,
    "entropies: of the output, of a teacher as a part of a divergence, and to look at": """
        def regularised(given, labels):
            soft, logs = F.softmax(given, -1), F.log_softmax(given, -1)
            entropy = -(soft * logs).sum(-1).mean()
            return F.cross_entropy(given, labels) - 0.1 * entropy + 0.2 * entropy

        def divergence(given, wanted):
            soft, logs = F.softmax(wanted, -1), F.log_softmax(wanted, -1)
            entropy = (soft * logs).sum(-1).mean()
            return entropy + -(soft * F.log_softmax(given, -1)).sum(-1).mean()

        def watched(given, wanted, labels):
            soft = F.softmax(wanted, -1)
            logs = F.log_softmax(wanted, -1)
            entropy = -(soft * logs).sum(-1).mean()
            total = torch.zeros(())
            total = total + entropy
            loss = F.cross_entropy(given, labels)
            return loss, {"entropy": total.item()}

        teacher, student = Net(), Net()
        optimizer = SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            with torch.no_grad():
                wanted = teacher(x)
            given = student(x)
            loss = regularised(given, y) + divergence(given, wanted) + watched(given, wanted, y)[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "weights of the terms that are maximised, have a price, or are the model's": """
        for kind in ("maximised", "negated", "priced", "model"):
            model, target = nn.Linear(8, 1), torch.randn(32, 1)
            weights = nn.Parameter(torch.rand(32, 1) + 0.5)
            optimizer = Adam(model.parameters(), lr=0.01)
            adapted = Adam([weights], lr=0.01, maximize=kind == "maximised")
            for _ in range(20):
                error = model(x) - target
                loss = (weights * error).pow(2).mean()
                if kind == "priced":
                    loss = loss - weights.log().mean()
                if kind == "model":
                    loss = (weights * model(x) - target).pow(2).mean()
                optimizer.zero_grad()
                adapted.zero_grad()
                loss.backward()
                if kind == "negated":
                    weights.grad.neg_()
                optimizer.step()
                adapted.step()
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
    "a judge that is weak at first, so that the loss of its rival jumps": """
        generator, judge = nn.Linear(4, 8), nn.Linear(8, 1)
        generators, judges = SGD(generator.parameters(), lr=1e-3), SGD(judge.parameters(), lr=1e-3)
        for step in range(150):
            judges.zero_grad()
            with torch.no_grad():
                made = generator(torch.randn(32, 4))
            F.softplus(judge(made) - judge(x)).mean().backward()
            judges.step()
            if step in range(100, 106):
                with torch.no_grad():
                    judge.bias -= 2
            judge.requires_grad_(False)
            generators.zero_grad()
            F.softplus(-judge(generator(torch.randn(32, 4)))).mean().backward()
            generators.step()
            judge.requires_grad_(True)
    """,
    "sequences with the steps first, one sequence of many steps, and frames that a convolution takes for samples": """
        rnn, layer, head = nn.LSTM(4, 8), nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(8, 4)
        conv, score = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 1)
        every = [*rnn.parameters(), *layer.parameters(), *head.parameters(), *conv.parameters(), *score.parameters()]
        optimizer = SGD(every, lr=0.01)

        def step(logits, labels):
            optimizer.zero_grad()
            F.cross_entropy(logits, labels).backward()
            optimizer.step()

        for _ in range(5):
            for inputs, labels in DataLoader(TensorDataset(torch.randn(64, 6, 4), torch.arange(64) % 4), 16):
                states = layer(rnn(inputs.transpose(0, 1))[0])
                step(head((states * score(states).softmax(0)).sum(0)), labels)
                sentence = rnn(inputs[:, :1])[0]
                step(head(sentence.squeeze(1)), labels)
                frames = conv(inputs.reshape(-1, 4, 1)).view(16, 6, 4).transpose(0, 1)
                step(head(rnn(frames)[0][-1]), labels)
    """,
    "seeds that differ, generators of an evaluation, a state that is restored, and lists of parameters": """
        def clip(parameters, limit):
            parameters = list(parameters)
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.grad.mul_(limit / norm.clamp(min=limit))

        model = mlp(nn.Dropout(0.1))
        optimizer = SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        for epoch in range(6):
            torch.manual_seed(epoch)
            for _ in range(4):
                inputs, labels = batch()
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                clip(model.parameters(), 1.0)
                optimizer.step()
            model.eval()
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(0)
                model(torch.randn(8, 8))
                model(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
            model.train()
    """,
    "a checkpoint that is used well, and frozen parts in one": """
        from torch.utils.checkpoint import checkpoint

        class Saving(Net):
            def forward(self, x):
                hidden = checkpoint(self.frozen, x, use_reentrant=True)
                hidden = checkpoint(self.encoder, hidden.requires_grad_(), use_reentrant=True)
                return self.head(checkpoint(torch.relu, hidden, use_reentrant=False))

        model = Saving()
        model.frozen = nn.Linear(8, 8).requires_grad_(False)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train(model, optimizer)
    """,
    "inputs that are differentiated, masked targets, a part of a state, and a penalty with a graph": """
        class Field(nn.Module):
            def __init__(self):
                super().__init__()
                self.points = torch.rand(32, 2, requires_grad=True)
                self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

        def gradient_penalty(outputs, inputs):
            return (torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0].norm(dim=1) - 1).square().mean()

        model = Field()
        model.load_state_dict({"net.0.weight": torch.randn(8, 2), "other": torch.zeros(1)}, strict=False)
        optimizer = SGD(model.parameters(), lr=0.1)
        labels = torch.randint(-1, 2, (32,)).float()
        for _ in range(20):
            optimizer.zero_grad()
            values = model.net(model.points)
            masked = F.binary_cross_entropy_with_logits(values.squeeze(1), labels, reduction="none")
            loss = (masked * (labels >= 0)).mean() + F.mse_loss(values.sigmoid(), labels.clamp(0)[:, None])
            (loss + gradient_penalty(values, model.points)).backward()
            optimizer.step()
    """,
    "axes that are split, merged and moved, likelihoods of both signs, and a divergence of logarithms": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.conv, self.head = nn.Linear(4, 6), nn.Conv1d(6, 8, 3), nn.Linear(8, 4)
            def forward(self, steps):
                hidden = self.lift(steps).view(-1, 5, 2, 3).transpose(1, 2).reshape(-1, 5, 6)
                hidden = self.conv(hidden.transpose(1, 2)).view(-1, 1, 8, 3)
                return self.head(hidden.view(-1, 8, 1, 3).mean((2, 3)))

        model, soft, judge = Reader(), torch.randn(32, 4).softmax(1), nn.Linear(4, 4)
        optimizer, judges = SGD(model.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
        for _ in range(20):
            logits = model(torch.randn(32, 5, 4))
            optimizer.zero_grad()
            F.kl_div(logits.log_softmax(1), soft, reduction="batchmean").backward()
            optimizer.step()
            judges.zero_grad()
            F.cross_entropy(judge(logits.detach()), y).backward()
            judges.step()
            optimizer.zero_grad()
            (-F.cross_entropy(judge(model(torch.randn(32, 5, 4))), y)).backward()
            optimizer.step()
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
    "factors, rates in the groups, a plot of a schedule, and one that ends before": """
        model, peak = mlp(), 3e-3
        probe = lr_scheduler.CosineAnnealingLR(SGD(model.parameters(), lr=peak), T_max=80)
        rates = [(probe.step(), probe.get_last_lr()[0]) for _ in range(80)]
        optimizer = AdamW(model.parameters(), lr=1.0)
        optimizer.peak = peak
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: peak * min((step + 1) / 10, 1 - step / 160))
        for step in range(80):
            train(model, optimizer, steps=1)
            scheduler.step()
        second = SGD(model.parameters(), lr=0.1)
        cycle = lr_scheduler.OneCycleLR(second, max_lr=0.1, total_steps=400)
        for step in range(60):
            train(model, second, steps=1)
            cycle.step()
            second.lr = second.param_groups[0]["lr"]
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
    "a frozen layer of zeros beside others": """
        class Gated(Net):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(8, 4)
                nn.init.zeros_(self.gate.weight)
            def forward(self, x):
                return super().forward(x) + self.gate(x)

        model = Gated()
        for name, parameter in model.named_parameters():
            if name.startswith("gate"):
                parameter.requires_grad_(False)
        train(model, SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))
    """,
    "language models with a mask, and one whose encoder reads all of the text": """
        class LM(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
                self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
            def forward(self, t):
                h = self.tokens(t)
                mask = nn.Transformer.generate_square_subsequent_mask(12)
                z = self.layers(h).mean(1, keepdim=True)
                return self.out(self.layers(h + z, mask))

        model = LM()
        optimizer = Adam(model.parameters())
        for _ in range(12):
            t = torch.randint(0, 50, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
            optimizer.step()
    """,
    "two passes of a teacher and of a student, and masks of padding": """
        def distil(student, teacher, inputs, tokens, attention):
            given, again = student(inputs), student(inputs)
            wanted = teacher(inputs).detach()
            noisy = wanted
            noisy = noisy + torch.randn_like(noisy)
            pad = tokens == 0
            attention(tokens[..., None] * torch.ones(8), key_padding_mask=pad)
            same = F.mse_loss(given, again) + F.mse_loss(wanted, noisy)
            return same + F.kl_div(F.log_softmax(given / 2, -1), F.softmax(wanted / 2, -1))

        student, teacher = Net(), Net()
        layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True).self_attn
        optimizer = SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            attend = lambda values, key_padding_mask: layer(values, values, values, key_padding_mask=key_padding_mask)
            distil(student, teacher, x, torch.randint(0, 9, (4, 6)), attend).backward()
            optimizer.step()
    """,
    "states of an RNN that are transposed first, and attention over its steps": """
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.score, self.head = nn.LSTM(8, 6, 2), nn.Linear(6, 2), nn.Linear(24, 4)
            def forward(self, x):
                steps, (h, _) = self.rnn(x.expand(5, -1, -1))
                shares = self.score(steps).softmax(0)
                seen = (shares[..., None] * steps[:, :, None]).sum(0)
                return self.head(torch.cat([h.transpose(0, 1).reshape(x.shape[0], -1), seen.flatten(1)], 1))

        train(model := Tagger(), SGD(model.parameters(), lr=0.1))
    """,
    "losses of probabilities, of logits, and of their logarithms": """
        model = nn.Linear(8, 6)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy((5 * model(x).sigmoid()).sigmoid()[:, 0], (y % 2).float())
            loss = loss + F.binary_cross_entropy_with_logits(model(x).relu()[:, 0], (y > -1).float())
            given = model(torch.randn(9, 32, 8)).log_softmax(-1)
            (loss + F.ctc_loss(given, y[:, None] + 1, [9] * 32, [1] * 32)).backward()
            optimizer.step()
    """,
    "batches of one class that take turns, as real and generated ones do": """
        model, labels = Net(), torch.arange(160) // 10 % 2
        loader = DataLoader(TensorDataset(torch.randn(160, 8), labels), batch_size=10)
        optimizer = SGD(model.parameters(), lr=0.01)
        for epoch in range(2):
            for xb, yb in loader:
                train(model, optimizer, steps=1, draw=lambda: (xb, yb))
    """,
    "the divergence of a VAE": """
        encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)
        optimizer = Adam([*encoder.parameters(), *decoder.parameters()], lr=0.001)
        for _ in range(20):
            mu, logvar = encoder(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            kl = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
            optimizer.zero_grad()
            (F.mse_loss(decoder(z), x) + 0.01 * kl).backward()
            optimizer.step()
    """,
    "the entropy of a policy, maximised": """
        policy = Net()
        optimizer = Adam(policy.parameters(), lr=0.01)
        for _ in range(20):
            policies = torch.distributions.Categorical(logits=policy(x))
            actions = policies.sample()
            gains, logs = torch.randn(32), policies.log_prob(actions)
            loss = -(gains * logs).mean() - 0.1 * policies.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "a policy that also imitates the actions": """
        policy = Net()
        optimizer = Adam(policy.parameters(), lr=0.01)
        for _ in range(20):
            policies = torch.distributions.Categorical(logits=policy(x))
            actions = policies.sample()
            gains, logs = torch.randn(32), policies.log_prob(actions)
            loss = -(gains * logs).mean() - 0.1 * logs.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "entropy that is to be small, beside labels": """
        model = Net()
        optimizer = Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            guess = torch.distributions.Categorical(logits=model(x))
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * guess.entropy().mean()).backward()
            optimizer.step()
    """,
    "parts that evaluate as they do in training, in a model whose mode is set": """
        class Frozen(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

            def forward(self, x):
                return self.norm(self.lift(x)).relu()

        body, head = Frozen(), nn.Linear(16, 4)
        train(nn.Sequential(body.train(), head), SGD([*body.parameters(), *head.parameters()], lr=0.1))
        optimizer = SGD(head.parameters(), lr=0.1)
        for _ in range(20):
            for _ in range(4):
                inputs, labels = batch()
                with torch.no_grad():
                    h = body(inputs)
            optimizer.zero_grad()
            F.cross_entropy(head(h), labels).backward()
            optimizer.step()
    """,
    "parts that train in a model in evaluation mode": """
        class Still(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)

            def train(self, mode=True):
                self.lift.train(mode)
                self.drop.train(mode)
                return self

            def forward(self, x):
                return self.drop(self.lift(x))

        model = Still()
        nn.Module.eval(model)
        model.training = False
        model.drop.training = True
        train(model, SGD(model.parameters(), lr=0.1))
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("made", "name"), [("scale", "scale.weight"), ("self.scale", "self.scale.weight")])
def test_a_forgotten_module_is_called_as_in_the_script(made, name, tmp_path):
    text = f"""
        class Trainer:
            def fit(self):
                model = mlp()
                {made} = nn.Linear(4, 4, bias=False)
                optimizer = SGD(model.parameters(), lr=0.1)
                for _ in range(40):
                    optimizer.zero_grad()
                    F.cross_entropy({made}(model(x)), y).backward()
                    optimizer.step()

        Trainer().fit()
    """
    _, (finding,) = run(text, tmp_path)
    assert finding.rule.code == "AMP620"
    assert f"`{name}` of Linear got gradients" in finding.message


@pytest.mark.parametrize("starts", [True, False])
def test_a_script_whose_processes_are_not_watched_is_checked(starts, tmp_path, warm):
    text = CHILDREN if starts else CHILDREN.replace("mp.start_processes", "(lambda *args, **kwargs: None)")
    (tmp_path / "train.py").write_text(text)
    done = warm.run("-m", "ampwise", "run", "-o", "run", "train.py", cwd=tmp_path)
    assert ("AMP320" in done.stderr) is starts, done.stderr
