"""Settings that do nothing: frozen parameters that train, and others that do not.

As in ``test_learning``, ``# expect: AMP650`` marks the line of the one finding that a script must have.
"""

import pytest

from .test_learning import expected_and_found, run

FAULTS = {
    "an attribute of a module": """
        model = Net()
        model.encoder.requires_grad = False  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a misspelled attribute of parameters": """
        model = Net()
        for parameter in model.encoder.parameters():
            parameter.require_grad = False  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "an attribute that only Keras knows": """
        model = Net()
        model.encoder.trainable = False  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a condition that holds for no name": """
        FROZEN = ("backbone.", "stem.")

        def freeze(model):
            for name, parameter in model.named_parameters():
                if name.startswith(FROZEN):
                    parameter.requires_grad = False  # expect: AMP650

        model = Net()
        freeze(model)
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a comparison": """
        model = Net()
        for parameter in model.encoder.parameters():
            parameter.requires_grad == False  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "the data of parameters": """
        model = Net()
        for parameter in model.encoder.parameters():
            parameter.data.requires_grad = False  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "the state dict": """
        model = Net()
        for name, value in model.state_dict().items():
            if name.startswith("encoder."):
                value.requires_grad_(False)  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a function that only calls eval": """
        def freeze_encoder(model):
            model.encoder.eval()  # expect: AMP650

        model = Net()
        freeze_encoder(model)
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a copy that nothing uses": """
        model = Net()
        encoder = copy.deepcopy(model.encoder)
        encoder.eval()
        encoder.requires_grad_(False)  # expect: AMP650
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "too late, with gradients of zeros and weight decay": """
        model = Net()
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(60):
            if step == 5:
                for parameter in model.encoder.parameters():
                    parameter.requires_grad = False  # expect: AMP650
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "an embedding, frozen by default": """
        embedding = nn.Embedding.from_pretrained(torch.randn(20, 8))  # expect: AMP651
        model = nn.Sequential(embedding, Net())
        train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (torch.randint(0, 20, (32,)), y))
    """,
    "a plain tensor": """
        model, shift = Net(), torch.zeros(8)
        optimizer = SGD([*model.parameters(), shift], lr=0.1)  # expect: AMP651
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x + shift), y).backward()
            optimizer.step()
    """,
    "an AveragedModel that is never updated": """
        from torch.optim.swa_utils import AveragedModel

        def main():
            model = Net()
            average = AveragedModel(model)  # expect: AMP652
            train(model, SGD(model.parameters(), lr=0.1))
            with torch.no_grad():
                average.eval()(x)

        main()
    """,
    "a copy that is never updated": """
        def main():
            model = Net()
            model_ema = copy.deepcopy(model)  # expect: AMP652
            train(model, SGD(model.parameters(), lr=0.1))
            model_ema(x)

        main()
    """,
    "an update of clones": """
        @torch.no_grad()
        def update_ema(ema, model):
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.clone().mul_(0.9).add_(weight, alpha=0.1)  # expect: AMP652

        model = Net()
        ema = copy.deepcopy(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update_ema(ema, model)
        ema(x)
    """,
    "an update of entries of a state dict": """
        def update_ema(ema, model):
            state = ema.state_dict()
            for name, value in model.state_dict().items():
                state[name] = 0.9 * state[name] + 0.1 * value  # expect: AMP652

        model = Net()
        ema = copy.deepcopy(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update_ema(ema, model)
        ema(x)
    """,
    "a class whose update changes a copy": """
        class Ema:
            def __init__(self, model):
                self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            def update(self, model):
                for name, weight in model.named_parameters():
                    shadow = self.shadow[name].clone()
                    shadow.mul_(0.9).add_(weight.detach(), alpha=0.1)  # expect: AMP652

        class EMA(Ema):
            pass

        model = Net()
        ema, optimizer = EMA(model), SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            ema.update(model)
        print(ema.shadow)
    """,
    "a class whose update is not called": """
        class EMA:
            def __init__(self, model):
                self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            def update(self, model):
                for name, weight in model.named_parameters():
                    self.shadow[name].mul_(0.9).add_(weight.detach(), alpha=0.1)

        model = Net()
        polyak_of_net = EMA(model)  # expect: AMP652
        train(model, SGD(model.parameters(), lr=0.1))
        print(len(polyak_of_net.shadow))
    """,
    "an average of named parameters, whose state is saved": """
        class ModelEMA:
            def __init__(self, model):
                self.module = copy.deepcopy(model).requires_grad_(False).eval()
            @torch.no_grad()
            def update(self, model):
                weights = dict(model.named_parameters())
                for name, average in self.module.named_parameters():  # expect: AMP653
                    average.mul_(0.9).add_(weights[name], alpha=0.1)
            def state_dict(self):
                return self.module.state_dict()

        model = mlp(nn.BatchNorm1d(16))
        ema, optimizer = ModelEMA(model), SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            ema.update(model)
        ema.module(x)
    """,
    "an average without the statistics of batch norm": """
        @torch.no_grad()
        def update_ema(ema, model):
            for average, weight in zip(ema.parameters(), model.parameters()):  # expect: AMP653
                average.lerp_(weight, 0.1)

        model = mlp(nn.BatchNorm1d(16))
        ema = copy.deepcopy(model).eval()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update_ema(ema, model)
        ema(x)
    """,
    "log-probabilities, copied by torch.tensor": """
        from collections import namedtuple

        Step = namedtuple("Step", "logp value reward")

        class Agent:
            def __init__(self):
                self.actor, self.critic, self.memory = Net(), nn.Linear(8, 1), []
                self.optimizer = SGD([*self.actor.parameters(), *self.critic.parameters()], lr=0.1)
            def act(self):
                for row in torch.randn(6, 8):
                    logp = self.actor(row).log_softmax(-1)
                    self.memory.append(Step(logp.max(), self.critic(row).squeeze(-1), float(row[0])))
            def learn(self):
                logps = torch.tensor([step.logp.item() for step in self.memory])  # expect: AMP655
                values = torch.stack([step.value for step in self.memory])
                returns = torch.tensor([step.reward for step in self.memory])
                actor_loss = -(logps * (returns - values.detach())).sum()
                loss = actor_loss + 0.5 * F.mse_loss(values, returns)
                loss -= 0.01 * self.actor(torch.randn(2, 8)).softmax(-1).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.memory.clear()

        agent = Agent()
        for _ in range(30):
            agent.act()
            agent.learn()
    """,
    "losses of single samples, copied in the loss itself": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            losses = [F.cross_entropy(model(x[i : i + 4]), y[i : i + 4]) for i in range(0, 32, 4)]
            optimizer.zero_grad()
            (torch.FloatTensor(losses).sum() / 8 + model(x).square().mean()).backward()  # expect: AMP655
            optimizer.step()
    """,
    "the best weights, not copied": """
        class Fitter:
            def fit(self, model, optimizer):
                for epoch in range(6):
                    train(model, optimizer, steps=8)
                    if epoch == 1:
                        self.best = model.state_dict()  # expect: AMP654
                model.load_state_dict(self.best)

        model = Net()
        Fitter().fit(model, SGD(model.parameters(), lr=0.1))
    """,
    "the same in a dictionary of its own, on a CPU": """
        model = mlp(nn.BatchNorm1d(16))
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        best = {name: value.cpu() for name, value in model.state_dict().items() if "mean" not in name}  # expect: AMP654
        train(model, optimizer)
        model.load_state_dict(best, strict=False)
    """,
    "the same, of detached values": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        best = {name: value.detach().cpu() for name, value in model.state_dict().items()}  # expect: AMP654
        train(model, optimizer)
        torch.save(model.state_dict(), "/dev/null")
        model.load_state_dict(best)
    """,
    "an average that nothing uses": """
        @torch.no_grad()
        def update_ema(ema, model):
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.lerp_(weight, 0.1)

        model = Net()
        ema = copy.deepcopy(model)  # expect: AMP652
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update_ema(ema, model)
        model.eval()(x)
    """,
}

FINE = {
    "averages that are updated at the end of an epoch, by other ways, and used": """
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        class EMA:
            def __init__(self, model):
                self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
                self.names = set()
            def update(self, model):
                for name, weight in model.named_parameters():
                    average = 0.9 * self.shadow[name] + 0.1 * weight.data
                    self.shadow[name] = average.clone()
                    self.names.add(name)

        class Trainer:
            def __init__(self, model):
                self.model, self.ema = model, copy.deepcopy(model)
                self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                self.optimizer = SGD(model.parameters(), lr=0.1)
            def fit(self):
                smoothed = ema_loss = 0.0
                for _ in range(40):
                    train(self.model, self.optimizer, steps=1)
                    ema_loss = 0.9 * ema_loss + 0.1 * smoothed
                self.averaged.update_parameters(self.model)
                for average, weight in zip(self.ema.parameters(), self.model.parameters()):
                    average.data = 0.5 * average.data + 0.5 * weight.data
                return self.ema

        def main():
            trainer = Trainer(Net())
            ema = EMA(trainer.model)
            trainer.fit()(x)
            ema.update(trainer.model)
            return ema.shadow

        main()
    """,
    "an average of named parameters, whose statistics are copied for an evaluation": """
        @torch.no_grad()
        def update(average, model):
            weights = dict(model.named_parameters())
            for name, each in average.named_parameters():
                each.mul_(0.9).add_(weights[name], alpha=0.1)

        model = mlp(nn.BatchNorm1d(16))
        average, optimizer = copy.deepcopy(model).requires_grad_(False).eval(), SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update(average, model)
        for name, value in model.state_dict().items():
            if name not in dict(model.named_parameters()):
                average.state_dict()[name].copy_(value)
        average(x)
    """,
    "an average whose buffers are copied, too": """
        @torch.no_grad()
        def update_ema(ema, model):
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.lerp_(weight, 0.1)

        model = mlp(nn.BatchNorm1d(16))
        ema = copy.deepcopy(model).eval()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            train(model, optimizer, steps=1)
            update_ema(ema, model)
            for average, value in zip(ema.buffers(), model.buffers()):
                average.copy_(value)
        ema(x)
    """,
    "copied values that are targets, weights, factors, or meant to have no gradient": """
        model, critic = Net(), nn.Linear(8, 1)
        optimizer = SGD([*model.parameters(), *critic.parameters()], lr=0.1)

        def constant(values):
            return torch.tensor([each.item() for each in values]).mean()

        for _ in range(30):
            logps = list(model(x).log_softmax(-1)[:, 0])
            values = list(critic(x).squeeze(-1))
            old = torch.tensor([each.item() for each in logps])
            baseline = torch.tensor(values)
            returns = torch.rand(32) + 0.9 * torch.tensor([each.item() for each in values])
            advantages = returns - baseline
            ratio = (torch.stack(logps) - old).exp()
            actor_loss = -(ratio * advantages).mean()
            critic_loss = (returns - torch.stack(values)).square().mean()
            shift = torch.tensor([each.item() for each in logps]).detach().mean()
            with torch.no_grad():
                logged = torch.tensor(logps).mean()
            optimizer.zero_grad()
            loss = actor_loss + critic_loss + shift + logged + torch.tensor(0.5) + 0 * constant(logps)
            loss.backward()
            optimizer.step()
            print(torch.tensor(logps).mean().item(), loss)
    """,
    "states that are copies, or are loaded before a step": """
        import io

        model, other = mlp(nn.BatchNorm1d(16)), mlp(nn.BatchNorm1d(16))
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        states = [
            copy.deepcopy(model.state_dict()),
            {name: value.clone() for name, value in model.state_dict().items()},
            {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
            torch.load(file),
        ]
        followed, of_optimizer = model.state_dict(), optimizer.state_dict()
        names = {name: value.detach().float().mean() for name, value in model.state_dict().items()}
        for state in states:
            train(model, optimizer)
            other.load_state_dict(followed)
            model.load_state_dict(model.state_dict())
            model.load_state_dict({name: value.detach() for name, value in model.state_dict().items()})
            model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)
    """,
    "the state of an average that is changed in place, and loaded again": """
        model = Net()
        ema, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
        shadow = ema.state_dict()
        for _ in range(4):
            train(model, optimizer, steps=10)
            for name, value in model.state_dict().items():
                shadow[name].lerp_(value, 0.1)
            ema.load_state_dict(shadow)
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(ema.state_dict())
            model(x)
            model.load_state_dict(kept)
    """,
    "copies of other kinds, and an average of each epoch": """
        def evaluate_ema(model):
            model(x)

        def main():
            model = Net()
            start = copy.deepcopy(model)
            optimizer = SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                ema = copy.deepcopy(model)
                train(model, optimizer)
                ema(x), start(x)
            averaged = copy.deepcopy(model)
            averaged.load_state_dict(model.state_dict())
            for average, weight in zip(averaged.parameters(), model.parameters()):
                average.data.lerp_(weight, 0.1)
            evaluate_ema(averaged)

        main()
    """,
    "a flag of a module of its own": """
        class Flagged(Net):
            def __init__(self):
                super().__init__()
                self.requires_grad = False
                self.trainable = False
            def forward(self, x):
                return super().forward(x if self.requires_grad or self.trainable else x.detach())

        model = Flagged()
        assert not model.requires_grad and not hasattr(model.head, "requires_grad")
        train(model, SGD(model.parameters(), lr=0.1))
    """,
    "a condition that holds for some, and one that a setting switches off": """
        def freeze(model, prefixes, never=()):
            for name, parameter in model.named_parameters():
                if name.startswith(prefixes):
                    parameter.requires_grad = False
            for name, parameter in model.named_parameters():
                if name.startswith(never):
                    parameter.requires_grad = False

        model = Net()
        freeze(model, "encoder")
        train(model, SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))
        other, NEVER = Net(), ()
        for parameter in other.parameters():
            if not parameter.dim():
                parameter.requires_grad = False
        for name, parameter in other.named_parameters():
            if name in NEVER:
                parameter.requires_grad_(False)
        train(other, SGD(other.parameters(), lr=0.1))
    """,
    "a part that is frozen, and unfrozen later": """
        model = Net()
        for parameter in model.encoder.parameters():
            parameter.requires_grad = False
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        train(model, optimizer, steps=20)
        for parameter in model.encoder.parameters():
            parameter.requires_grad = True
        train(model, optimizer, steps=20)
    """,
    "frozen after some steps, without gradients": """
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        train(model, optimizer, steps=5)
        for parameter in model.encoder.parameters():
            parameter.requires_grad = False
        train(model, optimizer)
    """,
    "a frozen copy that teaches, and one that is compared at the end": """
        model = Net()
        teacher, start = copy.deepcopy(model), copy.deepcopy(model)
        for each in (teacher, start):
            each.requires_grad_(False)
        for parameter in start.parameters():
            parameter.requires_grad = False
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + F.mse_loss(model(x), teacher(x))).backward()
            optimizer.step()
        sum((a - b).norm() for a, b in zip(model.parameters(), start.parameters()))
    """,
    "statistics that are frozen by a function of this name": """
        def freeze_bn(model):
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()

        model = mlp(nn.BatchNorm1d(16))
        freeze_bn(model)
        train(model, SGD(model.parameters(), lr=0.1), steps=8)
    """,
    "embeddings that are frozen on purpose, or train after all": """
        weights = torch.randn(20, 8)
        for made in (
            nn.Embedding.from_pretrained(weights, freeze=True),
            nn.Embedding.from_pretrained(weights),  # stays frozen
            nn.Embedding.from_pretrained(weights).requires_grad_(True),
        ):
            model = nn.Sequential(made, Net())
            train(model, SGD(model.parameters(), lr=0.1), draw=lambda: (torch.randint(0, 20, (32,)), y))
    """,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_setting_without_effect_is_found_at_its_line(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert [(each.place.line, each.rule.code) for each in found] == expected, [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_a_setting_with_effect_is_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]
