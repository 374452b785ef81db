"""Hugging Face's Trainer with our callback: a tiny model from a local config, nothing downloaded."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ampwise.integrations.accelerate import fix  # noqa: E402
from ampwise.integrations.transformers import AmpwiseCallback  # noqa: E402

CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 8,
    "vocab_size": 16,
    "n_positions": 8,
}
LIMIT = 1e-3  # far below the norm of any gradient here


class Kept(transformers.TrainerCallback):
    """Stands where report_to's callbacks stand: before ours."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **given):
        self.rows.append(dict(logs))

    def all_of(self, name):
        return [row[name] for row in self.rows if name in row]


def trainer_of(tmp_path, *callbacks, model=None, **options):
    torch.manual_seed(0)
    model = model or transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(16, (8, 8))]
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    settings |= {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": LIMIT,
    } | options
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), **settings)
    evaluated = data if "eval_strategy" in options else None
    return transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks)
    )


def quiet(*args, **options):
    return AmpwiseCallback(*args, **{"every": 1, "timing": False, "quiet": True} | options)


@pytest.fixture(autouse=True)
def _alone():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_gradients_are_seen_before_they_are_clipped_and_logged_once(tmp_path):
    kept, ours = Kept(), quiet()
    trainer = trainer_of(tmp_path, kept, ours)
    trainer.train()
    norms = [row.norm.mean for row in ours.run.steps]
    assert norms == pytest.approx(kept.all_of("grad_norm"), rel=1e-4)
    assert all(norm > 10 * LIMIT for norm in norms)
    assert kept.all_of("ampwise/skipped") == [0.0] * 3
    assert not {"ampwise/loss", "ampwise/lr", "ampwise/grad_norm"} & {name for row in kept.rows for name in row}
    history = [row for row in trainer.state.log_history if "ampwise/skipped" in row]
    assert [row["step"] for row in history] == [1, 2, 3]


def test_report_to_gets_our_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trainer_of(tmp_path, quiet(), report_to="tensorboard")
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder)).Reload()
    names = [name for name in events.Tags()["scalars"] if "ampwise/skipped" in name]
    assert len(names) == 1
    assert [event.step for event in events.Scalars(names[0])] == [1, 2, 3]


def test_evaluation_is_left_alone(tmp_path):
    kept = Kept()
    trainer = trainer_of(tmp_path, kept, quiet(), eval_strategy="steps", eval_steps=1, logging_steps=3)
    trainer.train()
    of_evaluation = [row for row in kept.rows if "eval_loss" in row]
    assert len(of_evaluation) == 3
    assert not any(name.startswith("ampwise/") for row in of_evaluation for name in row)
    assert len(kept.all_of("ampwise/skipped")) == 1


def test_evaluation_by_another_prefix_is_left_alone_too(tmp_path):
    class Tests(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            trainer.evaluate(metric_key_prefix="test")

    kept = Kept()
    trainer = trainer_of(tmp_path, kept, quiet(), Tests(), eval_strategy="no", logging_steps=3)
    trainer.train()
    of_evaluation = [row for row in kept.rows if "test_loss" in row]
    assert len(of_evaluation) == 3
    assert not any(name.startswith("ampwise/") for row in of_evaluation for name in row)
    assert len(kept.all_of("ampwise/skipped")) == 1


class Overflows(torch.nn.Module):
    """The gradient of the second batch is NaN."""

    def __init__(self):
        super().__init__()
        self.layer, self.batches = torch.nn.Linear(8, 1), 0

    def forward(self, input_ids, labels):
        self.batches += 1
        slope = math.nan if self.batches == 2 else 1.0
        return {"loss": (self.layer(input_ids / 1024) * slope).mean()}


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_skip_is_reported_and_with_a_fixed_accelerator_the_rate_waits(tmp_path, is_mended):
    kept = Kept()
    model = Overflows()
    trainer = trainer_of(tmp_path, kept, quiet(), model=model, optim="adamw_torch_fused", max_steps=4, fp16=True)
    if is_mended:
        fix(trainer.accelerator)
    trainer.train()
    rates = kept.all_of("learning_rate")
    if is_mended:
        assert kept.all_of("ampwise/skipped") == [1.0, 1.0, 0.0, 0.0]  # a scale of 65536 is too much for the first
        assert rates[0] == rates[1] == rates[2] > rates[3]
        assert bool(model.layer.weight.isfinite().all())
    else:
        assert not bool(model.layer.weight.isfinite().all())  # as it goes without


def test_findings_are_said_and_the_trainer_is_as_it_was(tmp_path, capsys):
    before = transformers.Trainer.log, torch.autograd.backward
    ours = AmpwiseCallback(timing=False)
    trainer_of(tmp_path, ours, model=Overflows()).train()
    assert before == (transformers.Trainer.log, torch.autograd.backward)
    found = {seen.finding.rule.code for seen in ours.run.findings}
    said = capsys.readouterr().err
    assert found
    assert any(code in said for code in found)


def test_a_training_that_died_is_ended_by_the_next(tmp_path):
    class Dies(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            raise ZeroDivisionError

    before, log = torch.autograd.backward, transformers.Trainer.log
    ours = quiet(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, ours, Dies()).train()
    assert ours.run is None
    another = quiet()
    trainer_of(tmp_path, another).train()
    assert torch.autograd.backward is before
    assert transformers.Trainer.log is log
    assert ours.run.status == "failed"
    assert another.run.status == "finished"
    assert [len(each.run.steps) for each in (ours, another)] == [1, 3]
