"""Values of the slots in the prose: formats with their limits, codes, commands, torch's loss scale, precisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.numbers.formats import FORMATS, short_number
from ampwise.rules import built_in_rules
from ampwise.tune.advise.advice import LossScale

__all__ = ["slots"]


def slots(commands: Iterable[str]) -> dict[str, str]:
    """Return the text of each slot; ValueError if two have the same name."""
    found: dict[str, str] = {}
    for name, text in (*_formats(), *_commands(commands), *_rules(), *_scale(), *_engine()):
        if found.setdefault(name, text) != text:
            raise ValueError(f"two slots are called {name}")
    return found


def _engine() -> Iterator[tuple[str, str]]:
    """Yield the precisions beyond autocast's; listed by name here, since importing the engine needs torch."""
    for name, precision in (("fp8", "fp8"), ("pure", "bf16-pure"), ("emulated", "emulate:mxfp8")):
        yield f"engine_{name}", f'`ampwise.Engine(model, optimizer, "{precision}")`'


def _formats() -> Iterator[tuple[str, str]]:
    yield from ((name, name.upper()) for name in COMMON_FORMATS)
    for fmt in FORMATS.values():
        yield fmt.name, fmt.title
        yield f"{fmt.name}_dtype", fmt.torch_dtype or fmt.name
        yield f"{fmt.name}_max", short_number(fmt.max)
        yield f"{fmt.name}_bits", str(fmt.mantissa_bits + 1)
        yield f"{fmt.name}_normal", short_number(fmt.smallest_normal)
        if fmt.flush_exponent is not None:
            yield f"{fmt.name}_zero", f"2^{fmt.flush_exponent}"


def _commands(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((f"run_{name}", f"`ampwise {name}`") for name in names)


def _rules() -> Iterator[tuple[str, str]]:
    return ((rule.name.replace("-", "_"), rule.code) for rule in built_in_rules())


def _scale() -> Iterator[tuple[str, str]]:
    scale = LossScale()
    yield "scale_start", short_number(scale.init_scale)
    yield "scale_interval", str(scale.growth_interval)
