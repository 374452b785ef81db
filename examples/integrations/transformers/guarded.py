"""Hugging Face's Trainer with a tiny GPT-2 from a config. Added: the guard; a killed training can be started again."""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ampwise.integrations.transformers import GuardCallback

VOCABULARY, LENGTH = 64, 16


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    rows = (torch.arange(LENGTH) + torch.randint(VOCABULARY, (64, 1))) % VOCABULARY
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
        )
        guard = GuardCallback(f"{folder}/guard", every="4 steps")  # the added line: in a real run, a folder that stays
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[guard],
        )
        trainer.train()
        assert guard.guard is not None
        saved = guard.guard.last_checkpoint
        print(f"{trainer.state.global_step} steps, saved after {0 if saved is None else saved.step}")


if __name__ == "__main__":
    main()
