"""Code to paste: the training loop with torch.amp, and with ampwise.Engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.tune.advise.advice import KeptPart
from ampwise.tune.advise.around import switches
from ampwise.tune.advise.keeping import patterns_of

__all__ = ["by_hand", "with_engine"]

DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.bfloat16", "auto": "dtype"}
IN_ENGINE = {"fp8": "bf16"}  # converted layers run in FP8 by themselves, all else in BF16
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


def by_hand(choice: PrecisionChoice, precision: str, kept: Sequence[KeptPart]) -> str:
    """A loop with torch.amp; ``model``, ``optimizer``, ``criterion`` and ``loader`` are the user's."""
    return "\n".join(_by_hand(choice, precision, patterns_of(tuple(kept)))) + "\n"


def with_engine(choice: PrecisionChoice, precision: str, kept: Sequence[KeptPart]) -> str:
    """Return the loop with ampwise.Engine."""
    name = IN_ENGINE.get(precision, precision)
    policy = _policy(name, patterns_of(tuple(kept)))
    lines = [_device(choice), *_fp8(precision), *_switches(choice, precision)]
    lines += [f"policy = {policy}"] if policy else []
    given = "policy" if policy else f'"{name}"'
    lines.append(f"engine = ampwise.Engine(model.to(device), optimizer, {given}, clip_norm=1.0)")
    lines += ENGINE_LOOP.splitlines()
    needs_torch = ["import torch", ""] if any("torch." in line for line in lines) else []
    return "\n".join([*needs_torch, "import ampwise", *_fp8_import(precision), "", *lines]) + "\n"


def _by_hand(choice: PrecisionChoice, precision: str, patterns: tuple[str, ...]) -> Iterator[str]:
    policy = _policy(IN_ENGINE.get(precision, precision), patterns)
    yield "import torch"
    yield from ("", "import ampwise") if policy else ()
    yield from _fp8_import(precision)
    yield ""
    yield _device(choice)
    yield "model.to(device)"
    yield from _fp8(precision)
    yield from _switches(choice, precision)
    yield from (f"{policy}.apply(model)",) if policy else ()
    yield from _before_the_loop(choice, precision)
    yield ""
    yield "for x, y in loader:"
    yield "    x, y = x.to(device), y.to(device)"
    if precision in DTYPES:
        yield f"    with torch.autocast(device, dtype={DTYPES[precision]}):"
        yield "        loss = criterion(model(x), y)"
    else:
        yield "    loss = criterion(model(x), y)"
    yield from (SCALED if precision in ("fp16", "auto") else UNSCALED).splitlines()


def _before_the_loop(choice: PrecisionChoice, precision: str) -> Iterator[str]:
    if precision == "auto":
        yield from CHOSEN.splitlines()
    elif precision == "fp16":
        yield "scaler = torch.amp.GradScaler(device)  # starts at 65536, adjusts itself"
    elif precision in ("bf16", "fp8") and choice.target.kind != "cpu":
        yield from NATIVE_BF16.splitlines()


def _device(choice: PrecisionChoice) -> str:
    kind = choice.target.kind
    if kind is None:
        return 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    return f'device = "{kind}"'


def _switches(choice: PrecisionChoice, precision: str) -> tuple[str, ...]:
    return switches(choice, precision).lines


def _fp8_import(precision: str) -> tuple[str, ...]:
    return ("from torchao.float8 import convert_to_float8_training",) if precision == "fp8" else ()


def _fp8(precision: str) -> tuple[str, ...]:
    return ("", "", *IN_FP8.splitlines()) if precision == "fp8" else ()


def _policy(precision: str, patterns: tuple[str, ...]) -> str:
    """A policy that keeps these in FP32; empty where there are none."""
    names = ", ".join(json.dumps(pattern) for pattern in patterns)
    return f'ampwise.Policy("{precision}").keep("fp32", {names})' if patterns else ""
