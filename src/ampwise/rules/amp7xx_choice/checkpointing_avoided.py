from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP721",
    name="checkpointing-avoided",
    severity=Severity.INFO,
    summary="Activation checkpointing is left out because autocast is on, though the two work together.",
    why=(
        "torch.utils.checkpoint records whether autocast was on, and in which dtype, and recomputes under the same "
        "setting. It saves what autocast cannot: it drops activations altogether. Only a block that sets autocast "
        "itself, or casts explicitly, may produce another dtype when it is recomputed."
    ),
    fix="Use torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) inside the autocast block.",
    bad="x = block(x)  # checkpointing does not work with autocast",
    good="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
)
