"""``Fp8``: how FP8 layers are scaled, and by which backend they run."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ampwise.errors import BadInput, UnknownName
from ampwise.finding.terminal import shortened

__all__ = ["AUTO", "BACKENDS", "BLOCK_RECIPE", "MATMULS", "MEASURED", "RECIPES", "Fp8"]

OURS, TORCHAO, TRANSFORMER_ENGINE = "ampwise", "torchao", "transformer-engine"

# The backends of each recipe, the default first.
RECIPES: dict[str, tuple[str, ...]] = {
    "current": (OURS, TRANSFORMER_ENGINE),
    "delayed": (OURS, TRANSFORMER_ENGINE),
    "block": (OURS,),
    "tensorwise": (TORCHAO,),
    "rowwise": (TORCHAO,),
    "rowwise+hp-weight-grad": (TORCHAO,),
}
MATMULS = ("forward", "dgrad", "wgrad")  # of a linear layer: its output, the gradients of its input and its weight
MEASURED = "measured"  # the fastest of them for each layer, or BF16
AUTO = "auto"  # for each layer the fastest of current's matmuls whose errors are within the limit
ERROR_LIMIT = 0.1  # rounding alone gives 0.04 in the forward pass, and 0.06 with gradients in E5M2
DELAYED, OF_DELAYED = "delayed", ("history", "margin", "update")  # and its parameters
BY_ROW = ("rowwise", "rowwise+hp-weight-grad")  # one scale per row
BLOCK_RECIPE = "block"  # one scale per 128 values of a row, and of weights per 128 × 128
ALL_E4M3 = (*BY_ROW, BLOCK_RECIPE)  # gradients too
BACKENDS = tuple(dict.fromkeys(backend for backends in RECIPES.values() for backend in backends))
GRADIENTS = ("e5m2", "e4m3")
UPDATES = ("max", "last")
LONGEST = 1024  # steps of history
MOST_MARGIN = 16  # powers of two; E5M2 has 32 of them


@dataclass(frozen=True, slots=True)
class Fp8:
    """How the FP8 layers of a model are scaled: a recipe and its parameters.

    Args:
        recipe: ``"current"`` scales by the largest magnitude of each tensor now; ``"delayed"`` by those of past steps,
            which saves a read; ``"block"`` by that of each block now, of 128 values of an activation or gradient and of
            128 × 128 of a weight, with all in E4M3; ``"tensorwise"``, ``"rowwise"`` and ``"rowwise+hp-weight-grad"``
            are torchao's; ``"measured"`` times them for each layer and takes the fastest, if it is faster than BF16;
            ``"auto"`` decides for each matmul of a layer, by its time and its error.
        backend: ``"ampwise"``, ``"torchao"`` or ``"transformer-engine"``; by default, the first that has the recipe.
        gradients: the format of gradients, ``"e5m2"`` for its range or ``"e4m3"`` for its precision; ampwise's
            ``"current"`` and ``"delayed"`` only.
        history, margin, update: parameters of ``"delayed"``: the number of past steps, the number of powers of two left
            free above their magnitudes, and whether the largest (``"max"``) or the last (``"last"``) of them counts.
        matmuls: which of a layer's matmuls are in FP8: ``"forward"``, ``"dgrad"`` (the gradient of the input) and
            ``"wgrad"`` (of the weight). The others are in BF16. ampwise's ``"current"`` only.
        limit: for ``"auto"``: the largest relative error of a matmul in FP8, against BF16.
        wide, narrow: globs of module names that stay in BF16, and of modules that run in FP8 although they are the
            first, the last, a router or small. A glob includes all submodules.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.
        UnknownName: no such recipe or backend.

    >>> Fp8("delayed", history=32).made_by, Fp8("rowwise").made_by
    ('ampwise', 'torchao')
    """

    recipe: str = "current"
    backend: str | None = None
    gradients: str = "e5m2"
    history: int = 16
    margin: int = 0
    update: str = "max"
    matmuls: tuple[str, ...] = MATMULS
    limit: float = ERROR_LIMIT
    wide: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_recipe(self.recipe, self.backend)
        for name, possible in (("gradients", GRADIENTS), ("update", UPDATES)):
            if getattr(self, name) not in possible:
                raise BadInput(f"Fp8({name}={getattr(self, name)!r}): expected {' or '.join(map(repr, possible))}.")
        for name, least, most, unit in (("history", 1, LONGEST, "steps"), ("margin", 0, MOST_MARGIN, "powers of two")):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise BadInput(f"Fp8({name}={value!r}): expected a whole number of {unit}, from {least} to {most}.")
        for name in ("wide", "narrow"):
            patterns = getattr(self, name)
            if not isinstance(patterns, tuple) or not all(isinstance(each, str) and each for each in patterns):
                raise BadInput(
                    f'Fp8({name}={patterns!r}): expected a tuple of names or globs of modules: ("*.router",).'
                )
        if self.gradients != GRADIENTS[0] and self.made_by not in (OURS, None):
            raise BadInput(
                f"Fp8({self.recipe!r}, gradients={self.gradients!r}): the recipes of {self.made_by} set the format of "
                "gradients themselves. Remove gradients=..., or use ampwise's 'current' or 'delayed'."
            )
        _check_delayed(self)
        _check_matmuls(self)
        if isinstance(self.limit, bool) or not isinstance(self.limit, int | float) or not 0 < self.limit < 1:
            raise BadInput(
                f"Fp8(limit={self.limit!r}): expected a relative error between 0 and 1, such as {ERROR_LIMIT}."
            )
        if self.limit != ERROR_LIMIT and self.recipe != AUTO:
            raise BadInput(f"Fp8({self.recipe!r}, limit={self.limit!r}): only 'auto' measures errors. Remove limit=...")

    def __repr__(self) -> str:
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return shortened(
            f"Fp8({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"
        )

    @property
    def made_by(self) -> str | None:
        """The backend; None for "measured" without one, which times all that are available."""
        if self.recipe == MEASURED:
            return self.backend
        return OURS if self.recipe == AUTO else self.backend or RECIPES[self.recipe][0]

    def by(self, recipe: str, matmuls: tuple[str, ...] = MATMULS) -> Fp8:
        """Return these settings for one of the recipes that are timed, as far as its backend has them.

        Args:
            recipe: its name.
            matmuls: those in FP8.

        Returns:
            the settings.
        """
        backend = self.backend or RECIPES[recipe][0]
        gradients = self.gradients if backend == OURS else GRADIENTS[0]
        of_delayed = {name: getattr(self, name) for name in OF_DELAYED} if recipe == DELAYED else {}
        return Fp8(recipe, backend, gradients, **of_delayed, matmuls=matmuls)

    @property
    def short(self) -> str:
        """The recipe's name, and its matmuls if not all are in FP8."""
        return self.recipe if self.matmuls == MATMULS else f"{self.recipe} {'+'.join(self.matmuls)}"

    @property
    def gradient_format(self) -> str:
        """Format that gradients are cast to; recipes that are all in E4M3 set it themselves."""
        return "e4m3" if self.recipe in ALL_E4M3 else self.gradients


