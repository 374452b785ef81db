"""Whole loops: our Engine, Accelerate's, Lightning's Trainer, Fabric's, and the loop of torch's documentation.

All train a linear layer of weights 1 with a rate of 1, on batches whose mean over rows is the gradient: how far a
weight goes says what the loop made of the batches.
"""

import math
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from .registry import Case, Outcome
from .step_peers import SCALE, scaler_of, shown
from .trainer_peers import (
    accelerator_of,
    adamw,
    fabric_of,
    fused_sgd,
    layer_of,
    lightning,
    lightning_trainer,
    sgd,
    weights_of,
)

EVERYONE = ("ampwise", "torch", "accelerate", "lightning", "fabric")


@dataclass
class Trained:
    """What a loop leaves behind; ``told``: whether it says that its last step was skipped, if it can."""

    model: Any
    scale: float | None = None
    told: bool | None = None

    @property
    def move(self):
        """Of the weights, not the bias; one number if both go as far."""
        return shown(1.0 - next(self.model.parameters()))


def rows(*gradients):
    """A batch with a row for each, which is the gradient of that row."""
    return torch.tensor([[float(gradient)] * 2 for gradient in gradients])


def loader_of(batches):
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


# One epoch of each loop.


def engine_loop(contender, batches, make, *, model=None, precision="fp16", accumulate=1, weight=None, **clip):
    from ampwise import Engine

    model = model or layer_of()
    scaling = {"init_scale": SCALE} if precision == "fp16" else None
    engine = Engine(
        model, make(model.parameters()), precision, accumulate=accumulate, weight=weight, scaling=scaling, **clip
    )
    for batch in engine.batches(loader_of(batches)):
        step = engine.step(lambda batch: model(batch).mean(), batch)
    return Trained(model, step.scale, step.skipped)


def plain_loop(
    contender, batches, make, *, model=None, precision="fp16", accumulate=1, clip_norm=None, clip_value=None
):
    model = model or layer_of()
    optimizer, scaler = make(model.parameters()), scaler_of(contender, enabled=precision == "fp16")
    for number, batch in enumerate(loader_of(batches), 1):
        with torch.autocast("cpu", torch.float16 if precision == "fp16" else torch.bfloat16):
            loss = model(batch).mean() / accumulate
        scaler.scale(loss).backward()
        if number % accumulate == 0:
            if clip_norm or clip_value:
                scaler.unscale_(optimizer)
            if clip_norm:
                clip_grad_norm_(model.parameters(), clip_norm)
            if clip_value:
                clip_grad_value_(model.parameters(), clip_value)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return Trained(model, scaler.get_scale())


def accelerate_loop(
    contender, batches, make, *, model=None, precision="fp16", accumulate=1, clip_norm=None, clip_value=None
):
    accelerator, model = (
        accelerator_of(contender, precision, gradient_accumulation_steps=accumulate),
        model or layer_of(),
    )
    model, optimizer, loader = accelerator.prepare(model, make(model.parameters()), loader_of(batches))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients and clip_norm:
                accelerator.clip_grad_norm_(model.parameters(), clip_norm)
            if accelerator.sync_gradients and clip_value:
                accelerator.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            optimizer.zero_grad()
    scale = accelerator.scaler.get_scale() if accelerator.scaler else None
    return Trained(model, scale, accelerator.optimizer_step_was_skipped)


def lightning_loop(
    contender, batches, make, *, model=None, precision="fp16", accumulate=1, clip_norm=None, clip_value=None
):
    trainer, scaler = lightning_trainer(
        contender,
        precision,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip_norm or clip_value,
        gradient_clip_algorithm="value" if clip_value else "norm",
    )
    module = lightning()[1](make, decay=1.0)
    module.layer = model or module.layer
    trainer.fit(module, loader_of(batches))
    return Trained(module.layer, scaler.get_scale() if scaler else None)


