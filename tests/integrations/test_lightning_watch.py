"""The callback for Lightning: what it logs, once each; what it finds; and that nothing of it stays behind."""

import logging
import math
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("pytorch_lightning")

from pytorch_lightning.loggers import Logger  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ampwise.errors import BadInput  # noqa: E402
from ampwise.integrations.lightning import Precision, Watch  # noqa: E402
from ampwise.runs.reader import Run  # noqa: E402

QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    name, version = "kept", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def all_of(self, name):
        return [metrics[name] for _, metrics in self.rows if name in metrics]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield


def fit(watch, slopes, module=None, plugins=None, **options):
    logger = Kept()
    plugins = plugins or [Precision("fp16", device="cpu", scaling={"init_scale": 1024.0})]
    batches = [torch.tensor([[float(slope)] * 2]) for slope in slopes]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=plugins, logger=logger, callbacks=[watch], max_epochs=1,
        log_every_n_steps=1, **QUIET, **options,
    )  # fmt: skip
    trainer.fit(module or Module(), DataLoader(batches, batch_size=None))
    return logger


def test_every_number_is_logged_once_a_step_and_unclipped():
    watch = Watch(every=1, timing=False, quiet=True)
    logger = fit(watch, (2, math.inf, 2), gradient_clip_val=1.5)
    assert logger.all_of("ampwise/grad_norm") == pytest.approx([3.0, math.inf, 3.0])  # (2, 2, 1)
    assert logger.all_of("ampwise/loss_scale") == [1024.0, 1024.0, 512.0]
    assert logger.all_of("ampwise/skipped") == [0.0, 1.0, 0.0]
    assert [step for step, metrics in logger.rows if "ampwise/grad_norm" in metrics] == [0, 1, 2]
    assert len(logger.all_of("train_loss")) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_lightnings_own_precision_is_watched_as_well(fused):
    from pytorch_lightning.plugins.precision import MixedPrecision

    module = Module()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)
    theirs = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    watch = Watch(every=1, timing=False, quiet=True)
    logger = fit(watch, (2, math.nan, 2), module, [theirs])
    assert logger.all_of("ampwise/skipped") == [0.0, 1.0, 0.0]
    assert logger.all_of("ampwise/grad_norm")[::2] == pytest.approx([3.0, 3.0])


def test_what_is_wrong_is_found_and_said(capsys):
    class Wrong(Module):
        def training_step(self, batch, index):
            return (self.layer(batch) - self.layer(batch)).log().mean()  # the log of zero

    watch = Watch(timing=False)
    fit(watch, (1, 1, 1), Wrong())
    codes = {seen.finding.rule.code for seen in watch.run.findings}
    assert codes, "nothing was found"
    said = capsys.readouterr().err
    assert any(code in said for code in codes)
    assert "`ampwise.integrations.lightning.Watch(output='RUN')` keeps the record" in said


def test_a_clean_run_leaves_nothing_to_say_and_torch_as_it_was(tmp_path):
    before = torch.autograd.backward, torch.optim.Optimizer.__init__, torch.nn.utils.clip_grad_norm_
    watch = Watch(tmp_path / "run", timing=False, quiet=True)
    fit(watch, (1, 1, 1), gradient_clip_val=1.0)
    assert before == (torch.autograd.backward, torch.optim.Optimizer.__init__, torch.nn.utils.clip_grad_norm_)
    run = Run.read(tmp_path / "run")
    assert [seen.finding.message for seen in run.findings if seen.finding.severity.rank == 0] == []
    assert run.status == "finished"


def test_a_fit_that_dies_is_recorded_as_failed_and_torch_is_as_it_was(tmp_path):
    class Dies(Module):
        def training_step(self, batch, index):
            raise ZeroDivisionError("on purpose")

    before = torch.autograd.backward
    watch = Watch(tmp_path / "run", timing=False, quiet=True)
    with pytest.raises(ZeroDivisionError):
        fit(watch, (1,), Dies())
    assert torch.autograd.backward is before
    assert watch.run.status == "failed"


def test_a_watch_within_a_watch_is_none(capsys):
    from ampwise.watch.watch import Watch as OfRun

    inner = Watch(timing=False)
    with OfRun(timing=False):
        fit(inner, (1,))
    assert inner.run is None
    assert "already watches this training" in capsys.readouterr().err


def test_sinks_are_reported_too():
    rows = []
    fit(Watch(every=1, timing=False, quiet=True, sinks=[rows.append]), (1, 1))
    assert [row.step for row in rows if "ampwise/grad_norm" in row.metrics] == [1, 2]


def test_a_record_is_not_written_over_unasked(tmp_path):
    fit(Watch(tmp_path / "run", timing=False, quiet=True), (1,))
    with pytest.raises(BadInput, match=r"Watch\(output='.*run'\): .*; force=True overwrites it, output names another"):
        fit(Watch(tmp_path / "run", timing=False, quiet=True), (1,))
    assert not getattr(torch.autograd.backward, "_ampwise", False)
    again = Watch(tmp_path / "run", timing=False, quiet=True, force=True)
    fit(again, (1, 1))
    assert len(again.run.steps) == 2


def test_they_travel_to_processes_that_lightning_spawns():
    assert pickle.loads(pickle.dumps(Watch())).run is None
    assert pickle.loads(pickle.dumps(Precision("fp16", device="cpu"))).scaler.is_enabled()


def test_an_interrupted_fit_is_distinguished_from_one_that_failed():
    class Stopped(Module):
        def training_step(self, batch, index):
            raise KeyboardInterrupt

    watch = Watch(timing=False, quiet=True)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(watch, (1,), Stopped())
    assert watch.run.status == "interrupted"


def test_bad_arguments():
    with pytest.raises(BadInput, match=r"ampwise\.integrations\.lightning\.Watch\(every=0\)"):
        Watch(every=0)
    with pytest.raises(BadInput, match="expected a list"):
        Watch(sinks="tensorboard")
