"""Facts about a model before it runs: its size, its kind, and the parts that 16-bit precision may harm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ampwise.errors import BadInput

__all__ = ["KINDS", "ModelFacts", "ModelPart", "count_text", "list_names", "parse_count"]

# The kinds of model with specific advice, and what each means.
KINDS: dict[str, str] = {
    "transformer": "attention over tokens: GPT, BERT, ViT",
    "moe": "a transformer with experts and a router",
    "cnn": "convolutions: ResNet, EfficientNet, U-Net",
    "diffusion": "a denoising network with a schedule of time steps",
    "rnn": "LSTM, GRU",
    "gan": "a generator against a discriminator",
    "contrastive": "embeddings compared with a temperature: CLIP, SimCLR",
    "scorer": "scores of opposed heads that are subtracted",
    "mlp": "mostly linear layers",
}
SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST = 10**14  # parameters: more is surely a typo
# Matmul work per parameter relative to a transformer: a convolution uses its weights at every position, a recurrent
# layer in small sequential matmuls, an expert only now and then.
WORK: dict[str, float] = {"cnn": 5.0, "diffusion": 5.0, "rnn": 0.2, "moe": 0.25}
SMALL = 10_000_000  # of such work: below it, launches take longer than matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A part of a model that 16-bit precision may harm, and the modules that belong to it."""

    kind: str  # "router", "norm", "batch norm", "norm by hand", "softmax", "logits", "loss", "temperature", …
    modules: tuple[str, ...]  # module names; parameter names for a temperature
    classes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # globs that match these modules and no other


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model; unknown ones are None."""

    parameters: int | None = None
    kind: str | None = None
    guessed: bool = False  # the kind was inferred from the modules
    name: str | None = None  # as the user calls it: "train:make"
    parts: tuple[ModelPart, ...] = ()

    @property
    def read(self) -> bool:
        """Whether its modules were inspected."""
        return self.name is not None

    @property
    def work(self) -> float | None:
        """Parameters, weighted by the matmul work each does in a model of this kind."""
        return None if self.parameters is None else self.parameters * WORK.get(self.kind or "", 1.0)

    @property
    def small(self) -> bool | None:
        """Whether it is too small to gain much from 16-bit; None if its size is unknown."""
        return None if self.work is None else self.work < SMALL

    def part(self, kind: str) -> ModelPart | None:
        return next((part for part in self.parts if part.kind == kind), None)

    @property
    def title(self) -> str:
        """Text such as "a transformer of 7 B parameters"."""
        kind = f"{'an' if self.kind in ('rnn', 'mlp') else 'a'} {_shown(self.kind)}" if self.kind else "a model"
        return kind if self.parameters is None else f"{kind} of {count_text(self.parameters)} parameters"


def parse_count(text: str, said: str = "params") -> int:
    """Parse a number of parameters.

    >>> parse_count("7B"), parse_count("124M"), parse_count("1.3e9"), parse_count("25_600_000")
    (7000000000, 124000000, 1300000000, 25600000)
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", text.strip().lower())
    count = float(re.sub("[_,]", "", match[1])) * SIZES[match[2]] if match else 0.0
    if match is None or not 1 <= count <= MOST or abs(count - round(count)) > 1e-6:
        raise BadInput(f"{said} {text[:80]!r}: expected a number of parameters, such as 124M, 7B or 1.3e9.")
    return round(count)


def count_text(count: float) -> str:
    """
    >>> count_text(12), count_text(124_000_000), count_text(7_000_000_000), count_text(1_300_000_000)
    ('12', '124 M', '7 B', '1.3 B')
    """
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def list_names(names: Iterable[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are.

    >>> list_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _shown(kind: str) -> str:
    return {"moe": "mixture of experts", "cnn": "CNN", "rnn": "RNN", "gan": "GAN", "mlp": "MLP"}.get(kind, kind)