def fabric_loop(
    contender,
    batches,
    make,
    *,
    model=None,
    precision="fp16",
    accumulate=1,
    divisor=None,
    clip_norm=None,
    clip_value=None,
):
    """It leaves dividing to the user; its documentation says nothing of it. Done here, unless a case is about it."""
    fabric, scaler = fabric_of(contender, precision)
    model = model or layer_of()
    model, optimizer = fabric.setup(model, make(model.parameters()))
    for number, batch in enumerate(fabric.setup_dataloaders(loader_of(batches)), 1):
        accumulating = number % accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(model(batch).mean() / (divisor or accumulate))
        if not accumulating:
            if clip_norm or clip_value:
                fabric.clip_gradients(model, optimizer, max_norm=clip_norm, clip_val=clip_value)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(model, scaler.get_scale() if scaler else None)


LOOPS = {
    "ampwise": engine_loop,
    "torch": plain_loop,
    "accelerate": accelerate_loop,
    "lightning": lightning_loop,
    "fabric": fabric_loop,
}


def train(contender, *args, **options):
    return LOOPS[contender](contender, *args, **options)


def moved(trained, due, *, what="the weights move by"):
    right = math.isclose(float(trained.move), due, rel_tol=1e-3) if "," not in trained.move else False
    return Outcome(right, f"{what} {trained.move}" + ("" if right else f" (right: {due:g})"))


# Accumulation

MEAN = Case(
    "accumulated-mean",
    title="Accumulate four batches",
    why="The gradient of four small batches should be that of one large batch: their mean. If the loss is not "
    "divided, the step is four times too large, without an error.",
)


@MEAN.by(*EVERYONE)
def mean(contender):
    batches = [rows(gradient) for gradient in (1, 2, 3, 6)]
    if contender != "fabric":
        return moved(train(contender, batches, sgd, accumulate=4), 3.0)
    trained = train(contender, batches, sgd, accumulate=4, divisor=1)
    return moved(trained, 3.0, what="dividing is left to the user; without, the weights move by")


UNEVEN = Case(
    "accumulated-mean-at-the-end-of-an-epoch",
    title="Accumulate by two, and the data ends after three batches",
    why="The last batch is alone in its window, and its mean is its own gradient. If it is divided by two anyway, it "
    "counts half; if it is left over, it is lost, or counts in the next epoch.",
)


@UNEVEN.by(*EVERYONE)
def uneven(contender):
    trained = train(contender, [rows(g) for g in (1, 3, 6)], sgd, accumulate=2)
    return moved(trained, 8.0, what="a window of 1 and 3 and one of 6 move the weights by")


TOKENS = Case(
    "accumulated-mean-over-tokens",
    title="Accumulate a batch of one token and one of three",
    why="Batches of text differ in length. The mean of their means lets a token of a short batch count for more, so "
    "that the result depends on how the text was cut; the mean over all tokens is right. ampwise takes the weight "
    "of a batch: `weight=len`.",
)


@TOKENS.by(*EVERYONE)
def tokens(contender):
    weigh = {"weight": len} if contender == "ampwise" else {}
    trained = train(contender, [rows(4), rows(0, 0, 0)], sgd, accumulate=2, **weigh)
    return moved(trained, 1.0)


BAD_BATCH = Case(
    "overflow-in-a-window",
    title="One of the accumulated batches overflows",
    why="Only its accumulation window may be lost, wherever the batch is in it: the next has its own gradients, and "
    "the scale must not change in the middle of a window.",
)


@BAD_BATCH.by(*EVERYONE)
def bad_batch(contender):
    seen = set()
    for place in range(2):
        batches = [rows(1), rows(1), rows(2), rows(4)]
        batches[place] = rows(math.nan)
        trained = train(contender, batches, sgd, accumulate=2)
        seen.add((trained.move, trained.scale))
    right = seen in ({("3", SCALE / 2)}, {("3", SCALE)})  # a NaN is no reason to lower the scale, nor a harm
    return Outcome(right, "that window is skipped, the next is applied" if right else f"moves and scales are {seen}")


