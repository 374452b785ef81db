from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP718",
    name="half-for-exact-work",
    severity=Severity.WARNING,
    summary="16-bit or TF32 is chosen for numbers that must be accurate to many digits, or are complex.",
    why=(
        "BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits. Training a network "
        "tolerates that, a simulation or a solver does not. Autocast leaves complex tensors alone, so there is no "
        "speedup for them."
    ),
    fix="Stay in FP32 with TF32 off for matmuls and convolutions, or use FP64.",
    bad='with torch.autocast("cuda"):\n    residual = b - A @ x',
    good="torch.backends.cudnn.allow_tf32 = False  # off for convolutions too\nresidual = b.double() - A.double() @ x",
)
