"""Twins: what guides to mixed precision show, written in plain torch, and the same by an engine. Same bits."""

import io
import math

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import ampwise
from ampwise import Engine

from ..for_each import for_each

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

MAX_NORM = 0.1  # binds
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))


def new_optimizer(*models):
    return AdamW([each for model in models for each in model.parameters()], lr=1e-2, fused=True)


def new_scaler(**options):
    return torch.amp.GradScaler("cpu", **({"init_scale": 2.0**10} | options))


def new_engine(model, optimizer, precision="fp16", **options):
    return Engine(model, optimizer, precision, **({"scaling": {"init_scale": 2.0**10}} | options))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def autocast(precision="fp16"):
    return torch.autocast("cpu", DTYPES[precision])


def assert_same_bits(*pairs):
    """Of modules, or of tensors."""
    for one, other in pairs:
        if isinstance(one, nn.Module):
            assert one.state_dict().keys() == other.state_dict().keys()
            assert_same_bits(*zip(one.state_dict().values(), other.state_dict().values(), strict=True))
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


# The plain loops


def plain_fp16():
    model = new_model()
    optimizer, scaler = new_optimizer(model), new_scaler()
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, losses


def plain_bf16():
    model = new_model()
    optimizer = new_optimizer(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        with autocast("bf16"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(("plain", "precision"), [(plain_fp16, "fp16"), (plain_bf16, "bf16")])
def test_a_plain_loop(plain, precision):
    by_torch, losses = plain()
    model = new_model()
    engine = new_engine(model, new_optimizer(model), precision)
    for x, y in batches():
        engine.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert_same_bits((model, by_torch))
    assert engine.history["loss"] == losses


# Gradients in true units


def test_clipping_after_unscaling():
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler()
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(by_torch(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(by_torch.parameters(), MAX_NORM).item())
        scaler.step(optimizer)
        scaler.update()

    model = new_model()
    engine = new_engine(model, new_optimizer(model), clip_norm=MAX_NORM)
    for x, y in batches():
        engine.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert min(norms) > MAX_NORM
    assert_same_bits((model, by_torch))
    assert engine.history["grad_norm"] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [None, MAX_NORM])
def test_looking_at_gradients_after_unscaling(clip_norm):
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler()
    model = new_model()
    engine = new_engine(model, new_optimizer(model), clip_norm=clip_norm)
    (x, y), *_ = batches()

    torch.manual_seed(3)
    with autocast():
        loss = F.cross_entropy(by_torch(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = {name: parameter.grad for name, parameter in by_torch.named_parameters()}
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))

    torch.manual_seed(3)
    step = engine.step(lambda: F.cross_entropy(model(x), y))
    census = engine.census()
    assert step.grad_norm == pytest.approx(norm, rel=1e-6)
    assert {name: census[name].amax for name in census} == {
        name: gradient.abs().max().item() for name, gradient in gradients.items()
    }


# Accumulation


def test_accumulation_with_one_update_a_window():
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler(growth_interval=1)
    losses = []
    for index, (x, y) in enumerate(batches()):
        with autocast():
            loss = F.cross_entropy(by_torch(x), y) / 3
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if index % 3 == 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(by_torch.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    model = new_model()
    scaling = {"init_scale": 2.0**10, "growth_interval": 1}
    engine = new_engine(model, new_optimizer(model), accumulate=3, clip_norm=MAX_NORM, scaling=scaling)
    steps = [engine.step(lambda x, y: F.cross_entropy(model(x), y), x, y) for x, y in batches()]
    assert [step.closed for step in steps] == [False, False, True] * 2
    assert engine.history["loss"] == pytest.approx([sum(losses[:3]), sum(losses[3:])], rel=1e-6)
    assert engine.history["scale"] == [2.0**11, 2.0**12]
    assert_same_bits((model, by_torch))


def test_accumulation_weighed_by_tokens():
    """Guides count the tokens of the window first, and divide sums by them; the engine needs no look ahead."""
    windows = [list(batches())[:3], list(batches())[3:]]
    for index, (_, y) in enumerate(each for window in windows for each in window):
        y[index + 1 :] = -100
    by_torch = new_model()
    optimizer, scaler = SGD(by_torch.parameters(), lr=0.1), new_scaler()
    losses = []
    for window in windows:
        tokens = sum((y != -100).sum() for _, y in window)
        losses.append(0.0)
        for x, y in window:
            with autocast():
                loss = F.cross_entropy(by_torch(x), y, reduction="sum") / tokens
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    model = new_model()
    engine = new_engine(model, SGD(model.parameters(), lr=0.1), accumulate=3, weight=lambda x, y: (y != -100).sum())
    for x, y in (each for window in windows for each in window):
        engine.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert engine.history["loss"] == pytest.approx(losses, rel=1e-6)
    for one, other in zip(model.parameters(), by_torch.parameters(), strict=True):
        # Products with shares are rounded to 11 bits in other places. 1e-5 was seen, of a way of 0.04.
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5)


# Several models, several optimizers


def test_two_models_two_losses_two_optimizers_and_one_scaler():
    by_torch = new_model(), new_model()
    optimizers = [new_optimizer(by_torch[0]), SGD(by_torch[1].parameters(), lr=0.1)]
    scaler = new_scaler()
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast():
            first, second = by_torch[0](x), by_torch[1](x)
            loss0 = F.cross_entropy(2 * first + 3 * second, y)
            loss1 = F.cross_entropy(3 * first - 5 * second, y)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizers[0])  # guides look at the gradients of the first here
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    models = new_model(), new_model()
    engine = new_engine(models, [new_optimizer(models[0]), SGD(models[1].parameters(), lr=0.1)])
    for x, y in batches():
        with engine.autocast():
            first, second = models[0](x), models[1](x)
            losses = F.cross_entropy(2 * first + 3 * second, y), F.cross_entropy(3 * first - 5 * second, y)
        engine.backward(losses[0], retain_graph=True)
        engine.backward(losses[1])
        step = engine.apply()
        assert step.loss == (losses[0] + losses[1]).item()
    assert_same_bits(*zip(models, by_torch, strict=True))
    assert engine.applied_steps == 6


def new_gan():
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return maker, judge


def judged(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def gan_by_hand():
    maker, judge = new_gan()
    of_maker, of_judge = new_optimizer(maker), new_optimizer(judge)
    scalers = new_scaler(), new_scaler()
    for x, _ in batches():
        noise = torch.randn(8, 4)
        of_judge.zero_grad()
        with autocast():
            loss = judged(judge(x), True) + judged(judge(maker(noise).detach()), False)
        scalers[1].scale(loss).backward()
        scalers[1].step(of_judge)
        scalers[1].update()

        of_maker.zero_grad()
        with autocast():
            loss = judged(judge(maker(noise)), True)
        scalers[0].scale(loss).backward()  # into the judge too, which zero_grad() makes good
        scalers[0].step(of_maker)
        scalers[0].update()
    return maker, judge


@pytest.mark.parametrize("pieces", [False, True])
def test_a_gan(pieces):
    maker, judge = new_gan()
    engines = new_engine(maker, new_optimizer(maker)), new_engine(judge, new_optimizer(judge))

    def train(engine, loss_fn):
        if not pieces:
            return engine.step(loss_fn)
        with engine.autocast():
            loss = loss_fn()
        engine.backward(loss)
        return engine.apply()

    for x, _ in batches():
        noise = torch.randn(8, 4)
        train(engines[1], lambda x=x, z=noise: judged(judge(x), True) + judged(judge(maker(z).detach()), False))
        train(engines[0], lambda z=noise: judged(judge(maker(z)), True))
        assert any(parameter.grad is not None for parameter in judge.parameters())  # until its next step begins
    assert_same_bits(*zip((maker, judge), gan_by_hand(), strict=True))


# Gradients of gradients


def test_a_penalty_on_gradients():
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler()
    for x, y in batches():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(by_torch(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), by_torch.parameters(), create_graph=True)
        gradients = [gradient * (1.0 / scaler.get_scale()) for gradient in scaled]
        with autocast():
            loss = loss + sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = new_model()
    engine = new_engine(model, new_optimizer(model))

    def penalised(x, y):
        loss = F.cross_entropy(model(x), y)
        gradients = engine.grad(loss, list(model.parameters()))
        return loss + sum(gradient.pow(2).sum() for gradient in gradients).sqrt()

    for x, y in batches():
        engine.step(penalised, x, y)
    assert_same_bits((model, by_torch))


# What is kept in FP32


def sharpened(logits, y):
    """exp and log of numbers that FP16 has no room for."""
    return (torch.log(torch.exp(4 * logits).sum(-1)) - 4 * logits.gather(-1, y[:, None]).squeeze(-1)).mean()


def contrasted(one, other):
    one, other = F.normalize(one, dim=-1), F.normalize(other, dim=-1)
    return F.cross_entropy(one @ other.T / 0.07, torch.arange(len(one)))


def halves(out, y):
    return out[:4], out[4:]


@for_each("precision", DTYPES)
@for_each(("loss_in_fp32", "arguments"), [(sharpened, lambda out, y: (out, y)), (contrasted, halves)])
def test_a_loss_kept_in_fp32(precision, loss_in_fp32, arguments):
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler(enabled=precision == "fp16")
    for x, y in batches():
        optimizer.zero_grad()
        with autocast(precision):
            out = by_torch(x)
            with torch.autocast("cpu", enabled=False):
                loss = loss_in_fp32(*arguments(out.float(), y))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model, kept = new_model(), ampwise.keep("fp32")(loss_in_fp32)
    engine = new_engine(model, new_optimizer(model), precision)
    for x, y in batches():
        step = engine.step(lambda x, y: kept(*arguments(model(x), y)), x, y)
        assert step.applied
    assert_same_bits((model, by_torch))


class Cubed(Function):
    """In FP32, whatever autocast says around it."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        assert x.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        return x**3

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cpu")
        return gradient * 3 * x**2


class Product(Function):
    """As autocast says around it, in the backward pass too."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return gradient @ weight, gradient.T @ x


def test_a_function_of_autograd_of_ones_own():
    def loss_of(model, x, y):
        out = Product.apply(model[:3](x), model[4].weight) + model[4].bias
        return F.cross_entropy(Cubed.apply(out), y)

    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler()
    for x, y in batches():
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(by_torch, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = new_model()
    engine = new_engine(model, new_optimizer(model))
    for x, y in batches():
        engine.step(loss_of, model, x, y)
    assert_same_bits((model, by_torch))


# Around the training step


@pytest.mark.parametrize("precision", DTYPES)
def test_validation_in_what_was_trained_in(precision):
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    engine = new_engine(model, new_optimizer(model), precision, accumulate=2)
    first, second, *rest = batches()
    engine.step(lambda x, y: F.cross_entropy(model(x), y), *first)  # validation in the middle of a window, too
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.eval()
    for x, _ in rest:
        with torch.no_grad(), autocast(precision):
            expected = model(x)
        with torch.no_grad(), engine.autocast():
            assert_same_bits((model(x), expected))
        with torch.inference_mode(), engine.autocast():
            assert_same_bits((model(x), expected))
    model.train()

    assert_same_bits(*((parameter.grad, before[name]) for name, parameter in model.named_parameters()))
    assert engine.accumulating
    assert engine.step(lambda x, y: F.cross_entropy(model(x), y), *second).applied


def resumed_by_hand():
    model = new_model()
    optimizer = new_optimizer(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    scaler = new_scaler(growth_interval=2)
    file = io.BytesIO()
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if index == 2:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            state = {name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()}
            torch.save(state, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            torch.rand(7)
            model = new_model()
            optimizer = new_optimizer(model)
            scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
            scaler = new_scaler(growth_interval=2)
            for name, part in zip(parts, (model, optimizer, scheduler, scaler), strict=True):
                part.load_state_dict(saved[name])
            torch.set_rng_state(saved["rng"])
    return model, scaler.get_scale(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_checkpoint_with_the_state_of_the_scaler(broken):
    """Broken off and resumed or not: it is the same run."""

    def begin():
        model = new_model()
        optimizer = new_optimizer(model)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        scaling = {"init_scale": 2.0**10, "growth_interval": 2}
        return model, optimizer, new_engine(model, optimizer, scheduler=scheduler, scaling=scaling)

    model, optimizer, engine = begin()
    file = io.BytesIO()
    for index, (x, y) in enumerate(batches()):
        engine.step(lambda x, y, model=model: F.cross_entropy(model(x), y), x, y)
        if broken and index == 2:
            parts = {"model": model, "optimizer": optimizer, "engine": engine}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            torch.rand(7)
            model, optimizer, engine = begin()
            for name, part in zip(parts, (model, optimizer, engine), strict=True):
                part.load_state_dict(saved[name])
    by_torch, scale, lr = resumed_by_hand()
    assert_same_bits((model, by_torch))
    assert (engine.history[-1].scale, engine.lr) == (scale, lr)
    assert engine.applied_steps == 6


def test_noticing_skipped_steps():
    options = {"init_scale": 2.0**30, "backoff_factor": 2.0**-9, "growth_interval": 2}
    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler(**options)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    skipped, scales = [], []
    for x, y in batches():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(by_torch(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        scales.append(scaler.get_scale())
        if not skipped[-1]:
            scheduler.step()

    model = new_model()
    optimizer = new_optimizer(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    engine = new_engine(model, optimizer, scheduler=scheduler, scaling=options)
    for x, y in batches():
        engine.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert True in skipped
    assert False in skipped
    assert engine.history["skipped"] == skipped
    assert engine.history["scale"] == scales
    assert engine.skipped_steps == skipped.count(True)
    assert_same_bits((model, by_torch))


def test_the_precision_the_hardware_is_good_at(capsys):
    model = new_model()
    engine = Engine(model, new_optimizer(model), "auto")
    said = capsys.readouterr()
    assert said.err == f"ampwise: {engine.why}\n"
    assert not said.out
    assert engine.why.startswith(f"{engine.precision} on ")
    assert engine.precision in ("fp32", "bf16")  # on a CPU, FP16 is never the better choice
    assert engine.step(lambda x, y: F.cross_entropy(model(x), y), *next(batches())).precision == engine.precision

    Engine(model, new_optimizer(model), "fp32")
    assert not capsys.readouterr().err  # what was asked for needs no words


# Torch's own tools around the model


@for_each("use_reentrant", [False, True])
@for_each("precision", DTYPES)
def test_checkpointed_activations(precision, use_reentrant):
    def loss_of(model, x, y, recompute):
        middle = model[0](x)
        middle = checkpoint(model[1:4], middle, use_reentrant=use_reentrant) if recompute else model[1:4](middle)
        return F.cross_entropy(model[4](middle), y)

    by_torch = new_model()
    optimizer, scaler = new_optimizer(by_torch), new_scaler(enabled=precision == "fp16")
    for x, y in batches():
        optimizer.zero_grad()
        with autocast(precision):
            loss = loss_of(by_torch, x, y, recompute=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for recompute in (True, False):
        model = new_model()
        engine = new_engine(model, new_optimizer(model), precision)
        for x, y in batches():
            engine.step(loss_of, model, x, y, recompute=recompute)
        assert_same_bits((model, by_torch))


@pytest.mark.half_by_day
@pytest.mark.parametrize("what", ["model", "loss"])
def test_compiled(what):
    def compiled(model):
        """The loss function, with what is compiled in it."""
        call = torch.compile(model, backend="aot_eager") if what == "model" else model

        def loss_of(x, y):
            return F.cross_entropy(call(x), y)

        return torch.compile(loss_of, backend="aot_eager") if what == "loss" else loss_of

    by_torch = without_dropout()
    optimizer, scaler, loss_of = new_optimizer(by_torch), new_scaler(), compiled(by_torch)
    for x, y in batches(3):
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = without_dropout()
    engine, loss_of = new_engine(model, new_optimizer(model)), compiled(model)
    for x, y in batches(3):
        engine.step(loss_of, x, y)
    assert_same_bits((model, by_torch))


def without_dropout():
    """A compiled model draws its random numbers in another way."""
    model = new_model()
    model[3] = nn.Identity()
    return model
