"""Values of shape (n) that meet others of shape (n, 1) in a loss written by hand, and pairs on purpose."""

import pytest

from .test_learning import expected_and_found, run

POLICY = """
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.logits, self.value = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

            def forward(self, x):
                h = torch.tanh(self.body(x))
                return torch.distributions.Categorical(logits=self.logits(h)), self.value(h)

        policy = Policy()
        optimizer = Adam(policy.parameters(), lr=0.01)
"""

FAULTS = {
    "the ratio of a clipped policy loss": f"""{POLICY}
        for _ in range(20):
            drawn, value = policy(x)
            gain, old = torch.randn(32, 1), torch.randn(32)
            ratio = (drawn.log_prob(y) - old).exp()
            plain = ratio * gain  # expect: AMP640
            clipped = ratio.clamp(0.8, 1.2) * gain
            loss = -torch.min(plain, clipped).mean() + (value - gain).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "advantages without a graph, which are normalised": f"""{POLICY}
        def improve(seen, gain):
            drawn, value = policy(seen)
            better = gain - value.detach()  # expect: AMP640
            better = (better - better.mean()) / (better.std() + 1e-6)
            loss = -(drawn.log_prob(y) * better).mean() + F.mse_loss(value.squeeze(1), gain)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(20):
            improve(x, torch.randn(32))
    """,
    "advantages of another function": f"""{POLICY}
        def better(value, gain):
            return gain - value.detach()

        for _ in range(20):
            drawn, value = policy(x)
            loss = -(drawn.log_prob(y) * better(value, torch.randn(32))).mean()  # expect: AMP640
            loss = loss + 0.01 * value.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "values with a graph, and the log-probabilities of single steps": """
        actor, critic = nn.Linear(8, 4), nn.Linear(8, 1)
        optimizer = Adam([*actor.parameters(), *critic.parameters()], lr=0.01)
        for _ in range(20):
            logs = []
            for each in x[:12]:
                drawn = torch.distributions.Categorical(logits=actor(each[None]))
                logs.append(drawn.log_prob(drawn.sample()))
            logs = torch.stack(logs)
            better = torch.randn(12) - critic(x[:12]).squeeze(1)
            loss = (-logs * better.detach()).sum() + better.square().mean()  # expect: AMP640
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "weights of samples": """
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            weights, labels = torch.rand(32), torch.randint(0, 2, (32, 1)).float()
            each = F.binary_cross_entropy_with_logits(model(x), labels, reduction="none")
            loss = (each * weights).mean()  # expect: AMP640
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "the target of a value, which is made of rewards and the next value": """
        model, target = nn.Linear(8, 4), nn.Linear(8, 4)
        optimizer = Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            reward, last, action = torch.randn(32, 1), torch.randint(0, 2, (32, 1)), torch.randint(0, 4, (32, 1))
            with torch.no_grad():
                best = target(torch.randn(32, 8)).max(1)[0]
                aim = reward + 0.9 * best * (1 - last)  # expect: AMP640
            loss = F.smooth_l1_loss(model(x).gather(1, action), aim)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
}

TRAIN = """
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""

FINE = {
    "the same shapes": f"""{POLICY}
        for _ in range(20):
            drawn, value = policy(x)
            gain, old = torch.randn(32), torch.randn(32)
            ratio = (drawn.log_prob(y) - old).exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + (value[:, 0] - gain).square().mean()
            {TRAIN}
    """,
    "pairs for a ranking": f"""
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            score = model(x).squeeze(1)
            loss = F.relu(1 - (score.unsqueeze(1) - score)).mean()
            {TRAIN}
    """,
    "pairs for a ranking, named before": f"""
        model, other = nn.Linear(8, 1), nn.Linear(8, 1)
        optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.01)
        for _ in range(20):
            good, bad = model(x), other(x).squeeze(1)
            rows = good[:, 0][:, None]
            difference = rows - bad
            loss = F.softplus(-difference).mean()
            {TRAIN}
    """,
    "pairs of labels as well": f"""
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            score, label = model(x), torch.randn(32)
            order, flat = torch.sign(label[:, None] - label), score.squeeze(1)
            loss = F.softplus(-order * (score - flat)).mean()
            {TRAIN}
    """,
    "a mask of pairs and a value of each sample": f"""
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            near = (torch.rand(32, 32) < 0.2).float()
            loss = (near * model(x).squeeze(1).square()).mean()
            {TRAIN}
    """,
    "similarities of all pairs": f"""
        model = nn.Linear(8, 4)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            one, other = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
            loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(32))
            {TRAIN}
    """,
    "squared distances of all pairs": f"""
        model = nn.Linear(8, 4)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            h = model(x)
            sizes, similar = h.square() @ torch.ones(4, 1), h @ h.T
            apart = sizes + h.square().sum(1) - 2 * similar
            loss = (-apart.clamp_min(0) / 8).exp().mean() + h.square().mean()
            {TRAIN}
    """,
    "attention between the samples": f"""
        model, first, second = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 1)
        optimizer = SGD([*model.parameters(), *first.parameters(), *second.parameters()], lr=0.01)
        for _ in range(20):
            scores = F.leaky_relu(first(x) + second(x).squeeze(1))
            weights = scores.softmax(1)
            entropy = -(weights * weights.clamp_min(1e-6).log()).sum(1).mean()
            loss = F.cross_entropy(weights @ model(x), y) + 0.1 * entropy
            {TRAIN}
    """,
    "weights of features, as many as there are samples": f"""
        model, weight = nn.Linear(8, 32), nn.Parameter(torch.ones(32))
        optimizer = SGD([*model.parameters(), weight], lr=0.01)
        for _ in range(20):
            loss = (model(x) * weight).square().mean() + (weight * torch.rand(32, 1)).mean()
            {TRAIN}
    """,
    "a kernel on one axis": f"""
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            h = model(x)
            loss = (-(h - h.T).square()).exp().mean() - 2 * (-(h - torch.randn(32)[None]).square()).exp().mean()
            {TRAIN}
    """,
    "an outer product as a basis": f"""
        model = nn.Linear(8, 1)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            times = torch.linspace(0, 1, 32)[:, None]
            curve = times * model(x).squeeze(1)
            loss = torch.sqrt(1 + curve.square()).mean()
            {TRAIN}
    """,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_values_that_are_crossed_have_one_finding_at_their_line(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert [(each.place.line, each.rule.code) for each in found] == expected, [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_pairs_on_purpose_have_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]
