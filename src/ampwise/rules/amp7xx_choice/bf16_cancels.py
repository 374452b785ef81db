from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP717",
    name="bf16-cancels",
    severity=Severity.INFO,
    summary="Scores of nearly equal size are subtracted in 16-bit, and the difference is mostly rounding error.",
    why=(
        "A difference inherits the absolute error of its operands: two scores near 100 in BF16 are each accurate to "
        "0.25, so a difference of 0.3 is noise. FP16 has 3 more bits, which only delays the problem. The matmuls that "
        "produce the scores are fine; the scores and their difference are not, and those are cheap in FP32."
    ),
    fix="Keep the last layer of each head and the subtraction in FP32: Policy(…).keep('fp32', 'head_a', 'head_b').",
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    tension = compress(x) - particularize(x)',
    good='policy = ampwise.Policy("bf16").keep("fp32", "compress", "particularize")',
)
