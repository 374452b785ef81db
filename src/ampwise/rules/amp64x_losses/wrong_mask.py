from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP647",
    name="wrong-mask",
    severity=Severity.WARNING,
    summary="A model of tokens sees those that it is to predict, or a padding mask is inverted.",
    why=(
        "If the targets are the next tokens, and attention has no causal mask, each position sees its own target: the "
        "loss falls to almost nothing, and generated text is useless. An RNN in both directions does the same, and so "
        "does a model that gets the original tokens instead of the masked ones, or targets that are not shifted. A "
        "`key_padding_mask` of torch is true where a position is left out: `tokens != pad` leaves out the tokens, and "
        "keeps the padding. Judged by the weights or the mask that attention has kept for its backward pass."
    ),
    fix="Pass a causal mask, `is_causal=True`; make the padding mask with `tokens == pad`.",
    bad="loss = F.cross_entropy(encoder(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])",
    good=(
        "mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)\n"
        "loss = F.cross_entropy(encoder(tokens[:, :-1], mask).transpose(1, 2), tokens[:, 1:])"
    ),
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.seen_targets.items():
        if calls.times >= TIMES:
            yield RULE.at(
                (calls.at or site).place.but(step=calls.step),
                f"the targets are the next tokens, and this {calls.what} lets each position see them",
                fix="Pass a causal mask, or read the tokens in one direction only.",
                evidence={"times": calls.times},
            )
    for site, calls in facts.copied_targets.items():
        if calls.times >= TIMES:
            is_masked = calls.what == "masked"
            where = "at the positions that the loss counts" if is_masked else "though its attention is causal"
            yield RULE.at(
                (calls.at or site).place.but(step=calls.step),
                f"the targets are the tokens that the model reads at the same positions, {where}: it copies them",
                fix="Pass the masked tokens to the model, not the original ones."
                if is_masked
                else "Shift the targets by one: `logits[:, :-1]` against `tokens[:, 1:]`.",
                evidence={"times": calls.times},
            )
    for site in facts.inverted_masks:
        yield RULE.at(
            site.place,
            "this padding mask is true for the tokens that are not padding, and true means to leave out",
            fix="Use `==` instead of `!=`.",
        )
