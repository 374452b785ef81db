"""One process that trains with DeepSpeed, which changes too much around itself to share one with tests.

Reads a JSON object from its first argument (stage, precision, max_norm, slopes) and prints, as its last line, what
there was to see after each step: a gradient is the slope in every weight.
"""

import json
import os
import socket
import sys


def main(stage, precision, max_norm, slopes):
    import deepspeed
    import torch

    # Built by a compiler when first used, and of no use to a single process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    layer = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    kind = {
        "fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        "bf16": {"bf16": {"enabled": True}},
    }
    config = {
        "train_batch_size": 1,
        "gradient_clipping": max_norm or 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **kind[precision],
    }
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    seen = []
    for slope in slopes:
        before = engine.module.weight.detach().float().clone()
        inputs = torch.ones(1, 2, dtype=engine.module.weight.dtype)
        engine.backward(engine(inputs).float().sum() * slope)
        engine.step()
        after = engine.module.weight.detach().float()
        scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        seen.append(
            {
                "move": (before - after).mean().item(),
                "lost": int(after.isnan().sum()),
                "scale": scaler.get_scale() if scaler else None,
                "rate": scheduler.get_last_lr()[0],
            }
        )
    torch.distributed.destroy_process_group()
    return seen


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    print("\n" + json.dumps(main(**json.loads(sys.argv[1]))))
