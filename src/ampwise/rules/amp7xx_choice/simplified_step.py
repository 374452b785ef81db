from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP715",
    name="simplified-step",
    severity=Severity.INFO,
    summary="The basic loop is copied, and accumulation, clipping, skipped steps and ranks are left for later.",
    why=(
        "The basic loop is correct as long as nothing is added. Clipping needs unscale_; accumulation needs a divided "
        "loss and one update per optimizer step; a scheduler must account for skipped steps; a checkpoint must "
        "include the scaler; ranks must agree. Each of these gets added sooner or later, and getting it wrong raises "
        "no error."
    ),
    fix="Use ampwise.Engine, which handles all of them, or paste the complete loop below.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()  # clipping, accumulation: later",
    good="engine = ampwise.Engine(model, optimizer, clip_norm=1.0, accumulate=4, scheduler=scheduler)",
)
