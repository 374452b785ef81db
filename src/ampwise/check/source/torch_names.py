"""Names of torch and its libraries that matter to mixed precision, and how to recognise them.

A constructor determines what an object is; if none is known, its name does (``lr_scheduler``), and the walker
requires that the object is also used as one.
"""

from __future__ import annotations

import functools
import re

from ampwise.check.source.lazy_pattern import LazyPattern

SCALER, OPTIMIZER, SCHEDULER, MODEL = "scaler", "optimizer", "scheduler", "model"
FP16, BF16, FP32 = "float16", "bfloat16", "float32"

# Qualified name -> its device; None: the first argument is the device.
GRAD_SCALERS = {
    "torch.cuda.amp.GradScaler": "cuda",
    "torch.cuda.amp.grad_scaler.GradScaler": "cuda",
    "torch.cpu.amp.GradScaler": "cpu",
    "torch.cpu.amp.grad_scaler.GradScaler": "cpu",
    "torch.amp.GradScaler": None,
    "torch.amp.grad_scaler.GradScaler": None,
    "torch.GradScaler": None,
    "ampwise.GradScaler": None,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": None,
    "fairscale.optim.grad_scaler.ShardedGradScaler": None,
    "fairscale.optim.grad_scaler.GradScaler": None,
}
AUTOCASTS = {
    "torch.autocast": None,
    "torch.amp.autocast": None,
    "torch.amp.autocast_mode.autocast": None,
    "torch.cuda.amp.autocast": "cuda",
    "torch.cuda.amp.autocast_mode.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
    "torch.cpu.amp.autocast_mode.autocast": "cpu",
}
DTYPES = {
    "torch.float16": FP16,
    "torch.half": FP16,
    "torch.bfloat16": BF16,
    "torch.float32": FP32,
    "torch.float": FP32,
    "torch.float64": "float64",
    "torch.double": "float64",
}
# How options and configurations spell them.
SPELLINGS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "bf16-mixed"), BF16),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half", "16-mixed", "fp16-mixed"), FP16),
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float", "32"), FP32),
}
CLIPS = frozenset(("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value", "clip_grads_with_norm_"))

# A file without one of these words has nothing that is certainly FP16.
SAYS_FP16 = (
    *("float16", "cuda.amp", "autocast()", 'autocast("cuda', "autocast('cuda", ".half(", "torch.half"),
    *('device_type="cuda', "device_type='cuda"),
)

# Packages that do the training step themselves: they scale, unscale and skip. With each, the names whose use means
# that: an import of `set_seed` or of a fused optimizer does not. Without names, every use does.
_LIGHTNING = ("LightningModule", "LightningDataModule", "Trainer", "Fabric", "LightningLite", "LightningCLI")
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "accelerate": ("Accelerator",),
    **dict.fromkeys(("pytorch_lightning", "lightning", "lightning_fabric"), _LIGHTNING),
    "deepspeed": ("initialize", "DeepSpeedEngine", "runtime"),
    "apex": ("amp", "fp16_utils", "FP16_Optimizer"),
    "mmcv": ("runner", "Runner", "EpochBasedRunner", "IterBasedRunner", "OptimizerHook"),
    "mmengine": ("runner", "Runner", "FlexibleRunner", "optim", "OptimWrapper", "AmpOptimWrapper"),
    "ignite": ("create_supervised_trainer",),
    "keras": ("Model", "Sequential", "models", "layers"),
    **dict.fromkeys(("fastai", "composer", "colossalai", "megatron", "catalyst"), ()),
}

OPTIMIZER_CLASS = LazyPattern(
    r"(^|\.)(optim|optimizers?|bitsandbytes|bnb)\.(?!swa_utils)|(Adam\w*|SGD\w*|RMSprop|Adagrad|Adadelta|LAMB|Lamb|LARS|Lars|Lion|"
    r"Adafactor|RAdam|Ranger\w*|NovoGrad|MADGRAD|Sophia\w*|Shampoo|SAM|Muon|\w*Optimizer)$"
)
SCHEDULER_CLASS = LazyPattern(
    r"lr_scheduler\.|(\w*Scheduler|\w*LR|CosineAnnealing\w*|ReduceLROnPlateau|get_\w*schedule\w*|get_\w*scheduler|"
    r"\w*schedule_with_warmup)$"
)
OPTIMIZER_MAKER = LazyPattern(r"(^|_)(optim(izer)?s?|optim_factory)($|_)")
SCHEDULER_MAKER = LazyPattern(r"sched(uler)?s?($|_)|lr_sched")

SCALER_NAME = LazyPattern(r"scaler(s|_\w+|\d+)?$|(^|_)(amp|fp16|grad|loss)_?scaler|loss_scaling$", re.IGNORECASE)
SCHEDULER_NAME = LazyPattern(
    r"sched|shedul|schdr|lr_?sch|(^|_)sch(_|\d|$)|lr_decay|lr_policy|warm_?up|(^|_)lrs$|annealer", re.IGNORECASE
)
OPTIMIZER_NAME = LazyPattern(r"optim|(^|_)opti?s?(_|\d|$)|^opt[A-Z]\w?$|^(sgd|adamw?)$|(^|_)solver$", re.IGNORECASE)
FLAG_NAME = LazyPattern(r"^(use|using|has|is|with|save|enable|should)_", re.IGNORECASE)  # use_scaler, save_optimizer
MODEL_NAME = LazyPattern(
    r"(^|_)(model|net|network|unet|vae|gpt|bert|vit|resnet|backbone|encoder|decoder|generator|discriminator|critic|"
    r"classifier|(p|dp|sub|base)model|transformer|student|teacher|ddp|engine|gen|disc|actor|policy|net[dg])\w{0,2}(_|\d|$)",
    re.IGNORECASE,
)
NOT_A_GRAD_SCALER = LazyPattern(r"(Standard|MinMax|Robust|MaxAbs|Label|Feature|Data|Input|Target)Scaler$|sklearn")


@functools.lru_cache(maxsize=4096)
def role_of_constructor(qualified: str) -> str | None:
    """Return what ``qualified(...)`` makes: a scaler, an optimizer, a scheduler, or None for anything else."""
    last = qualified.rpartition(".")[2]
    if qualified in GRAD_SCALERS:
        return SCALER
    if SCHEDULER_CLASS.search(qualified) or SCHEDULER_MAKER.search(last):
        return SCHEDULER
    if OPTIMIZER_CLASS.search(qualified) or OPTIMIZER_MAKER.search(last):
        return OPTIMIZER
    return None


@functools.lru_cache(maxsize=4096)
def role_of_name(name: str) -> str | None:
    """Return the role of an object by the last part of its name alone.

    >>> [role_of_name(name) for name in ("lr_scheduler", "optimizer_D", "self.grad_scaler", "opt", "image")]
    ['scheduler', 'optimizer', 'scaler', 'optimizer', None]
    """
    last = name.rpartition(".")[2].partition("[")[0].lstrip("_")
    if FLAG_NAME.search(last):
        return None
    if SCHEDULER_NAME.search(last):
        return SCHEDULER
    if SCALER_NAME.search(last):
        return SCALER
    if OPTIMIZER_NAME.search(last):
        return OPTIMIZER
    return None
