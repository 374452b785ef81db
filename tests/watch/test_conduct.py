"""Mistakes as they happen: small scripts, each with its own expectations, run under the watch.

``# expect: AMP101`` stands on the line that a finding is to name. What has no such comment must stay silent.
"""

import re
import runpy
import textwrap

import pytest
import torch

from ampwise.watch.watch import Watch

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def loss_of(net=model, dtype=torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        return F.cross_entropy(net(x), y)

"""

CASES = {
    "clip before unscale": """
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            clip_grad_norm_(model.parameters(), 1.0)  # expect: AMP101
            scaler.step(optimizer)
            scaler.update()
    """,
    "clip after unscale": """
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    """,
    "a clip by value, of a generator": """
        scaler.scale(loss_of()).backward()
        nn.utils.clip_grad_value_((each for each in model.parameters()), 1.0)  # expect: AMP101
        scaler.step(optimizer)
        scaler.update()
    """,
    "the norm measured too early": """
        scaler.scale(loss_of()).backward()
        norm = clip_grad_norm_(model.parameters(), float("inf"))  # expect: AMP102
        scaler.step(optimizer)
        scaler.update()
    """,
    "unscaled twice": """
        scaler.scale(loss_of()).backward()
        scaler.unscale_(optimizer)
        try:
            scaler.unscale_(optimizer)  # expect: AMP103
        except RuntimeError:
            pass
        scaler.step(optimizer)
        scaler.update()
    """,
    "an overflow that leaves out the update": """
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            if number == 0:
                model[0].weight.grad[0, 0] = float("inf")
            try:
                scaler.unscale_(optimizer)  # expect: AMP115
            except RuntimeError:
                break
            if not all(each.grad.isfinite().all() for each in model.parameters()):
                continue
            scaler.step(optimizer)
            scaler.update()
    """,
    "an overflow with the update": """
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            if number == 0:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            if not all(each.grad.isfinite().all() for each in model.parameters()):
                scaler.update()
                continue
            scaler.step(optimizer)
            scaler.update()
    """,
    "unscaled with every micro-batch": """
        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                scaler.scale(loss_of() / 2).backward()
                if micro == 0:
                    scaler.unscale_(optimizer)  # expect: AMP104
            scaler.step(optimizer)
            scaler.update()
    """,
    "no update": """
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.scale(loss_of()).backward()
        try:
            scaler.step(optimizer)  # expect: AMP105
        except RuntimeError:
            pass
        scaler.update()
    """,
    "updated with every micro-batch": """
        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                scaler.scale(loss_of() / 2).backward()
                if micro == 0:
                    scaler.unscale_(optimizer)  # expect: AMP104
                    scaler.update()  # expect: AMP106
            scaler.step(optimizer)
            scaler.update()
    """,
    "one scaler, two optimizers, two updates": """
        other = nn.Linear(16, 4)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()  # expect: AMP107
            second.zero_grad()
            scaler.scale(loss_of(other)).backward()
            scaler.step(second)
            scaler.update()
    """,
    "one scaler, two optimizers, one update": """
        other = nn.Linear(16, 4)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            second.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.scale(loss_of(other)).backward()
            scaler.step(optimizer)
            scaler.step(second)
            scaler.update()
    """,
    "not scaled": """
        for _ in range(2):
            optimizer.zero_grad()
            loss_of().backward()  # expect: AMP108
            scaler.scale(loss_of())
            scaler.step(optimizer)
            scaler.update()
    """,
    "scaled, then divided": """
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                (scaler.scale(loss_of()) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "the scaler passed by": """
        scaler.scale(loss_of()).backward()
        optimizer.step()  # expect: AMP109
    """,
    "unscaled by the scaler, stepped without it": """
        scaler.scale(loss_of()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # expect: AMP109
        scaler.update()
    """,
    "stepped twice": """
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.step()  # expect: AMP110
    """,
    "stepped without the scaler first": """
        scaler.scale(loss_of()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()  # expect: AMP109
        scaler.step(optimizer)  # expect: AMP110
        scaler.update()
    """,
    "backward under autocast": """
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # expect: AMP111
        scaler.step(optimizer)
        scaler.update()
    """,
    "a closure": """
        scaler.scale(loss_of()).backward()
        try:
            scaler.step(optimizer, closure=loss_of)  # expect: AMP113
        except RuntimeError:
            scaler.step(optimizer)
        scaler.update()
    """,
    "a schedule that moves on skips": """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()  # expect: AMP114
    """,
    "a schedule that stands still on skips": """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= scale:
                schedule.step()
    """,
    "a schedule by epoch, after an epoch whose last step was skipped": """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for epoch in range(4):
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of()).backward()
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
    """,
    "made anew each epoch": """
        for epoch in range(2):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # expect: AMP201
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of()).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "two scalers of one line, each with a model of its own": """
        def train(net):
            optimizer = torch.optim.AdamW(net.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of(net)).backward()
                scaler.step(optimizer)
                scaler.update()

        train(nn.Linear(16, 4))
        train(nn.Linear(16, 4))
        del scaler
    """,
    "never used": """
        unused = torch.amp.GradScaler("cpu")  # expect: AMP202
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
    "off, and rightly unused": """
        off = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(2):
            optimizer.zero_grad()
            off.scale(loss_of(dtype=torch.bfloat16)).backward()
            off.step(optimizer)
            off.update()
        scaler.scale(loss_of())
    """,
    "a checkpoint without the scaler": """
        import io
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save({"step": 1, "states": [optimizer.state_dict()]}, io.BytesIO())  # expect: AMP204
    """,
    "a checkpoint in two files": """
        import io
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())
        torch.save(scaler.state_dict(), io.BytesIO())
    """,
    "weights alone": """
        import io
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save(model.state_dict(), io.BytesIO())
    """,
    "means added up": """
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                scaler.scale(loss_of()).backward()  # expect: AMP205
            scaler.step(optimizer)
            scaler.update()
    """,
    "means added up, in FP32": """
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                F.cross_entropy(model(x), y).backward()  # expect: AMP205
            optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "two losses of one batch": """
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "dropped with every micro-batch": """
        for _ in range(4):
            for _ in range(3):
                optimizer.zero_grad()  # expect: AMP206
                scaler.scale(loss_of() / 3).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "one bad batch dropped": """
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            if step == 3:
                optimizer.zero_grad()
                continue
            scaler.step(optimizer)
            scaler.update()
    """,
    "FP16 without a scaler": """
        for _ in range(2):
            optimizer.zero_grad()
            loss_of().backward()  # expect: AMP301
            optimizer.step()
        scaler.scale(loss_of())
    """,
    "BF16 without a scaler": """
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(dtype=torch.bfloat16).backward()
            optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "a scaler with BF16": """
        wide = torch.amp.GradScaler("cpu")  # expect: AMP302
        for _ in range(2):
            optimizer.zero_grad()
            wide.scale(loss_of(dtype=torch.bfloat16)).backward()
            wide.step(optimizer)
            wide.update()
        scaler.scale(torch.ones(()))
    """,
    "FP16 parameters": """
        half = nn.Linear(16, 4).half()
        optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
        scaler.scale(half(x.half()).float().sum()).backward()
        try:
            scaler.step(optimizer)  # expect: AMP304
        except ValueError:
            pass
    """,
    "Adam's eps in FP16": """
        half = nn.Linear(16, 4).half()
        optimizer = torch.optim.Adam(half.parameters())
        half(x.half()).float().sum().backward()  # expect: AMP301
        optimizer.step()  # expect: AMP305
        scaler.scale(torch.ones(()))
    """,
    "BF16 parameters": """
        narrow = nn.Linear(16, 4).bfloat16()  # expect: AMP306
        optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
        narrow(x.bfloat16()).float().mean().backward()
        optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "two half formats in one step": """
        other = nn.Linear(16, 4)
        both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        with torch.autocast("cpu", dtype=torch.float16):
            first = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = F.cross_entropy(other(x), y)  # expect: AMP307
        scaler.scale(first + second).backward()
        scaler.step(both)
        scaler.update()
    """,
    "two half formats within a model": """
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 4)

            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    hidden = self.one(x)
                return self.other(hidden)

        mixed = Mixed()
        optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
        scaler.scale(loss_of(mixed)).backward()
        scaler.step(optimizer)  # expect: AMP307
        scaler.update()
    """,
    "one half format a step, by turns": """
        for dtype in (torch.float16, torch.bfloat16, torch.float16):
            optimizer.zero_grad()
            scaler.scale(loss_of(dtype=dtype)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "scaled by hand": """
        (loss_of() * 1024).backward()  # expect: AMP308
        for each in model.parameters():
            each.grad.div_(1024)
        optimizer.step()
        scaler.scale(loss_of())
    """,
    "weighed, not scaled": """
        (F.cross_entropy(model(x), y) * 0.5).backward()
        optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "autocast around a loss alone": """
        for _ in range(2):
            optimizer.zero_grad()
            out = model(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "autocast within the model": """
        class Inner(nn.Linear):
            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().forward(x)

        inner = Inner(16, 4)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            F.cross_entropy(inner(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        scaler.scale(torch.ones(()))
    """,
    "evaluation in FP32": """
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad():
            model(x)  # expect: AMP501
    """,
    "evaluation in what was trained in": """
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            model(x)
    """,
    "a step that computes its own gradients": """
        def closure():
            optimizer.zero_grad()
            loss = loss_of(dtype=torch.bfloat16)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        scaler.scale(torch.ones(()))
    """,
    "checkpointed activations": """
        from torch.utils.checkpoint import checkpoint
        for reentrant in (True, False):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
                loss = F.cross_entropy(hidden, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "a closure that is asked for often": """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        scaler.scale(torch.ones(()))
    """,
    "gradients dropped by hand": """
        for step in range(8):
            for each in model.parameters():
                each.grad = None
            scaler.scale(loss_of()).backward()
            if step % 2:
                continue
            scaler.step(optimizer)
            scaler.update()
    """,
    "an optimizer that is not torch's": """
        class Descent:
            def __init__(self, params):
                self.param_groups = [{"params": list(params), "lr": 0.1}]

            def step(self):
                with torch.no_grad():
                    for each in self.param_groups[0]["params"]:
                        each -= 0.1 * each.grad

            def zero_grad(self):
                for each in self.param_groups[0]["params"]:
                    each.grad = None

        optimizer = Descent(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    """,
    "a penalty on gradients": """
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(scaler.scale(loss), model[0].weight, create_graph=True)
            penalty = (slope / scaler.get_scale()).norm()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "an optimizer that wraps another": """
        from collections import OrderedDict

        class Lookahead(torch.optim.Optimizer):
            def __init__(self, base):
                self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, {}
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

            def step(self, closure=None):
                return self.base.step(closure)

            def zero_grad(self, set_to_none=True):
                self.base.zero_grad()

        wrapped = Lookahead(optimizer)
        for _ in range(4):
            wrapped.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.step(wrapped)
            scaler.update()
        for _ in range(4):
            wrapped.zero_grad()
            F.cross_entropy(model(x), y).backward()
            wrapped.step()
    """,
    "a teacher in FP16, a student in BF16": """
        teacher = nn.Linear(16, 4)
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
                target = teacher(x)
            with torch.autocast("cpu", dtype=torch.float16):
                with torch.no_grad():
                    target = teacher(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), target.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "one model in FP16, another in FP32": """
        other = nn.Linear(16, 4)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        weight = nn.Parameter(torch.ones(3))
        third = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            for each in (optimizer, second, third):
                each.zero_grad()
            loss = loss_of()
            F.cross_entropy(other(x), y).backward()
            second.step()
            weight.square().sum().backward()
            third.step()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "an unscaled FP16 loss beside a scaler": """
        other = nn.Linear(16, 4)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            second.zero_grad()
            scaler.scale(loss_of()).backward()
            loss_of(other).backward()  # expect: AMP301
            scaler.step(optimizer)
            second.step()
            scaler.update()
    """,
    "a scaled loss of many": """
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                losses = F.cross_entropy(model(x), y, reduction="none")
            scaler.scale(losses).mean().backward()
            clip_grad_norm_(model.parameters(), 1.0)  # expect: AMP101
            scaler.step(optimizer)
            scaler.update()
    """,
    "scaled by what the scaler says": """
        scaler.scale(torch.ones(()))
        for _ in range(2):
            optimizer.zero_grad()
            (loss_of() * scaler.get_scale()).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "a part of the loss not scaled": """
        for _ in range(2):
            optimizer.zero_grad()
            penalty = model[0].weight.square().sum().exp()
            (scaler.scale(loss_of()) + penalty).backward()  # expect: AMP108
            scaler.step(optimizer)
            scaler.update()
    """,
    "an attack on the input first": """
        for _ in range(4):
            near = x.clone().requires_grad_()
            F.cross_entropy(model(near), y).backward(inputs=[near])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(near.detach() + near.grad.sign()), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "an attack on the input, and its gradients dropped": """
        for _ in range(4):
            near = x.clone().requires_grad_()
            F.cross_entropy(model(near), y).backward()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(near.detach() + near.grad.sign()), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "a bad step skipped by hand": """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        for _ in range(6):
            scaler.scale(loss_of()).backward()
            scaler.unscale_(optimizer)
            if torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """,
    "a GAN that trains the generator first": """
        critic = nn.Linear(4, 1)
        second = torch.optim.AdamW(critic.parameters())
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                fake = model(x)
                loss = -critic(fake).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            second.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (critic(fake.detach()).square() + (1 - critic(x[:, :4])).square()).float().mean()
            scaler.scale(loss).backward()
            scaler.step(second)
            scaler.update()
    """,
    "a clip of the last layers": """
        deep = nn.Sequential(*[nn.Linear(16, 16) for _ in range(9)], nn.Linear(16, 4))
        optimizer = torch.optim.SGD(deep.parameters(), lr=0.1)
        scaler.scale(loss_of(deep)).backward()
        clip_grad_norm_(deep[-1].parameters(), 1.0)  # expect: AMP101
        scaler.step(optimizer)
        scaler.update()
    """,
    "two models of one class, each evaluated as it was trained": """
        other = nn.Sequential(nn.Linear(16, 4))
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        F.cross_entropy(other(x), y).backward()
        second.step()
        with torch.no_grad():
            other.eval()(x)
            with torch.autocast("cpu", dtype=torch.float16):
                model.eval()(x)
    """,
    "evaluated in what it was cast to": """
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.eval().half()(x.half())
        model.float()
    """,
    "gradients divided by hand, or by what backward is given": """
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                F.cross_entropy(model(x), y).backward()
            for each in model.parameters():
                each.grad.div_(4)
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                F.cross_entropy(model(x), y).backward(gradient=torch.tensor(0.25))
            optimizer.step()
        scaler.scale(torch.ones(()))
    """,
    "a scaler saved as it is": """
        import io
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save([optimizer.state_dict(), scaler], io.BytesIO())
    """,
    "two optimizers by turns": """
        other = nn.Linear(16, 4)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(6):
            net, one = ((model, optimizer), (other, second))[step % 2]
            one.zero_grad()
            scaler.scale(loss_of(net)).backward()
            scaler.step(one)
            scaler.update()
    """,
    "threads, one after the other": """
        import threading

        def epoch():
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of()).backward()
                scaler.step(optimizer)
                scaler.update()

        epoch()
        thread = threading.Thread(target=epoch)
        thread.start()
        thread.join()
    """,
    "trained in evaluation mode": """
        model.eval()
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                scaler.scale(loss_of()).backward()  # expect: AMP205
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            model(x)  # expect: AMP501
    """,
    "a term of the loss that weighs much": """
        for _ in range(2):
            optimizer.zero_grad()
            (100.0 * loss_of() + loss_of()).backward()  # expect: AMP301
            optimizer.step()
        scaler.scale(loss_of())
    """,
    "by the engine": """
        import ampwise
        engine = ampwise.Engine(model, optimizer, "fp16", clip_norm=1.0, accumulate=2)
        for _ in range(8):
            engine.step(lambda: F.cross_entropy(model(x), y))
        with torch.no_grad(), engine.autocast():
            model.eval()(x)
        del scaler
    """,
    "by our scaler": """
        import ampwise
        scaler = ampwise.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of()).backward()
            scaler.clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    """,
}
UNTOLD = {"AMP202"}  # the scaler of the setup is there in each script, whether or not it is used


def expectations(text):
    lines = enumerate(text.splitlines(), start=1)
    marked = ((number, re.search(r"# expect: (\S+)", line)) for number, line in lines)
    return {(found[1], number) for number, found in marked if found}


@pytest.fixture
def watched(tmp_path):
    def run(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        with Watch(every=1, timing=False) as watch:
            runpy.run_path(str(path))
        return watch

    return run


@pytest.mark.filterwarnings("ignore")  # of scripts that are wrong on purpose
@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_found_where_they_are(watched, name):
    text = SETUP + textwrap.dedent(CASES[name])
    watch = watched(text)
    found = {(each.finding.rule.code, each.finding.place.line) for each in watch.findings}
    if "never used" not in name:
        found = {(code, line) for code, line in found if code not in UNTOLD}
    assert found == expectations(text)
    assert not watch.failures


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_watching_changes_nothing(watched, tmp_path, name):
    told = "\nimport pathlib\npathlib.Path(__file__).with_suffix('.bits').write_bytes(b''.join(\n"
    told += "    each.detach().view(torch.uint8).numpy().tobytes() for each in model.parameters()))\n"
    text = SETUP + textwrap.dedent(CASES[name]) + told
    watched(text)
    bits = (tmp_path / "script.bits").read_bytes()
    runpy.run_path(str(tmp_path / "script.py"))
    assert (tmp_path / "script.bits").read_bytes() == bits


def test_a_finding_counts_how_often_and_when(watched):
    watch = watched(SETUP + textwrap.dedent(CASES["clip before unscale"]))
    (seen,) = watch.seen()
    assert (seen.count, seen.first_step, seen.last_step) == (3, 1, 3)
    assert "clip_grad_norm_" in seen.excerpt["lines"][seen.finding.place.line - seen.excerpt["first_line"]]


def test_torch_is_as_it_was_afterwards(watched):
    import torch.optim.lr_scheduler as schedulers
    from torch import nn

    owners = [
        torch, torch.autograd, torch.amp.GradScaler, torch.optim.Optimizer, nn.Module, nn.utils, nn.utils.clip_grad,
        torch.amp.autocast_mode.autocast, schedulers.LRScheduler, torch.jit, torch.onnx,
    ]  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    watched(SETUP + textwrap.dedent(CASES["by the engine"]))
    after = [dict(vars(owner)) for owner in owners]
    changed = [
        (owner, name) for owner, one, other in zip(owners, before, after, strict=True) for name in one
        if one[name] is not other.get(name)
    ]  # fmt: skip
    assert not changed


def test_a_function_that_serves_training_and_evaluation_is_distinguished_by_its_caller(watched):
    text = SETUP + textwrap.dedent("""
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()

        def plain():
            return F.cross_entropy(model(x), y)

        model.eval()
        with torch.no_grad():
            plain()
    """)
    (seen,) = watched(text).seen()
    lines = text.splitlines()
    assert seen.finding.place.line == lines.index("    return F.cross_entropy(model(x), y)") + 1
    assert seen.finding.evidence == {"called_from": f"script.py:{len(lines)}"}
