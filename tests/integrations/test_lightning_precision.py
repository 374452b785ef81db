"""Lightning's and Fabric's own loops with our plugin: right where the conformance cases show them wrong without."""

import copy
import io
import logging
import math
import warnings

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("pytorch_lightning")

from lightning_fabric import Fabric  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import ampwise  # noqa: E402
from ampwise.errors import BadInput, PrecisionUnavailable  # noqa: E402
from ampwise.integrations import lightning as integration  # noqa: E402
from ampwise.integrations.lightning import Precision  # noqa: E402

from ..conformance import loop_peers, trainer_peers  # noqa: E402
from ..conformance.registry import all_cases  # noqa: E402
from ..conformance.step_peers import SCALE  # noqa: E402
from ..conformance.trainer_peers import adamw, fused_sgd, sgd  # noqa: E402

CASES = all_cases()
MENDED = {
    "lightning": [
        "accumulated-fused-and-clipped",
        "bf16-fused-and-clipped",
        "bf16-inf-clipped-by-value",
        "bf16-nan-gradient",
        "bf16-nan-gradient-clipped",
        "bf16-nan-in-a-window",
        "fp16-fused-and-clipped",
        "scheduler-waits-for-skipped-step",
    ],
    "fabric": [
        "accumulated-fused-and-clipped",
        "bf16-inf-clipped-by-value",
        "bf16-nan-gradient",
        "bf16-nan-in-a-window",
        "fp16-fused-and-clipped",
        "two-optimizers-first-overflows",
    ],
}
KEPT = {
    "lightning": [
        "accumulated-mean",
        "clipping-leaves-small-gradients",
        "overflow-in-a-window",
        "overflow-lowers-the-scale",
        "resumed-scale",
    ],
    "fabric": [
        "bf16-fused-and-clipped",
        "clipping-leaves-small-gradients",
        "overflow-in-a-window",
        "overflow-lowers-the-scale",
    ],
}
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield


def plugin(precision="fp16"):
    return Precision(precision, device="cpu", scaling={"init_scale": SCALE} if precision == "fp16" else None)


def trainer_of(contender="lightning", precision="fp16", **options):
    chosen = plugin(precision)
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[chosen], **QUIET, **options)
    return trainer, chosen.scaler


def fabric_of(contender="fabric", precision="fp16"):
    chosen = plugin(precision)
    return Fabric(accelerator="cpu", devices=1, plugins=[chosen]), chosen.scaler


@pytest.fixture
def plugged(monkeypatch):
    for module in (trainer_peers, loop_peers):
        monkeypatch.setattr(module, "lightning_trainer", trainer_of)
        monkeypatch.setattr(module, "fabric_of", fabric_of)


def pairs(cases):
    return [(contender, name) for contender, names in cases.items() for name in names]


@pytest.mark.half_by_day
@pytest.mark.parametrize(("contender", "name"), pairs(MENDED) + pairs(KEPT))
def test_the_peers_case_is_right_with_it(contender, name, plugged):
    outcome = CASES[name].outcome(contender)
    assert outcome.right, outcome.seen


@pytest.mark.half_by_day
@pytest.mark.parametrize(("contender", "name"), pairs(MENDED))
def test_without_it_the_case_is_wrong(contender, name):
    assert not CASES[name].outcome(contender).right


class Module(pl.LightningModule):
    """Weights are 1, the rate is 1, and the gradient is the input."""

    def __init__(self, make=sgd, interval="step", scheduler=None):
        super().__init__()
        self.layer, self.make, self.interval = trainer_peers.layer_of(), make, interval
        self.scheduler = scheduler or (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))

    def training_step(self, batch, index):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fit(module, slopes, precision="fp16", **options):
    trainer, scaler = trainer_of(precision=precision, max_epochs=1, **options)
    batches = [torch.tensor([[float(slope)] * 2]) for slope in slopes]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer, scaler


@pytest.mark.parametrize("make", [sgd, adamw], ids=["plain", "fused"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_scheduler_moves_with_the_steps_that_count(make, precision):
    module = Module(make)
    trainer, _ = fit(module, (1, math.nan, 1, math.inf), precision)
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.25]
    assert trainer.precision_plugin.skipped
    assert all(bool(weight.isfinite().all()) for weight in module.parameters())
    assert "lr_scheduler_step" not in vars(module)  # nothing of ours is left on it


def test_a_scheduler_of_epochs_does_not_wait():
    trainer, _ = fit(Module(interval="epoch"), (1, math.nan))
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5]


def test_schedulers_are_let_go_of_when_the_fit_dies():
    class Dies(Module):
        def training_step(self, batch, index):
            if index:
                raise ZeroDivisionError
            return super().training_step(batch, index)

    module = Dies()
    with pytest.raises(ZeroDivisionError):
        fit(module, (1, 1))
    assert "lr_scheduler_step" not in vars(module)


