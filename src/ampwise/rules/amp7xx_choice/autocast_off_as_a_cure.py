from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP705",
    name="autocast-off-as-a-cure",
    severity=Severity.WARNING,
    summary="Autocast is turned off permanently because of a NaN whose cause is unknown.",
    why=(
        "A NaN can come from the batch, the learning rate, a loss that takes the log of zero, or an operation that "
        "exceeds the range of FP16. Only the last is a precision problem, and it takes one module in FP32 to fix, not "
        "the whole model. Turning autocast off gives up the speed and leaves the cause unknown; if the cause was a "
        "different one, the NaN comes back."
    ),
    fix="Rerun the bad step in FP32. If it is finite there, keep the reported module in FP32; if it is still NaN, "
    "precision is not the cause.",
    bad="# with torch.autocast(device):  # NaN, so turned off\nloss = loss_fn(model(x), y)",
    good=(
        "$ ampwise run --capsule capsules train.py\n"
        "$ ampwise replay capsules/step-000012 train.py:make --precision fp32"
    ),
)
