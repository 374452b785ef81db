from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP720",
    name="zeros-taken-for-underflow",
    severity=Severity.INFO,
    summary="Zero gradients are mistaken for underflow.",
    why=(
        "Zeros are normal: a healthy FP32 run had 65% of them, and 98.7% in embedding rows. They come from tokens "
        "that are not in the batch, units switched off by ReLU, and masks. What matters is the fraction of values "
        "that are nonzero at higher precision but lost in FP16 at the current scale, and whether it grows."
    ),
    fix="Look at what FP16 loses at the current scale, per layer and over time.",
    bad="zeros = sum((p.grad == 0).sum() for p in model.parameters())  # above 5%: alarm",
    good='lost = ampwise.census(gradients).total().flushed("fp16", 16)',
)
