from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP714",
    name="cause-guessed",
    severity=Severity.WARNING,
    summary="A cause is blamed or ruled out before anything was checked.",
    why=(
        "What was tried may have been done wrong: clipping before unscale_, a scaler that never updates, autocast "
        "that is never entered. And a missing speedup is seldom a torch bug: the model is small, sizes are "
        "misaligned, the GPU waits for data, or TF32 was already on. Each of these takes a minute to check."
    ),
    fix="Check the code first, then the run.",
    bad="# we have a GradScaler, so it is not that",
    good="$ ampwise check train.py\n$ ampwise run train.py",
)
