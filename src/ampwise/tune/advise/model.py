"""Facts about a model before it runs: size, kind, and the parts that 16-bit precision may harm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from ampwise.errors import BadInput
from ampwise.hardware.target import gib_text
from ampwise.numbers.number_text import count_text

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
TITLES = {
    None: "a model",
    "moe": "a mixture of experts",
    "cnn": "a CNN",
    "rnn": "an RNN",
    "gan": "a GAN",
    "mlp": "an MLP",
}
SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST = 10**14  # parameters: more is surely a typo
# Matmul work per parameter relative to a transformer: a convolution uses its weights at every position, a recurrent
# layer in small sequential matmuls, an expert only now and then.
WORK: dict[str, float] = {"cnn": 5.0, "diffusion": 5.0, "rnn": 0.2, "moe": 0.25}
BYTES_A_PARAMETER = 16  # FP32 weight 4, gradient 4, Adam's two moments 8
SMALL = 10_000_000  # of such work: below it, launches take longer than matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A part of a model that 16-bit precision may harm, and the modules that belong to it."""

    kind: str  # "router", "norm", "batch norm", "norm by hand", "softmax", "logits", "loss", "temperature", …
    modules: tuple[str, ...]  # module names; parameter names for a temperature
    classes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # globs that match these modules and no other

    @property
    def listed(self) -> str:
        """The first three modules, and how many more there are."""
        more = f" and {len(self.modules) - 3} more" if len(self.modules) > 3 else ""
        return ", ".join(self.modules[:3]) + more


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
    def size(self) -> str:
        """Text such as "7 B"; empty if the number of parameters is unknown."""
        return "" if self.parameters is None else count_text(self.parameters)

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients and Adam's moments, under autocast as in FP32; None if the size is unknown."""
        return None if self.parameters is None else BYTES_A_PARAMETER * self.parameters

    @property
    def state(self) -> str:
        """Text such as "104 GiB"; empty if the size is unknown."""
        return "" if self.state_bytes is None else gib_text(self.state_bytes)

    @property
    def title(self) -> str:
        """Text such as "a transformer of 7 B parameters"."""
        kind = TITLES.get(self.kind, f"a {self.kind}")
        return kind if self.parameters is None else f"{kind} of {self.size} parameters"


def parse_count(text: str | float) -> int:
    """Parse a number of parameters.

    >>> parse_count("7B"), parse_count("124M"), parse_count("1.3e9"), parse_count("25_600_000")
    (7000000000, 124000000, 1300000000, 25600000)
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", str(text).strip().lower())
    count = Decimal(re.sub("[_,]", "", match[1])) * SIZES[match[2]] if match else Decimal(0)
    if not 1 <= count <= MOST or count != int(count):
        raise BadInput(f"--params {str(text)[:80]}: expected a number of parameters, such as 124M, 7B or 1.3e9.")
    return int(count)
