"""Training in less memory than 16 bytes per parameter: BF16 weights without losing small updates, and optimizers with 8
or 4 bits of state.

    pure_bf16        the precision "bf16-pure" and its options
    rounding         FP32 to BF16, stochastically or with the remainder kept
    flat_tensors     several tensors in one block of FP32 memory, during an update
    bf16_update      any optimizer's step on BF16 weights, a chunk at a time
    bf16_weights     convert a model's weights to BF16 and back
    optimizers       optimizers by name, torch's and torchao's
    quantized_state  bytes that torchao's optimizers keep per weight
    safe_updates     optimizers that do not lose small updates
    state_loading    load an optimizer's state without changing its dtypes
"""
