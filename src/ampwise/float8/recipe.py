"""How FP8 layers get their scales, and who computes them: what was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ampwise.errors import BadInput, UnknownName

__all__ = ["BACKENDS", "MEASURED", "RECIPES", "Fp8", "fp8_from"]

OURS, TORCHAO, TRANSFORMER_ENGINE = "ampwise", "torchao", "transformer-engine"

# By recipe, those who have it, the default first.
RECIPES: dict[str, tuple[str, ...]] = {
    "current": (OURS, TRANSFORMER_ENGINE),
    "delayed": (OURS, TRANSFORMER_ENGINE),
    "tensorwise": (TORCHAO,),
    "rowwise": (TORCHAO,),
    "rowwise+hp-weight-grad": (TORCHAO,),
}
MEASURED = "measured"  # whichever of them is fastest for a layer, or BF16
DELAYED, OF_DELAYED = "delayed", ("history", "margin", "update")  # and its parameters
BY_ROW = ("rowwise", "rowwise+hp-weight-grad")  # a scale for each row, and all in E4M3
BACKENDS = tuple(dict.fromkeys(backend for backends in RECIPES.values() for backend in backends))
GRADIENTS = ("e5m2", "e4m3")
UPDATES = ("max", "last")
LONGEST = 1024  # steps of history
MOST_MARGIN = 16  # powers of two; E5M2 has 32 of them


@dataclass(frozen=True, slots=True)
class Fp8:
    """How the FP8 layers of a model are scaled: a recipe, and its parameters.

    recipe: ``"current"`` takes the largest magnitude of each tensor as it is now; ``"delayed"`` goes by those of past
        steps, which saves a read; ``"tensorwise"``, ``"rowwise"`` and ``"rowwise+hp-weight-grad"`` are torchao's;
        ``"measured"`` times them for each layer and takes what is faster than BF16.
    backend: ``"ampwise"``, ``"torchao"`` or ``"transformer-engine"``; by itself, the first that has the recipe.
    gradients: the format of gradients, ``"e5m2"`` for its range or ``"e4m3"`` for its precision; ampwise's layers only.
    history, margin, update: of ``"delayed"``: how many steps count, how many powers of two are left free above them,
        and whether their largest magnitude decides (``"max"``) or the last (``"last"``).
    wide, narrow: globs of module names that stay in BF16, and of those that become FP8 though they are the first, the
        last, a router or small; with all that is inside of them.

    >>> Fp8("delayed", history=32).made_by, Fp8("rowwise").made_by
    ('ampwise', 'torchao')
    """

    recipe: str = "current"
    backend: str | None = None
    gradients: str = "e5m2"
    history: int = 16
    margin: int = 0
    update: str = "max"
    wide: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_recipe(self.recipe)
        _check_backend(self.recipe, self.backend)
        _check_one_of("gradients", self.gradients, GRADIENTS)
        _check_one_of("update", self.update, UPDATES)
        _check_range("history", self.history, 1, LONGEST, "steps")
        _check_range("margin", self.margin, 0, MOST_MARGIN, "powers of two")
        _check_patterns("wide", self.wide)
        _check_patterns("narrow", self.narrow)
        if self.gradients != GRADIENTS[0] and self.made_by not in (OURS, None):
            raise BadInput(
                f"Fp8({self.recipe!r}, gradients={self.gradients!r}): the recipes of {self.made_by} have their own "
                "format for gradients. Leave it out, or use 'current' or 'delayed' by ampwise."
            )
        _check_of_delayed(self)

    @property
    def made_by(self) -> str | None:
        """The backend; None where it is measured, by whoever is there."""
        return self.backend or (None if self.recipe == MEASURED else RECIPES[self.recipe][0])

    def by(self, recipe: str) -> Fp8:
        """The same by one of the recipes that are measured, where its backend has these parameters."""
        backend = self.backend or RECIPES[recipe][0]
        gradients = self.gradients if backend == OURS else GRADIENTS[0]
        of_delayed = {name: getattr(self, name) for name in OF_DELAYED} if recipe == DELAYED else {}
        return Fp8(recipe, backend, gradients, **of_delayed)

    @property
    def gradient_format(self) -> str:
        """What gradients are cast to; torchao's recipes by row have their own."""
        return "e4m3" if self.recipe in BY_ROW else self.gradients


def fp8_from(asked: Any) -> Fp8:
    """What ``Engine(fp8=...)`` was given."""
    if asked is None:
        return Fp8()
    if isinstance(asked, Fp8):
        return asked
    if isinstance(asked, str):
        return Fp8(asked)
    raise BadInput(f"Engine(fp8={asked!r}): a recipe by name, {_listed()}, or ampwise.Fp8(...) is expected.")


def _check_recipe(recipe: object) -> None:
    if not isinstance(recipe, str):
        raise BadInput(f"Fp8({recipe!r}): a recipe is expected by name: {_listed()}.")
    if recipe not in RECIPES and recipe != MEASURED:
        raise UnknownName("FP8 recipe", recipe, (*RECIPES, MEASURED), listing=f"The recipes are {_listed()}.")


def _check_backend(recipe: str, backend: object) -> None:
    if backend is None:
        return
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise UnknownName("FP8 backend", str(backend), BACKENDS, listing=f"The backends are {', '.join(BACKENDS)}.")
    if recipe != MEASURED and backend not in RECIPES[recipe]:
        has = ", ".join(repr(name) for name, backends in RECIPES.items() if backend in backends)
        raise BadInput(
            f"Fp8({recipe!r}, backend={backend!r}): {backend} has {has}. "
            f"{recipe!r} is there by {' or '.join(RECIPES[recipe])}."
        )


def _check_of_delayed(fp8: Fp8) -> None:
    """Parameters that nothing would go by."""
    if fp8.recipe == DELAYED or (fp8.recipe == MEASURED and fp8.made_by in (None, *RECIPES[DELAYED])):
        return
    defaults = {field.name: field.default for field in fields(fp8)}
    given = {name: getattr(fp8, name) for name in OF_DELAYED if getattr(fp8, name) != defaults[name]}
    if given:
        backend = f", backend={fp8.backend!r}" if fp8.recipe == MEASURED else ""
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise BadInput(
            f"Fp8({fp8.recipe!r}{backend}, {shown}): {', '.join(OF_DELAYED[:-1])} and {OF_DELAYED[-1]} are those of "
            f"{DELAYED!r} scaling. Leave them out, or use Fp8({DELAYED!r}, {shown})."
        )


def _check_one_of(name: str, value: object, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise BadInput(f"Fp8({name}={value!r}): it is {' or '.join(map(repr, possible))}.")


def _check_range(name: str, value: object, least: int, most: int, unit: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadInput(f"Fp8({name}={value!r}): a whole number from {least} to {most} is expected, of {unit}.")


def _check_patterns(name: str, patterns: object) -> None:
    if not isinstance(patterns, tuple) or not all(isinstance(each, str) and each for each in patterns):
        raise BadInput(f'Fp8({name}={patterns!r}): a tuple of names or globs of modules is expected: ("*.router",).')


def _listed() -> str:
    return ", ".join(repr(name) for name in (*RECIPES, MEASURED))
