"""Code to paste: the training loop with torch.amp, and with ampwise.Engine."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ampwise.tune.advise.advice import KeptPart
from ampwise.tune.advise.choice import PrecisionChoice

DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.bfloat16", "auto": "dtype"}
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"

NATIVE_BF16 = """\
if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
    raise SystemExit("this GPU emulates BF16: use FP16 with a GradScaler")"""
CHOSEN = """\
native = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
dtype = torch.bfloat16 if native else torch.float16
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)"""
IN_FP8 = """\
def fits(module, name):
    linear = isinstance(module, torch.nn.Linear)
    return linear and name != "lm_head" and module.in_features % 16 == 0 and module.out_features % 16 == 0


convert_to_float8_training(model, module_filter_fn=fits)
model = torch.compile(model)  # without it FP8 is slower than BF16"""
SCALED = f"""\
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # before the clip
    {CLIP}
    scaler.step(optimizer)  # skipped if a gradient is inf or NaN
    scaler.update()
    optimizer.zero_grad(set_to_none=True)"""
UNSCALED = f"""\
    loss.backward()
    norm = {CLIP}
    if torch.isfinite(norm):  # keep NaN out of the weights; this syncs, Engine does not
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)"""
ENGINE_LOOP = """\
for x, y in engine.batches(loader):
    engine.step(lambda x, y: criterion(model(x), y), x.to(device), y.to(device))"""


def snippets(
    choice: PrecisionChoice, precision: str, kept: Iterable[KeptPart], switches: Iterable[str]
) -> tuple[str, str]:
    """Return the loop with torch.amp, and with ampwise.Engine.

    ``model``, ``optimizer``, ``criterion`` and ``loader`` are the user's.
    """
    kind, fp8 = choice.target.kind, precision == "fp8"
    device = f'device = "{kind}"' if kind else 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    imports = ["from torchao.float8 import convert_to_float8_training"] if fp8 else []
    engine_precision = "bf16" if fp8 else precision  # converted layers run in FP8 by themselves
    names = ", ".join(json.dumps(pattern) for part in kept for pattern in part.patterns)
    policy = f'ampwise.Policy("{engine_precision}").keep("fp32", {names})' if names else ""
    converted = [*(["", "", IN_FP8] if fp8 else []), *switches]

    lines = ["import torch", *(["", "import ampwise"] if policy else []), *imports, "", device, "model.to(device)"]
    lines += [*converted, *([f"{policy}.apply(model)"] if policy else [])]
    if precision == "auto":
        lines.append(CHOSEN)
    elif precision == "fp16":
        lines.append("scaler = torch.amp.GradScaler(device)  # starts at 65536, adjusts itself")
    elif precision in ("bf16", "fp8") and kind != "cpu":
        lines.append(NATIVE_BF16)
    lines += ["", "for x, y in loader:", "    x, y = x.to(device), y.to(device)"]
    if precision in DTYPES:
        lines.append(
            f"    with torch.autocast(device, dtype={DTYPES[precision]}):\n        loss = criterion(model(x), y)"
        )
    else:
        lines.append("    loss = criterion(model(x), y)")
    lines.append(SCALED if precision in ("fp16", "auto") else UNSCALED)

    given = "policy" if policy else f'"{engine_precision}"'
    engine = [device, *converted, *([f"policy = {policy}"] if policy else [])]
    engine += [f"engine = ampwise.Engine(model.to(device), optimizer, {given}, clip_norm=1.0)", ENGINE_LOOP]
    needs_torch = ["import torch", ""] if any("torch." in line for line in engine) else []
    with_engine = [*needs_torch, "import ampwise", *imports, "", *engine]
    return "\n".join(lines) + "\n", "\n".join(with_engine) + "\n"
