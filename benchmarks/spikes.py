"""Loss spike detection: false alarms in healthy runs, and which injected spikes are detected.

Healthy: three small models, each with its own kind of noise, trained from several seeds with a warm-up and drops of
the learning rate. Every spike reported for these is a false alarm. Injected: the same losses, with a few steps
multiplied by a factor, once a run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.watch.spikes import SETTLED, SpikeDetector
from benchmarks.gpt import GPT, Shape
from benchmarks.harness import Result, note

STEPS = 2000
SEEDS = 5
WARM_UP = 150  # steps
DROPS = (0.5, 0.8)  # of the way, where the learning rate falls to a fifth
FACTORS = (2, 5, 20)
LENGTHS = (1, 10)  # steps
PLACES = 6  # for each planted spike, in each run
WANTED = 1e-4  # false alarms a step, at most
RUNS = (
    "{seeds} runs of {steps:,} steps for each model, AdamW, clipped to 1.0; a warm-up of "
    f"{WARM_UP} steps, and {len(DROPS)} drops of the learning rate to a fifth. Judged as `ampwise run` and the guard "
    "do."
)
PLANTED = (
    "Planted: share of spikes that are told while they last or within three steps. Where a loss varies threefold from "
    "batch to batch, as with heavy tails, a single step at twice the usual is no news and is meant to pass."
)

Losses = list[float]
MakeLoss = Callable[[int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Something to train, whose loss at a step is ``loss(step)``."""

    name: str
    parameters: list[nn.Parameter]
    loss: MakeLoss
    lr: float


# Models


def gpt() -> Model:
    """On text made here: sentences of a small grammar, a character a token."""
    shape = Shape(name="GPT", layers=1, width=16, heads=2, vocabulary=64, length=16, batch=8)
    model, text = GPT(shape), _text(40_000)

    def loss(step: int) -> Tensor:
        starts = torch.randint(len(text) - shape.length - 1, (shape.batch,))
        tokens = torch.stack([text[start : start + shape.length + 1] for start in starts.tolist()])
        return model(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]

    return Model(name="GPT on text", parameters=list(model.parameters()), loss=loss, lr=3e-3)


def _text(length: int) -> Tensor:
    """With rare passages of mere noise in it, as there are in all text."""
    drawn = random.Random(torch.initial_seed())
    words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 8))) for _ in range(200)]
    pieces: list[str] = []
    while sum(map(len, pieces)) < length:
        noise = "".join(drawn.choices("ABCDEFGHIJ0123456789", k=60))
        sentence = " ".join(drawn.choices(words, weights=[1 / (rank + 1) for rank in range(200)], k=8))
        pieces.append(noise if drawn.random() < 0.005 else f"{sentence}. ")
    return torch.tensor([ord(sign) % 64 for sign in "".join(pieces)])


def cnn() -> Model:
    """On made images, with one label in ten wrong."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 10)
    )
    images = torch.randn(10, 1, 8, 8)

    def loss(step: int) -> Tensor:
        labels = torch.randint(10, (32,))
        seen = images[labels] + 0.7 * torch.randn(32, 1, 8, 8)
        labels = torch.where(torch.rand(32) < 0.1, torch.randint(10, (32,)), labels)
        return F.cross_entropy(model(seen), labels)

    return Model(name="CNN, noisy labels", parameters=list(model.parameters()), loss=loss, lr=5e-3)


def regressor() -> Model:
    """On targets with heavy tails, so that single batches are far from the others."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    tails = torch.distributions.StudentT(4.0)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 8)
        y = x[:, :1] * x[:, 1:2] + torch.sin(3 * x[:, 2:3]) + 0.3 * tails.sample((32, 1))
        return F.mse_loss(model(x), y)

    return Model(name="regressor, heavy tails", parameters=list(model.parameters()), loss=loss, lr=2e-3)