BAD_BATCH_BF16 = Case(
    "bf16-nan-in-a-window",
    title="BF16: one of the accumulated batches is NaN",
    why="There is no scaler to check the gradients, so nothing does.",
)


@BAD_BATCH_BF16.by(*EVERYONE)
def bad_batch_bf16(contender):
    trained = train(contender, [rows(math.nan), rows(1), rows(2), rows(4)], sgd, accumulate=2, precision="bf16")
    return moved(trained, 3.0)


# Clipping and skipping

BY_VALUE = Case(
    "bf16-inf-clipped-by-value",
    title="BF16, an infinite gradient, clipped by value",
    why="Clipping turns it into a finite number and hides the overflow: the step is as large as the limit allows, in "
    "the direction of the overflow.",
)


@BY_VALUE.by(*EVERYONE)
def by_value(contender):
    trained = train(contender, [rows(math.inf)], sgd, precision="bf16", clip_value=1.0)
    kept = torch.equal(weights_of(trained.model), torch.ones(3))
    return Outcome(kept, "the step is skipped" if kept else f"the step is applied: the weights move by {trained.move}")


STATISTICS = Case(
    "batchnorm-after-a-skipped-step",
    title="BatchNorm, after a step was skipped",
    why="The forward pass updates the running statistics before the overflow is detected. The step is skipped, and "
    "the weights are kept, but infinity stays in the statistics: the model trains well and evaluates to NaN.",
)


@STATISTICS.by(*EVERYONE)
def statistics(contender):
    norm = torch.nn.BatchNorm1d(1)
    model = torch.nn.Sequential(layer_of(), norm)
    # FP16 ends at 65504, and a linear layer overflows in an ordinary way.
    train(contender, [rows(4e4, 5e4), rows(1, 2)], sgd, model=model)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert bool(weights.isfinite().all()), "the step was to be skipped"
    values = norm.running_mean.item(), norm.running_var.item()
    right = all(map(math.isfinite, values)) and norm.num_batches_tracked.item() == 1
    return Outcome(
        right, "they are those of the other batches" if right else f"mean and variance are {values[0]:g}, {values[1]:g}"
    )


TOLD = Case(
    "told-of-a-skipped-step",
    title="Ask the loop whether the step was skipped",
    why="Averaged weights, logs and progress bars must follow the steps that were taken. With a fused optimizer the "
    "optimizer is called in any case, and only the device knows.",
)


@TOLD.by("ampwise", "accelerate", "lightning", "fabric")
def told(contender):
    answers = {}
    for name, make in (("not fused", sgd), ("fused", adamw)):
        trained = train(contender, [rows(math.nan)], make)
        assert torch.equal(weights_of(trained.model), torch.ones(3)), "the step was to be skipped"
        answers[name] = trained.told
    if set(answers.values()) == {None}:
        return Outcome(False, "it has no way to ask")
    right = all(answers.values())
    words = "; ".join(f"{name}: {'skipped' if answer else 'not skipped'}" for name, answer in answers.items())
    return Outcome(right, "it says so" if right else f"it says: {words}")


CLIPPED_WINDOW = Case(
    "accumulated-fused-and-clipped",
    title="FP16: accumulate, clip, with a fused optimizer",
    why="All three at once, as in a large run: the unscaled mean of the batches is clipped once (Lightning#21435).",
)


@CLIPPED_WINDOW.by(*EVERYONE)
def clipped_window(contender):
    """The mean gradient is (2, 2, 1), of norm 3."""
    trained = train(contender, [rows(1), rows(3)], fused_sgd, accumulate=2, clip_norm=1.5)
    return moved(trained, 1.0)


# Two optimizers


