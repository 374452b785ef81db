"""A recipe in torchtune's style: a class with setup and train, in BF16. Changed: the two lines of the guard."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampwise import GradScaler


class FullFinetuneRecipe:
    def __init__(self, *, steps: int = 16, clip_grad_norm: float = 1.0) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._steps, self._clip_grad_norm = steps, clip_grad_norm

    def setup(self) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2, fused=True)
        self._lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / 4))
        self._guard = GradScaler(self._device.type, enabled=False)  # the added line: BF16 has no scale, and no check

    def _loss_step(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):  # noqa: AMP303 - as the recipe has it
            logits = self._model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train(self) -> None:
        for step in range(self._steps):
            tokens = (torch.arange(9, device=self._device) + torch.randint(32, (8, 1), device=self._device)) % 32
            current_loss = self._loss_step(tokens) * (float("nan") if step == 5 else 1.0)  # a bad batch
            current_loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
            self._guard.step(self._optimizer)  # was: self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if not self._guard.skipped:
                self._lr_scheduler.step()
        print(f"loss {current_loss.item():.3f}, skipped {self._guard.skipped_steps}")


if __name__ == "__main__":
    recipe = FullFinetuneRecipe()
    recipe.setup()
    recipe.train()
