from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP722",
    name="format-not-ready",
    severity=Severity.INFO,
    summary="A 4-bit or 8-bit format is requested for which torch has only training prototypes on this device.",
    why=(
        "MXFP8, MXFP4 and NVFP4 share a scale among 16 or 32 values. Hardware supports them, but training in them "
        "depends on libraries that change every month and on recipes that are still being worked out. BF16 is the "
        "baseline they are measured against."
    ),
    fix="Train in BF16; emulate the format, on any device, to see whether the model can learn in it.",
    bad='engine = ampwise.Engine(model, optimizer, "nvfp4")',
    good='engine = ampwise.Engine(model, optimizer, "emulate:nvfp4")',
)