@pytest.mark.parametrize("make", [sgd, fused_sgd], ids=["plain", "fused"])
def test_whoever_looks_before_the_step_sees_true_units(make):
    class Looks(Module):
        def on_before_optimizer_step(self, optimizer):
            self.seen = self.layer.weight.grad.clone()

    module = Looks(make)
    fit(module, (3,))
    assert module.seen.flatten().tolist() == [3.0, 3.0]


def test_a_clipping_of_the_users_own_sees_true_units():
    class Clips(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)

    module = Clips(fused_sgd)
    fit(module, (3,))
    assert module.layer.weight.flatten().tolist() == [0.5, 0.5]


def test_two_optimizers_by_hand_are_divided_once_each():
    class Two(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.layers = torch.nn.ModuleList([trainer_peers.layer_of(), trainer_peers.layer_of()])

        def training_step(self, batch, index):
            self.manual_backward(sum(layer(batch).mean() for layer in self.layers))
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [sgd(layer.parameters()) for layer in self.layers]

    module = Two()
    fit(module, (1,))
    assert [layer.weight.flatten().tolist() for layer in module.layers] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("make", [sgd, fused_sgd], ids=["plain", "fused"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_by_hand_is_not_lost_on_lightnings_wrapper(make, algorithm):
    """``self.optimizers()`` gives wrappers, and the step is the inner optimizer's."""

    class ByHand(Module):
        automatic_optimization = False
        told = None

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, gradient_clip_val=1.5, gradient_clip_algorithm=algorithm)
            optimizer.step()
            self.told = self.trainer.precision_plugin.scaler.skipped_for(optimizer)

    module = ByHand(make)
    fit(module, (2,))  # of norm 3, with the bias
    moved = 1.0 if algorithm == "norm" else 1.5
    assert module.layer.weight.flatten().tolist() == pytest.approx([1 - moved] * 2, abs=1e-5)
    assert module.told is False
    fit(module, (math.nan,))
    assert module.told is True


def test_what_a_module_keeps_in_fp32_has_gradients_in_fp32_by_hand_too():
    """``manual_backward`` is called within the autocast of ``training_step``."""

    class ByHand(Module):
        automatic_optimization = False

        def training_step(self, batch, index):
            with torch.autocast("cpu", enabled=False):
                loss = self.layer(batch).sum()
            self.manual_backward(loss)
            self.optimizers().step()

    module = ByHand()
    fit(module, (1 + 2**-10,), "bf16")
    assert module.layer.weight.grad.flatten().tolist() == [1 + 2**-10] * 2  # more digits than BF16 has


class Saved(Module):
    """By name, so that it can be pickled."""


def test_a_module_can_be_saved_and_copied_while_its_schedulers_wait():
    copies = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.scheduler = None  # a lambda of the test's, which nobody could save
            kept = io.BytesIO()
            torch.save(pl_module, kept)
            kept.seek(0)
            copies.extend([torch.load(kept, weights_only=False), copy.deepcopy(pl_module)])

    module = Saved()
    fit(module, (1,), callbacks=[Saves()])
    for each in copies:
        assert torch.equal(each.layer.weight, module.layer.weight)
        weight = torch.nn.Parameter(torch.ones(1))
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=1.0), 1, 0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*before.*optimizer.step.*")
            each.lr_scheduler_step(scheduler, None)
        assert scheduler.get_last_lr() == [0.5]


def test_a_batch_that_is_passed_over_takes_no_step():
    class Passes(Module):
        def training_step(self, batch, index):
            return None if index == 0 else super().training_step(batch, index)

    module = Passes(fused_sgd, interval="epoch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned `None`.*")
        fit(module, (5, 1))
    assert module.layer.weight.flatten().tolist() == [0.0, 0.0]


class AsksForClosure(torch.optim.SGD):
    """As some third-party optimizers do, without gradients."""

    @torch.no_grad()
    def step(self, closure):
        self.loss = closure()
        return super().step()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_optimizer_that_asks_for_a_closure_gets_one_that_has_run(precision):
    module = Module(lambda params: AsksForClosure(params, lr=1.0), interval="epoch")
    trainer, scaler = fit(module, (1, math.nan), precision)
    (optimizer,) = trainer.optimizers
    assert float(optimizer.loss) == 3.0
    assert module.layer.weight.flatten().tolist() == [0.0, 0.0]
    assert scaler.skipped
    assert "partial" not in repr(vars(optimizer).get("step")), "nothing of ours is left on it"


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_module_may_call_the_closure_itself_and_gets_the_loss(precision):
    """A hook may also leave out some steps. A batch that was passed over differs: it leaves no gradients."""
    losses = []

    class Own(Module):
        def optimizer_step(self, epoch, batch_index, optimizer, optimizer_closure):
            if batch_index == 0:
                losses.append(optimizer.step(closure=optimizer_closure))
            else:
                losses.append(optimizer_closure())
                optimizer.step()

    module = Own(interval="epoch")
    fit(module, (1, 2), precision)
    assert losses[0] == 3.0
    assert module.layer.weight.flatten().tolist() == [-2.0, -2.0]


def test_the_scaler_knows_norm_and_census():
    module = Module(fused_sgd)
    _, scaler = fit(module, (2,), gradient_clip_val=1.5)
    assert scaler.grad_norm == pytest.approx(3.0)
    assert scaler.census(module)["layer.weight"].amax == 2.0


def test_a_checkpoint_of_16_mixed_is_gone_on_from():
    ours = plugin()
    ours.on_load_checkpoint(
        {"MixedPrecision": torch.amp.GradScaler("cpu", init_scale=4.0).state_dict() | {"scale": 4.0}}
    )
    assert ours.scaler.get_scale() == 4.0
    other = plugin()
    other.load_state_dict(ours.state_dict())
    assert other.scaler.get_scale() == 4.0
    plugin("bf16").load_state_dict({})


def test_fabric_says_of_a_skip_and_saves_the_scale(tmp_path):
    fabric, _ = fabric_of()
    layer = trainer_peers.layer_of()
    model, optimizer = fabric.setup(layer, adamw(layer.parameters()))
    fabric.backward(model(torch.tensor([[math.nan, 1.0]])).sum())
    optimizer.step()
    chosen = fabric.strategy.precision
    assert chosen.skipped
    fabric.save(tmp_path / "state", {"precision": chosen})
    other = plugin()
    fabric.load(tmp_path / "state", {"precision": other})
    assert other.scaler.get_scale() == SCALE / 2


def test_outputs_are_widened_for_fabric():
    fabric, _ = fabric_of()
    model = fabric.setup(torch.nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_inputs_of_fp64_are_narrowed_for_fabric_as_by_its_own_plugin():
    fabric, _ = fabric_of()
    model = fabric.setup(torch.nn.Linear(2, 1))
    assert model(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float32
    batch = {"x": torch.ones(1, dtype=torch.float64), "n": torch.ones(1, dtype=torch.int64)}
    narrowed = fabric.strategy.precision.convert_input(batch)
    assert [each.dtype for each in narrowed.values()] == [torch.float32, torch.int64]
    trainer, _ = fit(Module(), (1,))  # whose batches are the module's own affair
    assert trainer.precision_plugin.convert_input(batch)["x"].dtype == torch.float64


def test_the_trainers_device_is_the_plugins():
    chosen = Precision("fp16")
    chosen._set_device("meta")  # as if there were a GPU, which the Trainer does not use
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[chosen], max_epochs=1, **QUIET)
    trainer.fit(Module(), DataLoader([torch.ones(1, 2)], batch_size=None))
    assert chosen._device == "cpu"


def test_a_loss_elsewhere_is_refused():
    chosen = Precision("bf16", device="meta")
    with pytest.raises(BadInput, match=r"is for meta, but the loss is on cpu.*device='cpu'"):
        chosen.pre_backward(torch.ones(()), None)


def test_lbfgs_in_fp16_is_refused_and_runs_without_a_scale():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=1)

    with pytest.raises(BadInput, match="LBFGS"):
        fit(Module(lbfgs), (1,))
    module = Module(lbfgs)
    fit(module, (1,), "fp32")
    assert module.layer.weight.flatten().tolist() != [1.0, 1.0]


@pytest.mark.parametrize(("asked", "words"), [("16-mixed", "Use 'fp16'"), ("fp8", "expected one of fp16, bf16, fp32")])
def test_other_precisions_are_refused(asked, words):
    with pytest.raises(BadInput, match=words):
        Precision(asked)


def test_a_device_by_lightnings_name_is_refused():
    with pytest.raises(BadInput, match=r"Precision\(device='gpu'\): expected 'cuda' or 'cpu'"):
        Precision(device="gpu")


def test_a_device_without_the_precision_is_reported_of(monkeypatch):
    facts = integration.precisions_of(torch.device("cpu"))
    lacks = dict.fromkeys(set(facts.runs) | set(facts.lacks), "Tesla T4 has no BF16 tensor cores.")
    lacks = {name: why for name, why in lacks.items() if name not in ("fp32", "fp16")}
    old = type(facts)(lacks=lacks, best="fp16", why="")
    monkeypatch.setattr(integration, "precisions_of", lambda device: old)
    with pytest.raises(PrecisionUnavailable, match=r"Precision\('bf16'\): Tesla T4 .* It runs fp32, fp16\."):
        Precision("bf16", device="cpu").convert_module(torch.nn.Linear(1, 1))


def test_it_is_reached_from_the_package():
    assert ampwise.integrations.lightning.Precision is Precision