def two_trained(contender, slopes, clip_norm=None):
    """Two layers with an optimizer each, one loss, the slope of each; the layers after one step."""
    layers = [layer_of(), layer_of()]
    optimizers = [sgd(layer.parameters()) for layer in layers]
    batches = [rows(slope) for slope in slopes]
    {"ampwise": two_in_engine, "torch": two_plain, "accelerate": two_in_accelerate, "fabric": two_in_fabric}[contender](
        contender, layers, optimizers, batches, clip_norm
    )
    return layers


def total(layers, batches):
    return sum(layer(batch).mean() for layer, batch in zip(layers, batches, strict=True))


def two_in_engine(contender, layers, optimizers, batches, clip_norm):
    from ampwise import Engine

    engine = Engine(layers, optimizers, "fp16", clip_norm=clip_norm, scaling={"init_scale": SCALE})
    engine.step(total, layers, batches)


def two_plain(contender, layers, optimizers, batches, clip_norm):
    scaler = scaler_of(contender)
    with torch.autocast("cpu", torch.float16):
        loss = total(layers, batches)
    scaler.scale(loss).backward()
    if clip_norm:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_([parameter for layer in layers for parameter in layer.parameters()], clip_norm)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def two_in_accelerate(contender, layers, optimizers, batches, clip_norm):
    accelerator = accelerator_of(contender)
    layers, optimizers = ([accelerator.prepare(each) for each in every] for every in (layers, optimizers))
    accelerator.backward(total(layers, batches))
    if clip_norm:
        accelerator.clip_grad_norm_([parameter for layer in layers for parameter in layer.parameters()], clip_norm)
    for optimizer in optimizers:
        optimizer.step()


def two_in_fabric(contender, layers, optimizers, batches, clip_norm):
    fabric, _ = fabric_of(contender)
    pairs = [fabric.setup(layer, optimizer) for layer, optimizer in zip(layers, optimizers, strict=True)]
    fabric.backward(total([layer for layer, _ in pairs], batches))
    if clip_norm:
        for layer, optimizer in pairs:
            fabric.clip_gradients(layer, optimizer, max_norm=clip_norm)
    for _, optimizer in pairs:
        optimizer.step()


FIRST_OVERFLOWS = Case(
    "two-optimizers-first-overflows",
    title="Two optimizers, the first one's step overflows",
    why="The scale falls then. If it falls before the second has divided its gradients by it, the second step is "
    "twice as large.",
)
NAN_SPREADS = Case(
    "two-optimizers-nan-in-one-clipped",
    title="Two optimizers clipped together, a NaN in the first one's gradients",
    why="The norm is NaN, and clipping by it makes the second one's gradients NaN too, after they were found good.",
)


@FIRST_OVERFLOWS.by("ampwise", "torch", "accelerate", "fabric")
def first_overflows(contender):
    return the_second(two_trained(contender, (math.nan, 1.0)))


@NAN_SPREADS.by("ampwise", "torch", "accelerate", "fabric")
def nan_spreads(contender):
    return the_second(two_trained(contender, (math.nan, 1.0), clip_norm=100.0))


def the_second(layers):
    """Skipped with the first, or taken as it should be: both keep the model sound."""
    first, second = (weights_of(layer) for layer in layers)
    assert torch.equal(first, torch.ones(3)), "the first was to be skipped"
    if torch.equal(second, torch.ones(3)):
        return Outcome(True, "both are skipped")
    right = torch.allclose(second, torch.zeros(3), atol=1e-5)
    words = "as it should" if right else f"by {shown(1.0 - second)} (right: 1)"
    return Outcome(right, f"the first is skipped, the second moves {words}")


# Resuming

RESUMED = Case(
    "resumed-scale",
    title="Save, and resume in a new process",
    why="A scale that starts from its initial value overflows until it is right again: steps are lost at every "
    "restart.",
)


