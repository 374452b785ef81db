from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP719",
    name="scale-tuned-blind",
    severity=Severity.INFO,
    summary="The GradScaler's settings are changed without evidence that the loss scale is the cause.",
    why=(
        "The scale adapts by itself: it halves when gradients overflow and doubles after 2000 clean steps, without "
        "lower or upper limits. Starting at 1024 instead of 65536 saves at most six skipped steps; 131072 is where "
        "the scale would be 2000 steps later. A NaN from the forward pass is the same at every scale."
    ),
    fix="Record a run: where other settings would help, the report says which, with the numbers.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1024, backoff_factor=0.75)',
    good="$ ampwise run -o RUN train.py\n$ ampwise report RUN",
)
