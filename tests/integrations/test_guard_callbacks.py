"""What the guards of Lightning and the Trainer refuse, and their counters. The faults are in tests/faults."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise import Ladder
from ampwise.errors import BadInput

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def fit(directory, bad=(), **options):
    """A fit of two epochs of eight batches; the module notes the place of each, and validations."""
    pl = pytest.importorskip("pytorch_lightning")
    from ampwise.integrations.lightning import GuardCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.places = nn.Linear(4, 1), []

        def training_step(self, batch, index):
            self.places.append((self.current_epoch, index))
            factor = math.nan if len(self.places) - 1 in bad else 1.0
            return self.net(batch[0]).square().mean() * factor

        def validation_step(self, batch, index):
            self.places.append("validation")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    guard, module = GuardCallback(directory, snapshot_every=2, ladder=Ladder(skips=1, healthy=2)), Module()
    loader = DataLoader(TensorDataset(torch.ones(32, 4)), 4)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, callbacks=[guard], **QUIET, **options)
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.ones(2, 4)), 2))
    return trainer, guard.guard, module.places


@pytest.mark.parametrize("option", [{"limit_train_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}])
def test_lightnings_options_that_would_lose_the_place_are_refused(tmp_path, option):
    with pytest.raises(BadInput, match=rf"GuardCallback does not work with {next(iter(option))}\."):
        fit(tmp_path, **option)


def test_the_last_batch_of_a_fit_may_be_gone_back_from(tmp_path):
    trainer, guard, places = fit(tmp_path, bad=(16,))
    assert guard.passed_over == [(1, 7)]
    assert trainer.global_step == guard.number == 15
    assert trainer.current_epoch == 2
    repeated = places[places.index((1, 7)) + 1 :]
    assert repeated[-1] == "validation", "the epoch has its end, although its last batch was left out"
    assert all(epoch == 1 for epoch, _ in repeated[:-2])


def test_the_trainer_refuses_windows_that_a_rollback_would_cut_anew(tmp_path):
    transformers = pytest.importorskip("transformers")
    from ampwise.integrations.transformers import GuardCallback

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=3, use_cpu=True, report_to="none", disable_tqdm=True
    )
    rows = [{"x": torch.ones(4)}] * 64  # eight batches
    guard = GuardCallback(tmp_path / "guard")
    trainer = transformers.Trainer(nn.Linear(4, 1), args, train_dataset=rows, callbacks=[guard])
    with pytest.raises(BadInput, match=r"8 batches is not a multiple of gradient_accumulation_steps=3"):
        trainer.train()
    assert not (tmp_path / "guard").exists()


def test_a_loader_that_accelerate_has_prepared_is_gone_back_in():
    """It has state_dict, which raises unless the loader within has one, too."""
    accelerate = pytest.importorskip("accelerate")
    from ampwise.guard.data_position import ResumableData

    loader = DataLoader(TensorDataset(torch.arange(12)), 4, shuffle=True)
    data = ResumableData(accelerate.Accelerator(cpu=True).prepare(loader))
    batches = iter(data)
    next(batches)
    place = data.position()
    rest = [batch[0].tolist() for batch in batches]
    data.go_to(place)
    assert [batch[0].tolist() for batch in data] == rest