@RESUMED.by("ampwise", "accelerate", "lightning", "fabric")
def resumed(contender):
    with tempfile.TemporaryDirectory() as folder:
        resume = {
            "ampwise": resumed_engine,
            "accelerate": resumed_accelerate,
            "lightning": resumed_lightning,
            "fabric": resumed_fabric,
        }[contender]
        before, after = resume(f"{folder}/checkpoint")
    assert before == SCALE / 4, "two overflows"
    right = before == after
    return Outcome(right, f"saved at a scale of {before:g}, it goes on at {after:g}")


def resumed_engine(file):
    from ampwise import Engine

    scales = []
    for first in (True, False):
        layer = layer_of()
        optimizer = adamw(layer.parameters())
        engine = Engine(layer, optimizer, "fp16", scaling={"init_scale": SCALE})
        if first:
            for _ in range(2):
                engine.step(lambda batch: layer(batch).float().mean() * 2.0**10, rows(1024))  # noqa: B023 (called here)
            torch.save(engine.state_dict(), file)
        else:
            engine.load_state_dict(torch.load(file))
        scales.append(engine.scaler.get_scale())
    return scales


def resumed_accelerate(file):
    scales = []
    for first in (True, False):
        accelerator, layer = accelerator_of("accelerate"), layer_of()
        layer, optimizer = accelerator.prepare(layer, adamw(layer.parameters()))
        if first:
            for _ in range(2):
                accelerator.backward(layer(rows(math.nan)).mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(file)
        else:
            accelerator.load_state(file)
        scales.append(accelerator.scaler.get_scale())
    return scales


def resumed_lightning(file):
    scales = []
    for first in (True, False):
        trainer, scaler = lightning_trainer("lightning", max_epochs=1)
        batches = loader_of([rows(math.nan)] * 2)
        trainer.fit(lightning()[1](adamw, decay=1.0), batches, ckpt_path=None if first else file, weights_only=False)
        if first:
            trainer.save_checkpoint(file)
        scales.append(scaler.get_scale())
    return scales


def resumed_fabric(file):
    scales = []
    for first in (True, False):
        fabric, scaler = fabric_of("fabric")
        layer = layer_of()
        layer, optimizer = fabric.setup(layer, adamw(layer.parameters()))
        state = {"model": layer, "optimizer": optimizer}
        if first:
            for _ in range(2):
                fabric.backward(layer(rows(math.nan)).mean())
                optimizer.step()
                optimizer.zero_grad()
            fabric.save(file, state)
        else:
            fabric.load(file, state)
        scales.append(scaler.get_scale())
    return scales


IN_THE_MIDDLE = Case(
    "resumed-in-the-middle-of-a-window",
    title="Save in the middle of a window, and resume",
    why="A job may be stopped in the middle of an accumulation window. The accumulated gradients are part of the "
    "state: without it, the first step after resuming is made of half the batches and divided by all.",
)


@IN_THE_MIDDLE.by("ampwise")
def in_the_middle(contender):
    from ampwise import Engine

    layers, saved = (layer_of(), layer_of()), None
    for layer, gradient in zip(layers, (2, 4), strict=True):
        engine = Engine(layer, sgd(layer.parameters()), "fp16", accumulate=2, scaling={"init_scale": SCALE})
        if saved:
            engine.load_state_dict(saved)
        engine.step(lambda batch, layer=layer: layer(batch).mean(), rows(gradient))
        saved = engine.state_dict()
    return moved(Trained(layers[1]), 3.0)


@IN_THE_MIDDLE.by("accelerate")
def in_the_middle_of_accelerate(contender):
    with tempfile.TemporaryDirectory() as folder:
        for gradient in (2, 4):
            accelerator, layer = accelerator_of(contender, gradient_accumulation_steps=2), layer_of()
            layer, optimizer = accelerator.prepare(layer, sgd(layer.parameters()))
            if gradient == 4:
                accelerator.load_state(folder)
            with accelerator.accumulate(layer):
                accelerator.backward(layer(rows(gradient)).mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(folder)
    return moved(Trained(layer), 3.0)
