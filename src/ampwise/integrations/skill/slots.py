"""What can stand in the prose: formats with their limits, codes, commands, torch's loss scale, engine precisions."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.cli import verbs
from ampwise.cli.formats import number
from ampwise.formats import FORMATS
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.rules import built_in
from ampwise.tune.advise.advice import LossScale

__all__ = ["slots"]


def slots() -> dict[str, str]:
    """Each slot with what fills it; ValueError where two would have one name."""
    found: dict[str, str] = {}
    for name, text in (*_formats(), *_verbs(), *_rules(), *_scale(), *_engine()):
        if found.setdefault(name, text) != text:
            raise ValueError(f"two slots are called {name}")
    return found


def _engine() -> Iterator[tuple[str, str]]:
    """Precisions beyond autocast's; by their names, since what knows them needs torch."""
    for name, precision in (("fp8", "fp8"), ("pure", "bf16-pure"), ("emulated", "emulate:mxfp8")):
        yield f"engine_{name}", f'`ampwise.Engine(model, optimizer, "{precision}")`'


def _formats() -> Iterator[tuple[str, str]]:
    yield from ((name, name.upper()) for name in COMMON_FORMATS)
    for fmt in FORMATS.values():
        yield fmt.name, fmt.title
        yield f"{fmt.name}_dtype", fmt.torch_dtype or fmt.name
        yield f"{fmt.name}_max", number(fmt.max)
        yield f"{fmt.name}_bits", str(fmt.mantissa_bits + 1)
        yield f"{fmt.name}_normal", number(fmt.smallest_normal)
        if fmt.flush_exponent is not None:
            yield f"{fmt.name}_zero", f"2^{fmt.flush_exponent}"


def _verbs() -> Iterator[tuple[str, str]]:
    return ((f"run_{verb}", f"`ampwise {verb}`") for verb in verbs())


def _rules() -> Iterator[tuple[str, str]]:
    return ((entry.rule.name.replace("-", "_"), entry.rule.code) for entry in built_in())


def _scale() -> Iterator[tuple[str, str]]:
    scale = LossScale()
    yield "scale_start", number(scale.init_scale)
    yield "scale_interval", str(scale.growth_interval)
