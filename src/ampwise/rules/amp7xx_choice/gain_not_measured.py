from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP713",
    name="gain-not-measured",
    severity=Severity.INFO,
    summary="Mixed precision is assumed to be faster, but it was not measured.",
    why=(
        "The speedup ranges from none (small models, slow data loaders, misaligned sizes, convolutions that already "
        "used TF32) to 6x and more. Timing a few dozen whole steps of each precision in turn (forward, backward, "
        "clipping and optimizer) tells which, in minutes."
    ),
    fix="Measure whole steps: below 1.1x stay in FP32, up to 1.5x it is optional, above that use it.",
    bad="# it is faster anyway, no time to measure",
    good="$ ampwise bench train.py:make --precisions fp32,bf16",
)
