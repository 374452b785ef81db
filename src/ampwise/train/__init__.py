"""The training step.

``engine`` drives it: micro-batches are accumulated (``accumulator``), gradients are checked and clipped and the step is
taken or skipped as a whole (``scaler``), and schedulers and buffers follow it (``schedulers``, ``buffer_snapshot``).
``precision`` defines which precision each operation runs in; what a precision needs besides autocast is a plugin
(``precision_plugin``, ``fp8_plugin``, ``pure_bf16_plugin``). Tracing, sinks and the guard are callbacks (``callback``).
"""
