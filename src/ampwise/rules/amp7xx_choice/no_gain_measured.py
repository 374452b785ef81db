from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP723",
    name="no-gain-measured",
    severity=Severity.INFO,
    summary="16-bit is requested, but a whole step was measured to be less than 1.1x faster with it.",
    why=(
        "A speedup below 1.1x is within run-to-run variation, and the price is rounding to 8 or 11 bits and, in FP16, "
        "a loss scale. A low ratio has a cause that can often be fixed: a small batch, misaligned sizes, waiting for "
        "data, TF32 that was already on."
    ),
    fix="Stay in FP32 until the cause is found and fixed; 16-bit may still be worth it to save activation memory.",
    bad='engine = ampwise.Engine(model, optimizer, "bf16")  # only 1.05x faster',
    good="$ ampwise bench train.py:make    # says why the ratio is low",
)
