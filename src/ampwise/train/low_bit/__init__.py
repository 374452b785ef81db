"""Training in less memory than 16 bytes per parameter: BF16 weights without losing small updates, and optimizers with 8
or 4 bits of state.

    pure_bf16     the precision "bf16-pure" and its options
    rounding      FP32 to BF16, stochastically or with the remainder kept
    bf16_update   any optimizer's step on BF16 weights, a chunk at a time
    bf16_weights  convert a model's weights to BF16 and back
    optimizers    optimizers by name, torch's and torchao's; their state's size, and whether they keep small updates
"""
