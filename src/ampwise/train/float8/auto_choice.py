"""``Fp8("auto")``: choose which matmuls of each layer run in FP8, by their times and by their errors."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ampwise.numbers.census.algebra import Census
from ampwise.train.float8.matmul_choices import MatmulChoice
from ampwise.train.float8.operand_census import WHOLE
from ampwise.train.float8.recipe import MATMULS
from ampwise.train.float8.recipe_timing import LayerTimes, fastest_recipe

__all__ = ["DECIDE_AFTER", "choose_matmuls", "has_errors"]

# Steps. In the second, memory holds the optimizer's state, as later: if a step that measures does not fit, it shows at
# once. Nothing is compiled before it.
DECIDE_AFTER = (1, 2, 100, 1_000, 10_000)
# Ways in which like blocks may differ. Four decisions are followed by compiled steps: 8 variants at most, which is
# torch.compile's limit for one function.
MOST_VARIANTS = 2
OPERANDS = {"forward": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "input")}
MENTIONED = 0.01  # share of an operand's values that become zero

Errors = Sequence[float | None]  # by matmul; None: it did not run
Samples = Mapping[tuple[str, str], Census]


def has_errors(errors: Iterable[Errors]) -> bool:
    """Return whether no error is NaN or infinite, as in a step that is skipped."""
    return all(error is None or math.isfinite(error) for layer in errors for error in layer)


def choose_matmuls(
    times: Mapping[str, LayerTimes],
    errors: Mapping[str, Errors],
    limit: float,
    samples: Mapping[str, Samples] | None = None,
) -> dict[str, MatmulChoice]:
    """Choose for each layer by name: the fastest of its matmuls with an error within the limit, if faster than BF16.

    Like blocks get few different choices: if there are more, all but the most frequent one have only the matmuls that
    each of them may have.
    """
    within = {name: _within(errors[name], limit) for name in times}
    chosen = {name: _fastest(layer, within[name]) for name, layer in times.items()}
    alike: dict[str, dict[str, dict[str, str]]] = {}  # layers by kind of block, block, and name within it
    for name in times:
        kind, block, rest = _in_block(name)
        alike.setdefault(kind, {}).setdefault(block, {})[rest] = name
    for blocks in alike.values():
        variants = {
            block: tuple((rest, chosen[name][0]) for rest, name in sorted(layers.items()))
            for block, layers in blocks.items()
        }
        counts = Counter(variants.values())
        if len(counts) <= MOST_VARIANTS:
            continue
        common = counts.most_common(1)[0][0]
        others = [layers for block, layers in blocks.items() if variants[block] != common]
        for rest in {rest for layers in others for rest in layers}:
            names = [layers[rest] for layers in others if rest in layers]
            shared = tuple(each for each in MATMULS if all(each in within[name] for name in names))
            chosen.update((name, _fastest(times[name], shared)) for name in names)
    found = {}
    for name, (matmuls, gain, timing) in chosen.items():
        over = [(each, error) for each, error in zip(MATMULS, errors[name], strict=True) if error is not None]
        excluded = tuple(each for each, error in over if error > limit)
        found[name] = MatmulChoice(
            name=name,
            matmuls=matmuls,
            errors=tuple(errors[name]),
            gain=gain,
            timing=timing,
            excluded=excluded,
            lost=_lost(excluded, (samples or {}).get(name, {})),
        )
    return found


def _within(errors: Errors, limit: float) -> tuple[str, ...]:
    return tuple(each for each, error in zip(MATMULS, errors, strict=True) if error is not None and error <= limit)


def _fastest(layer: LayerTimes, within: tuple[str, ...]) -> tuple[tuple[str, ...], float | None, str]:
    """Return the fastest of these matmuls in FP8, how much faster the layer is with it, and the times."""
    named = {name: _matmuls_of(name) for name in layer.times if name != "bf16"}
    allowed = {name: each for name, each in layer.times.items() if name == "bf16" or set(named[name]) <= set(within)}
    if layer.trouble:
        return (), None, layer.trouble
    if not within:
        return (), None, f"no matmul to choose from, {layer.shape}"
    found = fastest_recipe(allowed, layer.shape)
    medians = {name: statistics.median(each) for name, each in allowed.items()}
    best = found.recipe or min((name for name in allowed if name != "bf16"), key=medians.__getitem__, default=None)
    gain = None if best is None or "bf16" not in medians else medians["bf16"] / medians[best]
    return (named[found.recipe] if found.recipe else ()), gain, found.why


def _matmuls_of(name: str) -> tuple[str, ...]:
    """Return the matmuls that ``Fp8.short`` names."""
    _, _, given = name.partition(" ")
    return tuple(given.split("+")) if given else MATMULS


def _in_block(name: str) -> tuple[str, str, str]:
    """Return the kind of a layer's outermost block, the block, and the layer's name in it.

    >>> _in_block("encoder.layers.3.mlp.up")
    ('encoder.layers.#', 'encoder.layers.3', 'mlp.up')
    """
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return name, name, ""
    return ".".join([*parts[:place], "#"]), ".".join(parts[: place + 1]), ".".join(parts[place + 1 :])


def _lost(excluded: Sequence[str], sample: Samples) -> str:
    """Say which operand of the excluded matmuls loses most values to zero, if it loses many."""
    shares = {}
    for operand in {operand for each in excluded for operand in OPERANDS[each]}:
        counted = sample.get((operand, WHOLE))
        if counted is not None and counted.finite and counted.nonzeros:
            shares[operand] = counted
    flushed = {operand: _flushed_share(counted, operand) for operand, counted in shares.items()}
    worst = max(flushed, key=flushed.__getitem__, default=None)
    if worst is None or flushed[worst] < MENTIONED:
        return ""
    return f"{flushed[worst]:.0%} of the {worst}'s values become zero"


def _flushed_share(counted: Census, operand: str) -> float:
    """Return the share of values that become zero with current scales; gradients as if in E5M2, the wider one."""
    fmt, top = ("e5m2", 57344.0) if operand == "gradient" else ("e4m3", 448.0)
    scale = math.floor(math.log2(top / counted.amax))
    return float(counted.flushed(fmt, scale) / counted.nonzeros)
