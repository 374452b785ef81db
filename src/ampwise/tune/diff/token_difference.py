"""Log-probabilities of the targets on two sides, token by token: what a policy-gradient ratio or a perplexity sees.

They are read from the operations of the step: ``cross_entropy`` and ``nll_loss``, or ``gather`` on log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.tune.diff.tensor_difference import finite_or_none
from ampwise.tune.diff.tensor_store import TensorStore

ROWS = 4096  # tokens whose whole distributions are compared at a time
NORMALISED = 0.05  # how far the sum of probabilities may be from 1, on a logarithmic scale, in 16 bits
ENOUGH = 0.8  # of the RMS difference: a remedy that removes as much helps


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """Differences of log-probabilities, b minus a, over all targets that are not ignored."""

    tokens: int
    mean: float
    rms: float
    largest: float  # by magnitude
    largest_at: int  # which of the tokens, in the order of b
    kl: float  # mean of KL(a‖b) over the whole distributions

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with None for numbers that are not finite."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPolicy:
    """A policy that was tried, and how much of the difference of log-probabilities it removes."""

    policy: str  # as Python
    cost: float  # share of the weights in matmuls that no longer run in 16 bits
    removed: float  # share of the RMS difference, on the compared batch; negative if it is larger
    removed_elsewhere: float  # the same on the held-back batch where it removes least
    batches: int  # held-back ones

    @property
    def helps(self) -> bool:
        return min(self.removed, self.removed_elsewhere) >= ENOUGH

    @property
    def text(self) -> str:
        """The policy, what it removes and what it costs, in a sentence without its end."""
        held = f"at least {self.removed_elsewhere:.0%} on {self.batches} held-back batches"
        cost = "at no matmul's cost" if not self.cost else f"with {self.cost:.1%} of the matmul weights in FP32"
        return f"`{self.policy}` removes {self.removed:.0%} of the RMS ({held}), {cost}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"helps": self.helps}


class Scores(NamedTuple):
    """Log-probabilities of all classes, a row for each token, and the targets; which rows count."""

    log_probs: Tensor
    targets: Tensor
    counted: Tensor


def find_scores(name: str, args: Any) -> Scores | None:
    """Return the log-probabilities that an operation of this name reads for its targets; None for other operations."""
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        log_probs, targets, _, _, ignored = args[:5]
        if log_probs.ndim > 1:
            log_probs = log_probs.movedim(1, -1)
        targets = targets.reshape(-1)
        return Scores(log_probs.reshape(-1, log_probs.shape[-1]), targets, targets != ignored)
    if name == "gather":
        scores, dim, index = args[:3]
        is_last = dim in (-1, scores.ndim - 1) and index.shape == (*scores.shape[:-1], 1)
        # Numbers whose exponentials sum to 1 are log-probabilities, wherever they come from.
        if is_last and scores.is_floating_point() and bool((scores.float().logsumexp(-1).abs() < NORMALISED).all()):
            targets = index.reshape(-1)
            counted = torch.ones_like(targets, dtype=torch.bool)
            return Scores(scores.reshape(-1, scores.shape[-1]), targets, counted)
    return None


class TokenComparison:
    """Keeps the first run's scores, and compares those of a later run with them in the order of their tokens."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._kept: list[tuple[str, Tensor, Tensor]] = []  # key of the log-probabilities, targets, positions that count
        self._begin = [0]  # the first token of each
        self._met = 0  # tokens of the later run
        self._found: list[Tensor] = []  # columns: difference, KL
        self._unlike = False

    def begin(self) -> None:
        """Begin to compare another run."""
        self._met, self._found, self._unlike = 0, [], False

    def keep(self, scores: Scores) -> None:
        """Keep the next scores of the first run."""
        rows = scores.counted.nonzero().squeeze(-1)
        key = f"log-probabilities {len(self._kept)}"
        self._store.put(key, scores.log_probs.detach())
        self._kept.append((key, scores.targets[rows], rows))
        self._begin.append(self._begin[-1] + len(rows))

    def compare(self, scores: Scores) -> None:
        """Compare the next scores of a later run; it may compute them in more calls than the first run did."""
        rows = scores.counted.nonzero().squeeze(-1)
        if not self._met:
            self._follow_order(scores.targets[rows])
        while len(rows) and not self._unlike:
            which = next((i for i, (_, own, _) in enumerate(self._kept) if self._met < self._begin[i] + len(own)), None)
            if which is None:
                self._unlike = True
                return
            key, targets, own_rows = self._kept[which]
            at = self._met - self._begin[which]
            many = min(len(rows), len(targets) - at, ROWS)
            now, mine = rows[:many], own_rows[at : at + many]
            theirs, log_probs = self._store[key], scores.log_probs
            device, wanted = log_probs.device, targets[at : at + many].to(log_probs.device)
            if theirs.shape[-1] != log_probs.shape[-1] or not torch.equal(scores.targets[now], wanted):
                self._unlike = True
                return
            a = theirs[mine.to(theirs.device)].to(device).double()
            b = log_probs[now].detach().double()
            chosen = (b - a).gather(-1, wanted[:, None]).squeeze(-1)
            # A class that is impossible on both sides adds nothing.
            each = torch.where(a.isneginf() & b.isneginf(), torch.zeros_like(a), a.exp() * (a - b))
            self._found.append(torch.stack([chosen, each.sum(-1)]))
            self._met, rows = self._met + many, rows[many:]

    def _follow_order(self, first: Tensor) -> None:
        """Reorder what is kept if the later run goes position by position through all rows, as decoding does."""
        if len(self._kept) != 1 or not len(first):
            return
        key, targets, rows = self._kept[0]
        steps, left = divmod(len(targets), len(first))
        if left or steps == 1 or torch.equal(targets[: len(first)].to(first.device), first):
            return
        order = torch.arange(len(targets), device=targets.device).view(len(first), steps).T.reshape(-1)
        self._kept[0] = key, targets[order], rows[order]

    def settled(self) -> TokenDifference | None:
        """Return the differences; None if a run had other tokens, or none."""
        if self._unlike or not self._found or self._met != self._begin[-1]:
            return None
        chosen, kl = torch.cat([each.cpu() for each in self._found], dim=1)
        at = int(chosen.abs().nan_to_num(math.inf).argmax())
        return TokenDifference(
            tokens=len(chosen),
            mean=float(chosen.mean()),
            rms=float(chosen.square().mean().sqrt()),
            largest=float(chosen[at]),
            largest_at=at,
            kl=max(0.0, float(kl.mean())),
        )
