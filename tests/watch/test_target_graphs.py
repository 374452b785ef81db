"""Targets and advantages through which gradients flow, and those that are fixed, or that are no such targets."""

import pytest

from .test_learning import expected_and_found, run

STEP = """
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
VALUES = """
        values = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = Adam(values.parameters(), lr=0.001)

        def draw():
            return torch.randn(32, 8), torch.randint(0, 4, (32, 1)), torch.randn(32), torch.randint(0, 2, (32,))
"""
POLICY = """
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.logits, self.value = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

            def forward(self, x):
                h = torch.tanh(self.body(x))
                return torch.distributions.Categorical(logits=self.logits(h)), self.value(h).squeeze(-1)

        policy = Policy()
        optimizer = Adam(policy.parameters(), lr=0.001)
"""

FAULTS = {
    "the best value of the next state": f"""{VALUES}
        gamma = 0.97
        for _ in range(20):
            seen, action, reward, last = draw()
            value = values(seen).gather(1, action).squeeze(1)
            aim = reward + gamma * values(torch.randn(32, 8)).max(1)[0] * (1 - last)  # expect: AMP648
            loss = F.smooth_l1_loss(value, aim)
            {STEP}
    """,
    "the same by hand": f"""{VALUES}
        discount = 0.9
        for _ in range(20):
            seen, action, reward, last = draw()
            later = values(torch.randn(32, 8)).amax(1)
            error = reward + discount * later - values(seen).gather(1, action).squeeze(1)  # expect: AMP648
            loss = error.pow(2).mean()
            {STEP}
    """,
    "an advantage with its graph": f"""{POLICY}
        for _ in range(20):
            drawn, value = policy(x)
            better = torch.randn(32) - value
            act = -(drawn.log_prob(y) * better).mean()  # expect: AMP648
            loss = act + 0.5 * better.pow(2).mean()
            {STEP}
    """,
    "the same, normalised": f"""{POLICY}
        for _ in range(20):
            drawn, value = policy(x)
            gain = torch.randn(32)
            better = gain - value
            better = (better - better.mean()) / (better.std() + 1e-6)
            loss = -(drawn.log_prob(y) * better).mean() + F.mse_loss(value, gain)  # expect: AMP648
            {STEP}
    """,
}

FINE = {
    "a target without a graph": f"""{VALUES}
        gamma = 0.97
        for _ in range(20):
            seen, action, reward, last = draw()
            with torch.no_grad():
                aim = reward + gamma * values(torch.randn(32, 8)).max(1)[0] * (1 - last)
            loss = F.smooth_l1_loss(values(seen).gather(1, action).squeeze(1), aim)
            {STEP}
    """,
    "two views of an input, and no rewards": f"""{VALUES}
        gamma = 0.97
        for _ in range(20):
            seen = draw()[0]
            loss = F.mse_loss(values(seen), values(seen + 0.1) * gamma) + F.cross_entropy(values(seen), y)
            {STEP}
    """,
    "a part of another output, and an offset": f"""{VALUES}
        for _ in range(20):
            seen, _, offset, _ = draw()
            loss = F.mse_loss(values(seen).amax(1), 0.9 * values(seen + 0.1).amax(1) + offset)
            {STEP}
    """,
    "another model of the next value, which is trained as well": f"""{VALUES}
        gamma, others = 0.97, nn.Linear(8, 4)
        optimizer = Adam([*values.parameters(), *others.parameters()], lr=0.001)
        for _ in range(20):
            seen, action, reward, last = draw()
            aim = reward + gamma * others(torch.randn(32, 8)).amax(1)
            loss = F.mse_loss(values(seen).gather(1, action).squeeze(1), aim)
            {STEP}
    """,
    "an advantage without a graph": f"""{POLICY}
        for _ in range(20):
            drawn, value = policy(x)
            better = torch.randn(32) - value
            loss = -(drawn.log_prob(y) * better.detach()).mean() + 0.5 * better.pow(2).mean()
            {STEP}
    """,
    "an uncertainty that weights an error": f"""
        model = nn.Linear(8, 2)
        optimizer = Adam(model.parameters(), lr=0.001)
        for _ in range(20):
            guess, spread = model(x).unbind(1)
            error = (torch.randn(32) - guess).pow(2)
            loss = (error * (-spread).exp() + spread).mean() + error.mean()
            {STEP}
    """,
    "a guess that is also multiplied by what the model chooses": f"""
        guesses, choices = nn.Linear(8, 1), nn.Linear(8, 1)
        optimizer = Adam([*guesses.parameters(), *choices.parameters()], lr=0.001)
        for _ in range(20):
            guess, choice = guesses(x).squeeze(1), choices(x).squeeze(1)
            price = torch.rand(32)
            loss = F.mse_loss(guess, price) - ((price - guess) * torch.sigmoid(choice)).mean()
            {STEP}
    """,
    "log-probabilities that a gate of the model weights": f"""{POLICY}
        for _ in range(20):
            drawn, gate = policy(x)
            rest = torch.ones(32) - torch.sigmoid(gate)
            loss = F.mse_loss(gate, torch.randn(32)) - (drawn.log_prob(y) * rest).mean()
            {STEP}
    """,
    "a value that nothing fits to returns": f"""{POLICY}
        for _ in range(20):
            drawn, cost = policy(x)
            loss = -(drawn.log_prob(y) * (torch.randn(32) - cost)).mean() + cost.square().mean()
            {STEP}
    """,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_target_with_a_graph_has_one_finding(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert [(each.place.line, each.rule.code) for each in found] == expected, [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_a_target_that_is_fixed_has_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]
