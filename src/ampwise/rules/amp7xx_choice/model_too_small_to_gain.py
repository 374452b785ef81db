from ampwise.finding import Rule, Severity

RULE = Rule(
    code="AMP708",
    name="model-too-small-to-gain",
    severity=Severity.INFO,
    summary="The model is too small to gain from 16-bit: kernel launches and memory traffic take the time, not "
    "matmuls.",
    why=(
        "Tensor cores speed up matmuls. In a model of a few million parameters, a step is hundreds of short kernels, "
        "and the time goes into launching them, elementwise work and the optimizer; casts add more kernels. Larger "
        "batches, torch.compile or a CUDA graph help there."
    ),
    fix="Measure before changing anything; try a larger batch, torch.compile, or Engine(graph=True) first.",
    bad='engine = ampwise.Engine(tiny_model, optimizer, "bf16")  # 1.0x: no speedup',
    good="$ ampwise bench train.py:make --precisions fp32,bf16",
)
