"""The precisions to train in: what each means, which a device can run, and torch's switches for TF32."""
