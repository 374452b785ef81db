from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP706",
    name="precision-by-reputation",
    severity=Severity.WARNING,
    summary="A precision is chosen because it is newer or was recommended, not because of what the device supports.",
    why=(
        "What a device computes fast depends on its tensor cores, not on opinions. BF16 is newer than FP16 and has "
        "the range of FP32 with 8 significant bits; FP16 has 11 bits and ends at 65504. Before Ampere (compute "
        "capability 8.0) there are no BF16 tensor cores; from Ampere on, both run at the same rate."
    ),
    fix="Check the device, then the model, then measure both formats.",
    bad="dtype = torch.bfloat16  # FP16 is outdated",
    good="$ ampwise gpu\n$ ampwise bench train.py:make --precisions fp16,bf16",
)
