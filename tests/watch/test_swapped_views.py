"""Views that take the axes of a result for others, and those that know them."""

import pytest

from .test_learning import expected_and_found, run

TRAIN = """
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 6, 8)), torch.randint(0, 4, (16,))).backward()
            optimizer.step()
"""


def attention(split, join, result=""):
    """Return a script with attention of two heads over six positions of sixteen samples."""
    return f"""
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.each, self.all, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)

            def forward(self, x):
                b, t, _ = x.shape
                parts = self.each(x).chunk(3, dim=-1)
                q, k, v = (part{split} for part in parts)
                {result or "seen = F.scaled_dot_product_attention(q, k, v)"}
                return self.head(self.all(seen{join}).mean(1))

        model = Attention()
        {TRAIN}
    """


def frames(order):
    """Return a script with an RNN, steps first, of what a linear layer gives for each frame."""
    return f"""
        class Clips(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.rnn, self.head = nn.Linear(8, 5), nn.LSTM(5, 7), nn.Linear(7, 4)

            def forward(self, x):
                b, t, _ = x.shape
                each = torch.tanh(self.lift(x.flatten(0, 1))).view(b, t, -1)
                states, _ = self.rnn({order})
                return self.head(states[-1])

        model = Clips()
        {TRAIN}
    """


SPLIT, JOIN = ".view(b, t, 2, 4).transpose(1, 2)", ".transpose(1, 2).reshape(b, t, 8)"
BY_HAND = "seen = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v"
FAULTS = {
    "frames that are to come first": frames("each.contiguous().view(t, b, -1)  # expect: AMP645\n                "),
    "heads that are split by a view": attention(".reshape(b, 2, t, 4)", JOIN).replace(
        "for part in parts)", "for part in parts)  # expect: AMP645"
    ),
    "heads that are joined by a view": attention(SPLIT, ".reshape(b, t, 8)").replace(
        ".mean(1))", ".mean(1))  # expect: AMP645"
    ),
    "the same after a matmul": attention(SPLIT, ".reshape(b, t, 8)", BY_HAND).replace(
        ".mean(1))", ".mean(1))  # expect: AMP645"
    ),
}
FINE = {
    "heads of torch's own attention, of the same sizes by chance": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift, self.kept = nn.Linear(8, 32), nn.Linear(8, 32)
                self.attention, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 4)

            def forward(self, x):
                seen, _ = self.attention(self.lift(x), self.kept(x), self.kept(x), need_weights=False)
                return self.head(seen.mean(1))

        model = Reader()
    """
    + TRAIN,
    "frames that are transposed": frames("each.transpose(0, 1)"),
    "heads that are transposed": attention(SPLIT, JOIN),
    "the same after a matmul": attention(SPLIT, JOIN, BY_HAND),
    "one head": attention(".view(b, 1, t, 8)", ".reshape(b, t, 8)"),
    "groups of positions": attention(".view(b, 2, 3, 8)", ".reshape(b, t, 8)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_view_that_swaps_axes_has_findings_at_its_line(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert {(each.place.line, each.rule.code) for each in found} == set(expected), [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_a_view_that_knows_its_axes_has_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]