def _check_recipe(recipe: object, backend: object) -> None:
    if not isinstance(recipe, str):
        raise BadInput(f"Fp8({recipe!r}): expected the name of a recipe: {_listed()}.")
    if recipe not in (*RECIPES, MEASURED, AUTO):
        raise UnknownName("FP8 recipe", recipe, (*RECIPES, MEASURED, AUTO), listing=f"The recipes are {_listed()}.")
    if backend is None:
        return
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise UnknownName("FP8 backend", str(backend), BACKENDS, listing=f"The backends are {', '.join(BACKENDS)}.")
    if recipe == AUTO:
        if backend != OURS:
            raise BadInput(f"Fp8('auto', backend={backend!r}): 'auto' is for ampwise's own layers. Remove backend=...")
    elif recipe != MEASURED and backend not in RECIPES[recipe]:
        has = ", ".join(repr(name) for name, backends in RECIPES.items() if backend in backends)
        raise BadInput(
            f"Fp8({recipe!r}, backend={backend!r}): {backend} has {has}. "
            f"{recipe!r} is available from {' or '.join(RECIPES[recipe])}."
        )


def _check_delayed(fp8: Fp8) -> None:
    """Raise for parameters of "delayed" that the recipe would not use."""
    if fp8.recipe == DELAYED or (fp8.recipe == MEASURED and fp8.made_by in (None, *RECIPES[DELAYED])):
        return
    defaults = {field.name: field.default for field in fields(fp8)}
    given = {name: getattr(fp8, name) for name in OF_DELAYED if getattr(fp8, name) != defaults[name]}
    if given:
        backend = f", backend={fp8.backend!r}" if fp8.recipe == MEASURED else ""
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise BadInput(
            f"Fp8({fp8.recipe!r}{backend}, {shown}): {', '.join(OF_DELAYED[:-1])} and {OF_DELAYED[-1]} are only for "
            f"{DELAYED!r} scaling. Remove them, or use Fp8({DELAYED!r}, {shown})."
        )


def _check_matmuls(fp8: Fp8) -> None:
    given = fp8.matmuls
    if not isinstance(given, tuple) or not given or given != tuple(each for each in MATMULS if each in given):
        raise BadInput(f"Fp8(matmuls={given!r}): expected some of {MATMULS!r}, as a tuple in this order.")
    if given != MATMULS and (fp8.recipe, fp8.made_by) != ("current", OURS):
        raise BadInput(
            f"Fp8({fp8.recipe!r}, matmuls={given!r}): only ampwise's 'current' has matmuls in BF16. Remove "
            f"matmuls=..., or use Fp8('current', matmuls={given!r})."
        )


def _listed() -> str:
    return ", ".join(repr(name) for name in (*RECIPES, MEASURED, AUTO))
