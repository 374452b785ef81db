"""A training loop around the scaler: Accelerate's, Lightning's and Fabric's, with torch's scaler and ours; DeepSpeed's.

The first three want a GPU for FP16 and are given a scaler for the CPU in the way each has for it; what runs is their
own loop. All but DeepSpeed, which has deepspeed_step.py, train a linear layer of weights 1, whose gradient is the
input.
"""

import json
import logging
import math
import subprocess
import sys
from functools import cache, partial

import torch
from torch.nn.utils import clip_grad_norm_

from .registry import HERE, Case, Outcome
from .step_peers import SCALE, scaler_of, shown

BAD = (1.0, math.nan)


def layer_of():
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    return layer


def weights_of(layer):
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


# One step of each loop on one input: (layer, scheduler, scaler) after it.


def plain_step(contender, data, make, *, max_norm=None, precision="fp16"):
    """The loop of torch's documentation, written with what the contender's scaler offers."""
    layer, scaler = layer_of(), scaler_of(contender, enabled=precision == "fp16")
    optimizer = make(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with torch.autocast("cpu", torch.float16 if precision == "fp16" else torch.bfloat16):
        loss = layer(torch.tensor([data])).sum()
    scaler.scale(loss).backward()
    if contender == "ampwise" and max_norm:
        scaler.clip_(optimizer, max_norm)
    elif max_norm:
        scaler.unscale_(optimizer)
        clip_grad_norm_(layer.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    if contender == "ampwise" and not scaler.skipped:
        scheduler.step()
    return layer, scheduler, scaler


def accelerator_of(contender, precision="fp16", **options):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    if precision == "fp16":  # what it does itself on a GPU
        accelerator.scaler, accelerator.native_amp = scaler_of(contender), True
    return accelerator


def accelerate_step(contender, data, make, *, max_norm=None, precision="fp16"):
    accelerator, layer = accelerator_of(contender, precision), layer_of()
    optimizer = make(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    layer, optimizer, scheduler = accelerator.prepare(layer, optimizer, scheduler)
    accelerator.backward(layer(torch.tensor([data])).sum())
    if max_norm:
        accelerator.clip_grad_norm_(layer.parameters(), max_norm)
    optimizer.step()
    scheduler.step()
    return layer, scheduler, accelerator.scaler


@cache
def lightning():
    """Lightning, quiet, and a module that trains one layer."""
    import pytorch_lightning

    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(pytorch_lightning.LightningModule):
        def __init__(self, make, decay=0.5):
            super().__init__()
            self.layer, self.make, self.decay = layer_of(), make, decay

        def training_step(self, batch, index):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            optimizer = self.make(self.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, self.decay)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return pytorch_lightning, Module


def lightning_trainer(contender, precision="fp16", **options):
    """A quiet Trainer, and the scaler in it."""
    library, _ = lightning()
    from pytorch_lightning.plugins.precision import MixedPrecision

    name, scaler = ("16-mixed", scaler_of(contender)) if precision == "fp16" else ("bf16-mixed", None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    plugins = [MixedPrecision(name, "cpu", scaler)]
    return library.Trainer(accelerator="cpu", devices=1, plugins=plugins, **quiet, **options), scaler


def lightning_step(contender, data, make, *, max_norm=None, precision="fp16"):
    from torch.utils.data import DataLoader

    trainer, scaler = lightning_trainer(contender, precision, max_steps=1, gradient_clip_val=max_norm)
    module = lightning()[1](make)
    trainer.fit(module, DataLoader([torch.tensor(data)], batch_size=1))
    return module.layer, trainer.lr_scheduler_configs[0].scheduler, scaler


def fabric_of(contender, precision="fp16"):
    """Fabric on a CPU, and the scaler in it. Asked for 16-mixed there by name, it would train in BF16 and warn."""
    lightning()
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision

    name, scaler = ("16-mixed", scaler_of(contender)) if precision == "fp16" else ("bf16-mixed", None)
    return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision(name, "cpu", scaler)]), scaler


def fabric_step(contender, data, make, *, max_norm=None, precision="fp16"):
    fabric, scaler = fabric_of(contender, precision)
    layer = layer_of()
    optimizer = make(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    layer, optimizer = fabric.setup(layer, optimizer)
    fabric.backward(layer(torch.tensor([data])).sum())
    if max_norm:
        fabric.clip_gradients(layer, optimizer, max_norm=max_norm)
    optimizer.step()
    scheduler.step()
    return layer, scheduler, scaler


LOOPS = {
    "ampwise": plain_step,
    "torch": plain_step,
    "accelerate": accelerate_step,
    "lightning": lightning_step,
    "fabric": fabric_step,
}
PLUGGED = ("accelerate + ampwise", "lightning + ampwise")


def train_step(contender, *args, **options):
    return LOOPS[contender.partition(" + ")[0]](contender, *args, **options)


@cache
def deepspeed_steps(**job):
    """What there was to see after each step; see deepspeed_step.py."""
    command = [sys.executable, "-W", "ignore", str(HERE / "deepspeed_step.py"), json.dumps(job)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr.strip().rpartition("\n")[2]
    return json.loads(answer.stdout.strip().rpartition("\n")[2])


def deepspeed_fp16(stage):
    """A good step and one that overflows, by ZeRO's stage. The gradient's norm is 0.02, far below the limit."""
    return deepspeed_steps(stage=stage, precision="fp16", max_norm=1.0, slopes=(0.01, math.nan))


def adamw(parameters, fused=True):
    return torch.optim.AdamW(parameters, lr=1.0, fused=fused)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


SCHEDULER = Case(
    "scheduler-waits-for-skipped-step",
    title="The learning rate waits when a step is skipped",
    why="A scheduler that runs ahead of the optimizer ends the warm-up early and shortens the run; a first step that "
    "overflows is normal in FP16.",
)


@SCHEDULER.by("ampwise")
def scheduler_waits_in_engine(contender):
    from ampwise import Engine

    rates = {}
    for name, fused in (("not fused", False), ("fused", True)):
        layer = layer_of()
        optimizer = adamw(layer.parameters(), fused=fused)
        engine = Engine(layer, optimizer, "fp16", scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        engine.step(lambda data, layer=layer: layer(data).sum(), torch.tensor([BAD]))
        assert torch.equal(weights_of(layer), torch.ones(3)), "the step was to be skipped"
        rates[name] = 1.0, engine.lr
    return who_waits(rates)


@SCHEDULER.by("accelerate", "lightning", *PLUGGED)
def scheduler_waits(contender):
    rates = {}
    for name, fused in (("not fused", False), ("fused", True)):
        layer, scheduler, _ = train_step(contender, BAD, partial(adamw, fused=fused))
        assert torch.equal(weights_of(layer), torch.ones(3)), "the step was to be skipped"
        rates[name] = 1.0, *scheduler.get_last_lr()
    return who_waits(rates)


@SCHEDULER.by("deepspeed")
def scheduler_waits_in_deepspeed(contender):
    return who_waits({f"ZeRO-{stage}": [step["rate"] for step in deepspeed_fp16(stage)] for stage in (0, 1)})


def who_waits(rates):
    """From the learning rates before and after the skipped step."""
    waits = {name: before == after for name, (before, after) in rates.items()}
    words = {name: "it waits" if wait else "it goes on" for name, wait in waits.items()}
    alike = len(set(words.values())) == 1
    seen = next(iter(words.values())) if alike else "; ".join(f"{name}: {word}" for name, word in words.items())
    return Outcome(all(waits.values()), seen)


SCALE_FALLS = Case(
    "overflow-lowers-the-scale",
    title="The scale falls after an overflow",
    why="A scale that is too high stays too high unless it is lowered: every step after it is skipped as well.",
)


@SCALE_FALLS.by(*LOOPS, *PLUGGED)
def scale_falls(contender):
    *_, scaler = train_step(contender, BAD, fused_sgd)
    return fall(SCALE, scaler.get_scale())


@SCALE_FALLS.by("deepspeed")
def scale_falls_in_deepspeed(contender):
    return fall(*[step["scale"] for step in deepspeed_fp16(stage=1)], "ZeRO-1 with `torch_autocast`: ")


def fall(before, after, where=""):
    right = after == before / 2
    return Outcome(right, f"{where}from {before:g} to {after:g}" if after != before else f"{where}it stays {before:g}")


SMALL_GRADIENTS = Case(
    "clipping-leaves-small-gradients",
    title="FP16 with clipping, gradients below the limit",
    why="A gradient below the limit must not be changed; if the limit is compared with gradients that are still "
    "scaled, every step is clipped.",
)


@SMALL_GRADIENTS.by(*LOOPS, *PLUGGED)
def small_gradients(contender):
    layer, *_ = train_step(contender, (1.0, 1.0), sgd, max_norm=10.0)
    return left_alone(1.0 - weights_of(layer).mean().item())


@SMALL_GRADIENTS.by("deepspeed")
def small_gradients_in_deepspeed(contender):
    good, _ = deepspeed_fp16(stage=1)
    return left_alone(good["move"] / 0.01, "ZeRO-1 with `torch_autocast`: ")


def left_alone(share, where=""):
    right = math.isclose(share, 1.0, rel_tol=1e-3)  # FP16
    return Outcome(right, f"{where}the step is {'taken in full' if right else f'{share:.2g} of what it should be'}")


FUSED_CLIP = Case(
    "fp16-fused-and-clipped",
    title="FP16, a fused optimizer and clipping together",
    why="The fastest optimizer and the most common safeguard: nearly every large run uses both.",
)
BF16_FUSED_CLIP = Case(
    "bf16-fused-and-clipped",
    title="BF16, a fused optimizer and clipping together",
    why="The same without a scale: nothing has to be unscaled, so both should work.",
)


@FUSED_CLIP.by(*LOOPS, *PLUGGED)
def fused_clip(contender):
    return clipped_step(contender, "fp16")


@BF16_FUSED_CLIP.by(*LOOPS)
def bf16_fused_clip(contender):
    return clipped_step(contender, "bf16")


def clipped_step(contender, precision):
    """The gradient is (2, 2, 1), of norm 3."""
    layer, *_ = train_step(contender, (2.0, 2.0), fused_sgd, max_norm=1.5, precision=precision)
    right = torch.allclose(weights_of(layer), torch.tensor([0.0, 0.0, 0.5]), atol=1e-5)
    return Outcome(right, "clipped and applied" if right else f"weights become {shown(weights_of(layer))}")


TWO_CLIPPED = Case(
    "two-optimizers-clipped-together",
    title="Two optimizers, clipped together, then stepped",
    why="Generator and discriminator, actor and critic: each gradient must be divided by the scale exactly once.",
)
TWO_CLIPPED_APART = Case(
    "two-optimizers-clipped-apart",
    title="Two optimizers, each clipped on its own, then stepped",
    why="The usual way if the two need different limits.",
)


@TWO_CLIPPED.by("ampwise", "torch", "accelerate", "accelerate + ampwise")
def two_clipped(contender):
    return two_optimizers(contender, apart=False)


@TWO_CLIPPED_APART.by("ampwise", "torch", "accelerate", "accelerate + ampwise")
def two_clipped_apart(contender):
    return two_optimizers(contender, apart=True)


def two_optimizers(contender, apart):
    """Gradients are all 1 and the limit is far above their norm, so every weight must go from 1 to 0."""
    layers = [layer_of(), layer_of()]
    if contender in ("ampwise", "torch"):
        two_plain_steps(contender, layers, apart)
    else:
        two_accelerate_steps(contender, layers, apart)
    moves = [1.0 - weights_of(layer).mean().item() for layer in layers]
    right = all(math.isclose(move, 1.0, rel_tol=1e-5) for move in moves)
    seen = "both move as they should" if right else f"the first moves by {moves[0]:.3g}, the second by {moves[1]:.3g}"
    return Outcome(right, seen if right else f"{seen} (right: 1 and 1)")


def two_plain_steps(contender, layers, apart):
    scaler = scaler_of(contender)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
    scaler.scale(sum(layer(torch.ones(1, 2)).sum() for layer in layers)).backward()
    groups = [[optimizer] for optimizer in optimizers] if apart else [optimizers]
    if contender == "torch":
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    for group in groups:
        if contender == "ampwise":
            scaler.clip_(group, 100.0)
        else:
            clip_grad_norm_([p for optimizer in group for p in optimizer.param_groups[0]["params"]], 100.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def two_accelerate_steps(contender, layers, apart):
    accelerator = accelerator_of(contender)
    optimizers = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in layers]
    layers = [accelerator.prepare(layer) for layer in layers]
    accelerator.backward(sum(layer(torch.ones(1, 2)).sum() for layer in layers))
    for group in [[layer] for layer in layers] if apart else [layers]:
        accelerator.clip_grad_norm_([p for layer in group for p in layer.parameters()], 100.0)
    for optimizer in optimizers:
        optimizer.step()


BF16_BAD = Case(
    "bf16-nan-gradient",
    title="BF16, one gradient is NaN",
    why="BF16 needs no scale, so the scaler is off, and with it the only check: after one bad batch the weight is "
    "lost.",
)
BF16_BAD_CLIPPED = Case(
    "bf16-nan-gradient-clipped",
    title="BF16, one gradient is NaN, with clipping",
    why="The norm is NaN too, and clipping multiplies every gradient by it: all weights are lost, not one.",
)


@BF16_BAD.by(*LOOPS)
def bf16_bad(contender):
    return bf16_step(contender, max_norm=None)


@BF16_BAD_CLIPPED.by(*LOOPS)
def bf16_bad_clipped(contender):
    return bf16_step(contender, max_norm=1.0)


def bf16_step(contender, max_norm):
    layer, *_ = train_step(contender, BAD, sgd, max_norm=max_norm, precision="bf16")
    weights = weights_of(layer)
    return none_lost(int(weights.isnan().sum()), weights.numel(), torch.equal(weights, torch.ones(3)))


def none_lost(lost, among, kept):
    if lost:
        return Outcome(False, f"{lost} of {among} weights become NaN")
    return Outcome(kept, "the step is skipped, the weights stay as they were" if kept else "the step is applied")


@BF16_BAD_CLIPPED.by("deepspeed")
def bf16_bad_in_deepspeed(contender):
    (seen,) = deepspeed_steps(stage=1, precision="bf16", max_norm=1.0, slopes=(math.nan,))
    return none_lost(seen["lost"], 4, seen["move"] == 0.0)
