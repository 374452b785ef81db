"""What is known of a model before it runs: its size, its kind, and the parts of it that 16 bits may hurt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ampwise.errors import BadInput

__all__ = ["KINDS", "ModelFacts", "Part", "count_text", "listed", "parse_count"]

# The kinds of model that there is something to say about, and what is meant by each.
KINDS: dict[str, str] = {
    "transformer": "attention over tokens: GPT, BERT, ViT",
    "moe": "a transformer with experts and a router",
    "cnn": "convolutions: ResNet, EfficientNet, U-Net",
    "diffusion": "a network that takes noise away, with a schedule of time steps",
    "rnn": "LSTM, GRU",
    "gan": "a generator against a discriminator",
    "contrastive": "embeddings compared with a temperature: CLIP, SimCLR",
    "scorer": "scores of opposed heads that are subtracted",
    "mlp": "linear layers, and little else",
}
SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST = 10**14  # parameters: above it somebody has mistyped
# How much more, or less, matrix work a parameter does than one of a transformer: a convolution uses its weights at
# every position, a recurrent layer in small products that wait for each other, an expert now and then.
WORK: dict[str, float] = {"cnn": 5.0, "diffusion": 5.0, "rnn": 0.2, "moe": 0.25}
SMALL = 10_000_000  # of such work: below it launches take longer than products


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that 16 bits may hurt: what it is, and the modules that are it."""

    kind: str  # "router", "norm", "batch norm", "norm by hand", "softmax", "logits", "loss", "temperature", …
    modules: tuple[str, ...]  # their names; of a temperature, the parameters'
    classes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # globs that match these modules and no other


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model; what is not known is None."""

    parameters: int | None = None
    kind: str | None = None
    guessed: bool = False  # the kind, from the modules
    name: str | None = None  # as the user calls it: "train:make"
    parts: tuple[Part, ...] = ()

    @property
    def read(self) -> bool:
        """Whether its modules were looked at."""
        return self.name is not None

    @property
    def work(self) -> float | None:
        """Parameters, weighed by how much matrix work each does in a model of this kind."""
        return None if self.parameters is None else self.parameters * WORK.get(self.kind or "", 1.0)

    @property
    def small(self) -> bool | None:
        """Whether it is too small for 16 bits to gain much by; None when its size is not known."""
        return None if self.work is None else self.work < SMALL

    def part(self, kind: str) -> Part | None:
        return next((part for part in self.parts if part.kind == kind), None)

    @property
    def title(self) -> str:
        """Such as "a transformer of 7 B parameters"."""
        kind = f"{'an' if self.kind in ('rnn', 'mlp') else 'a'} {_shown(self.kind)}" if self.kind else "a model"
        return kind if self.parameters is None else f"{kind} of {count_text(self.parameters)} parameters"


def parse_count(text: str, said: str = "params") -> int:
    """A number of parameters as people write it.

    >>> parse_count("7B"), parse_count("124M"), parse_count("1.3e9"), parse_count("25_600_000")
    (7000000000, 124000000, 1300000000, 25600000)
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", text.strip().lower())
    count = float(re.sub("[_,]", "", match[1])) * SIZES[match[2]] if match else 0.0
    if match is None or not 1 <= count <= MOST or abs(count - round(count)) > 1e-6:
        raise BadInput(f"{said} {text[:80]!r}: a number of parameters is expected, such as 124M, 7B or 1.3e9.")
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


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _shown(kind: str) -> str:
    return {"moe": "mixture of experts", "cnn": "CNN", "rnn": "RNN", "gan": "GAN", "mlp": "MLP"}.get(kind, kind)
