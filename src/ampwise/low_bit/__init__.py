"""Training in less memory than 16 bytes a parameter: BF16 weights whose small updates are not lost, and optimizers by
name whose state has 8 bits or 4.

    pure        what "bf16-pure" and what may follow it means
    rounding    FP32 to BF16 by chance, or with the rest kept
    wide        tensors side by side in FP32, for the time of an update
    update      any optimizer's step on BF16 weights, a chunk at a time
    weights     which weights of a model become BF16, and back
    optimizers  optimizers by name, torch's and torchao's
    kept        what torchao's keep of a weight, in bytes
    care        whose small updates are not lost
    loading     an optimizer's saved state, as it was saved
"""
