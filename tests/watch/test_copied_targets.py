"""Models that read the tokens that they are to predict at the same positions, and those that may."""

import pytest

from .test_learning import expected_and_found, run

MODEL = """
        class Reader(nn.Module):
            def __init__(self, causal=False):
                super().__init__()
                self.tokens, self.places = nn.Embedding(13, 16), nn.Parameter(torch.zeros(10, 16))
                self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
                self.norm, self.head, self.causal = nn.LayerNorm(16), nn.Linear(16, 12), causal

            def forward(self, tokens):
                h = self.tokens(tokens) + self.places
                mask = torch.full((10, 10), float("-inf")).triu(1) if self.causal else None
                seen, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False)
                return self.head(self.norm(h + seen))

        def draw():
            tokens = torch.randint(0, 12, (8, 10))
            return tokens, torch.rand(8, 10) < 0.4

        reader = Reader()
        optimizer = Adam(reader.parameters(), lr=0.001)
"""

STEP = """
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""

FAULTS = {
    "tokens that are not masked": f"""{MODEL}
        for _ in range(20):
            tokens, mask = draw()
            masked = torch.where(mask, 12, tokens)
            scores = reader(tokens)  # expect: AMP647
            loss = F.cross_entropy(scores.transpose(1, 2), torch.where(mask, tokens, -100))
            {STEP}
    """,
    "the same, with weights of positions": f"""{MODEL}
        def masked_loss(tokens, mask):
            scores = reader(tokens)  # expect: AMP647
            each = F.cross_entropy(scores.flatten(0, 1), tokens.flatten(), reduction="none")
            return (each * mask.flatten()).sum() / mask.sum()

        for _ in range(20):
            loss = masked_loss(*draw())
            {STEP}
    """,
    "the same, with the predictions that are masked": f"""{MODEL}
        for _ in range(20):
            tokens, mask = draw()
            scores = reader(tokens)  # expect: AMP647
            loss = F.cross_entropy(scores[mask], tokens[mask])
            {STEP}
    """,
    "targets of a language model that are not shifted": f"""{MODEL}
        reader.causal = True
        for _ in range(20):
            tokens, _ = draw()
            scores = reader(tokens)
            loss = F.cross_entropy(scores.flatten(0, 1), tokens.flatten())  # expect: AMP647
            {STEP}
    """,
}

FINE = {
    "masked tokens": f"""{MODEL}
        for _ in range(20):
            tokens, mask = draw()
            scores = reader(torch.where(mask, 12, tokens))
            loss = F.cross_entropy(scores.transpose(1, 2), torch.where(mask, tokens, -100))
            {STEP}
    """,
    "masked and random tokens, and some that are kept": f"""{MODEL}
        for _ in range(20):
            tokens, mask = draw()
            shown = torch.where(torch.rand(8, 10) < 0.8, 12, torch.randint(0, 12, (8, 10)))
            shown = torch.where(torch.rand(8, 10) < 0.9, shown, tokens)
            scores = reader(torch.where(mask, shown, tokens))
            loss = F.cross_entropy(scores.transpose(1, 2), torch.where(mask, tokens, -100))
            {STEP}
    """,
    "values that are masked after the embedding": f"""{MODEL}
        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.body, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)

            def forward(self, tokens, mask):
                h = self.tokens(tokens) * ~mask[..., None]
                return self.head(torch.tanh(self.body(h + h.mean(1, keepdim=True))))

        hidden = Hidden()
        optimizer = Adam(hidden.parameters(), lr=0.001)
        for _ in range(20):
            tokens, mask = draw()
            loss = F.cross_entropy(hidden(tokens, mask).transpose(1, 2), torch.where(mask, tokens, -100))
            {STEP}
    """,
    "tokens that an embedding is to give back": f"""{MODEL}
        for _ in range(20):
            tokens, mask = draw()
            loss = F.cross_entropy(reader(tokens).transpose(1, 2), tokens)
            {STEP}
    """,
    "the same, with padding": f"""{MODEL}
        for _ in range(20):
            tokens, _ = draw()
            tokens = torch.where(torch.arange(10) < torch.randint(4, 9, (8, 1)), tokens, 0)
            loss = F.cross_entropy(reader(tokens).transpose(1, 2), tokens, ignore_index=0)
            {STEP}
    """,
    "an autoencoder with one state for each sample": f"""{MODEL}
        embedding, encoder = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True)
        decoder, head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)
        optimizer = Adam([*embedding.parameters(), *encoder.parameters(), *decoder.parameters(), *head.parameters()])
        for _ in range(20):
            tokens, mask = draw()
            _, last = encoder(embedding(tokens))
            scores = head(decoder(last[0][:, None].expand(-1, 10, -1))[0])
            loss = F.cross_entropy(scores.transpose(1, 2), torch.where(mask, tokens, -100))
            {STEP}
    """,
    "a model that shifts what it reads": f"""{MODEL}
        class Shifted(Reader):
            def forward(self, tokens):
                h = F.pad(self.tokens(tokens)[:, :-1], (0, 0, 1, 0)) + self.places
                mask = torch.full((10, 10), float("-inf")).triu(1)
                seen, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False)
                return self.head(self.norm(h + seen))

        reader = Shifted()
        optimizer = Adam(reader.parameters(), lr=0.001)
        for _ in range(20):
            tokens, _ = draw()
            loss = F.cross_entropy(reader(tokens).flatten(0, 1), tokens.flatten())
            {STEP}
    """,
    "targets that are shifted": f"""{MODEL}
        reader.causal = True
        for _ in range(20):
            tokens = torch.randint(0, 12, (8, 11))
            loss = F.cross_entropy(reader(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            {STEP}
    """,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_model_that_reads_its_targets_has_one_finding(name, tmp_path):
    expected, found = expected_and_found(FAULTS[name], tmp_path)
    assert [(each.place.line, each.rule.code) for each in found] == expected, [str(each) for each in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_a_model_that_may_read_them_has_none(name, tmp_path):
    _, found = run(FINE[name], tmp_path)
    assert not found, [str(each) for each in found]