def policy() -> Model:
    """A policy learning by its rewards: its loss has either sign, and its noise comes and goes."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
    best = torch.randn(4, 4)

    def loss(step: int) -> Tensor:
        state = torch.randn(32, 4)
        choice = torch.distributions.Categorical(logits=model(state))
        action = choice.sample()
        reward = (state @ best).gather(1, action[:, None])[:, 0] + torch.randn(32)
        taken = choice.log_prob(action) * (reward - reward.mean())
        return -taken.mean() - 0.01 * choice.entropy().mean()  # type: ignore[no-any-return]

    return Model(name="policy gradient", parameters=list(model.parameters()), loss=loss, lr=1e-3)


MODELS: tuple[Callable[[], Model], ...] = (gpt, cnn, regressor, policy)


# Runs


def trained(make: Callable[[], Model], seed: int, steps: int = STEPS) -> Losses:
    """The loss of each step of a healthy run."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters, lr=model.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    losses = []
    for step in range(steps):
        loss = model.loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def rate_at(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * 0.2 ** sum(step >= drop * steps for drop in DROPS)


def told(losses: Sequence[float]) -> list[int]:
    """The steps at which a spike is told."""
    watch = SpikeDetector()
    return [step for step, loss in enumerate(losses) if watch.add(step, loss) is not None]


def is_seen(losses: Sequence[float], at: int, factor: float, length: int) -> bool:
    """Whether a spike planted there is told while it lasts, or in the next few steps."""
    planted = list(losses)
    for step in range(at, at + length):
        # Up by as much as the factor would bring it, for a loss of any sign.
        planted[step] += (factor - 1) * abs(planted[step])
    return any(at <= step < at + length + 3 for step in told(planted))


def places(seed: int, steps: int) -> Iterator[int]:
    drawn = random.Random(seed)
    return (drawn.randrange(2 * SETTLED, steps - 2 * max(LENGTHS)) for _ in range(PLACES))


def seen_share(runs: Sequence[Losses], factor: float, length: int) -> float:
    found = [
        is_seen(losses, at, factor, length) for seed, losses in enumerate(runs) for at in places(seed, len(losses))
    ]
    return statistics.mean(found)


def microseconds_a_step(losses: Sequence[float]) -> float:
    watch = SpikeDetector()
    began = time.thread_time()
    for step, loss in enumerate(losses):
        watch.add(step, loss)
    return (time.thread_time() - began) * 1e6 / len(losses)


def measured(seeds: int = SEEDS, steps: int = STEPS) -> Result:
    result = Result(
        name="spikes",
        title="Spikes of the loss: false alarms in healthy runs, and what is seen of planted ones",
        claim=f"At most one false alarm in {1 / WANTED:,.0f} steps.",
        columns=[
            "model",
            "steps",
            "false alarms",
            *(f"×{f}, {_length(n)}" for n in LENGTHS for f in FACTORS),
            "µs a step",
        ],
    )
    in_all = 0
    for make in MODELS:
        runs = [trained(make, seed, steps) for seed in range(seeds)]
        alarms = sum(len(told(losses)) for losses in runs)
        seen = [f"{seen_share(runs, factor, length):.0%}" for length in LENGTHS for factor in FACTORS]
        in_all += alarms
        cost = statistics.median(map(microseconds_a_step, runs))
        name = make().name
        result.rows.append([name, f"{seeds * steps:,}", f"{alarms}", *seen, cost])
        note(f"{name}: {alarms} false alarms, {seen}")
    result.notes += [_rate(in_all, seeds * steps * len(MODELS)), RUNS.format(seeds=seeds, steps=steps), PLANTED]
    return result


def _rate(alarms: int, steps: int) -> str:
    if alarms:
        return f"In all, {alarms} in {steps:,} steps: one in {steps / alarms:,.0f}."
    return f"In all, none in {steps:,} steps: with 95% confidence fewer than one in {steps / 3:,.0f}."


def _length(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def main() -> None:
    torch.set_num_threads(1)
    measured().publish()


if __name__ == "__main__":
    main()
