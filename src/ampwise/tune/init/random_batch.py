"""A batch of random tensors that a model and its loss function take, found by trying."""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ampwise.errors import BadInput
from ampwise.tune.init.writing import Draft
from ampwise.tune.train_case import TrainCase

ROWS = 2  # BatchNorm needs two
IMAGE_SIZES = (32, 28, 64, 96, 128, 224, 227, 256, 299, 512)
LENGTHS = (128, 64, 16, 1024, 16000)
TOKENS = 64
LONGEST = ("block_size", "n_positions", "max_position_embeddings", "max_seq_len", "context_length", "seq_len")
MOST = 200  # combinations that are tried


def find_batch(model: nn.Module, loss_fn: Callable[..., Any], draft: Draft) -> bool:
    """Set the batch of a draft such that a step runs; return whether the script names its size."""
    outputs: list[Any] = []
    inside = "training_step" in draft.loss[-1] or isinstance(model, nn.ModuleList)  # only parts of it are called
    modules = list(model.children()) if inside else [model]
    hooks = [each.register_forward_hook(lambda module, args, output: outputs.append(output)) for each in modules]
    inputs = [slot.code for slot in draft.slots if slot.is_input]
    targets = [slot.code for slot in draft.slots if not slot.is_input]

    def candidates() -> Iterator[tuple[dict[str, str], bool, bool]]:
        for code, known in _input_codes(model, draft):
            outputs.clear()
            first = dict.fromkeys(inputs, code)
            # Targets are found from what the model returns for the input; a model with its own loss needs none.
            yield first | dict.fromkeys(targets, "torch.zeros(batch, dtype=torch.long)"), known, not targets
            others = targets or inputs[1:]
            for target in _target_codes(outputs[-1]) if outputs and others else ():
                yield first | dict.fromkeys(others, target), known, True

    error: Exception = BadInput("no batch was found that the model takes")
    try:
        for codes, known, complete in itertools.islice(candidates(), MOST):
            try:
                _try_batch(model, loss_fn, draft, codes)
            except Exception as failed:
                error = failed
                continue
            if complete:
                where = draft.script.image_size[2]
                draft.set_batch(
                    codes,
                    f"Random data of the size in the script ({where})."
                    if known
                    else "Random data of a size that runs, found by trying: set the size of yours.",
                )
                return known
    finally:
        for hook in hooks:
            hook.remove()
    draft.batch_lines = None
    raise error


def _try_batch(model: nn.Module, loss_fn: Callable[..., Any], draft: Draft, codes: dict[str, str]) -> None:
    """Run a step on a batch of these tensors; raise what it fails with."""
    draft.set_batch(codes, "")
    made: dict[str, Any] = {"torch": torch, draft.rows: ROWS}
    exec("\n".join(draft.batch_lines or []), made)
    values = [made[name] for name in draft.batch_names]
    args, kwargs = ((), values[0]) if draft.by_keywords else (tuple(values), {})
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # it broadcasts: not what the loss is for
        loss = run_step(TrainCase(name="make", model=model, args=args, kwargs=kwargs, loss_fn=loss_fn))
    if not math.isfinite(loss):
        raise BadInput(f"the loss is {loss} on random data")


def run_step(case: TrainCase) -> float:
    """Run forward and backward; return the loss."""
    loss = case.loss()
    loss.backward()
    if not any(parameter.grad is not None for parameter in case.model.parameters()):
        raise BadInput("backward() gave no parameter a gradient: does the loss depend on this model?")
    return float(loss.detach())


def _input_codes(model: nn.Module, draft: Draft) -> Iterator[tuple[str, bool]]:
    """Code of tensors that the model may take, most likely first, and whether the script names the size."""
    if draft.slots and draft.slots[0].key == "**":
        yield from ((code, False) for code in _keyword_codes(model))
        return
    shape, height, _ = draft.script.image_size
    if shape is not None:
        yield f"torch.rand(batch, {', '.join(map(str, shape))})", True
    limits = [getattr(each, name, None) for each in (getattr(model, "config", None), model) for name in LONGEST]
    longest = min([TOKENS, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    layers = [codes for module in model.modules() if (codes := _layer_codes(module, longest, height))]
    for codes in layers[:3]:
        yield from ((code, height is not None and f", {height})" in code) for code in codes)


def _layer_codes(module: nn.Module, longest: int, height: int | None) -> list[str]:
    """Code of tensors that a layer takes."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        shapes = [*(f"(batch, {size})" for size in dict.fromkeys((longest, 32, 8))), "(batch,)"]
        return [
            f"torch.randint({module.num_embeddings}, {shape})" for shape in (*shapes, f"({min(longest, 32)}, batch)")
        ]
    if isinstance(module, nn.ConvTranspose2d):
        return [f"torch.randn(batch, {module.in_channels}, 1, 1)", f"torch.randn(batch, {module.in_channels})"]
    if isinstance(module, nn.Conv1d):
        return [f"torch.rand(batch, {module.in_channels}, {size})" for size in LENGTHS]
    if isinstance(module, nn.Conv2d):
        sizes = dict.fromkeys([*([height] if height else []), *IMAGE_SIZES])
        return [f"torch.rand(batch, {module.in_channels}, {size}, {size})" for size in sizes]
    if isinstance(module, nn.Conv3d):
        return [f"torch.rand(batch, {module.in_channels}, 16, {size}, {size})" for size in (32, 64, 112)]
    if isinstance(module, nn.Linear):
        width = module.in_features
        images = [(channels, math.isqrt(width // channels)) for channels in (1, 3)]
        shapes = [f"batch, {channels}, {side}, {side}" for channels, side in images if channels * side**2 == width > 9]
        shapes = [f"batch, {width}", *shapes, f"batch, 16, {width}", f"16, batch, {width}"]
        return [f"torch.rand({shape})" for shape in shapes]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        shapes = [f"batch, 16, {module.input_size}", f"16, batch, {module.input_size}", f"batch, {module.input_size}"]
        if not getattr(module, "batch_first", False):
            shapes[:2] = shapes[1], shapes[0]
        return [f"torch.rand({shape})" for shape in shapes]
    return []


def _keyword_codes(model: nn.Module) -> Iterator[str]:
    """Code of batches by keyword, for models of transformers."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or 100
    labels = getattr(config, "num_labels", None) or 2
    size = getattr(config, "image_size", None)
    side = size if isinstance(size, int) else 224
    longest = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    ids = f"torch.randint({vocabulary}, (batch, {longest}))"
    position = f"torch.randint({longest}, (batch,))"
    inputs = {
        "input_ids": ids,
        "pixel_values": f"torch.rand(batch, {getattr(config, 'num_channels', 3)}, {side}, {side})",
        "input_values": "torch.rand(batch, 16000)",
    }
    targets = [
        f"'labels': torch.randint({labels}, (batch,))",
        f"'labels': {ids}",
        f"'labels': torch.randint({labels}, (batch, {longest}))",
        f"'start_positions': {position}, 'end_positions': {position}",
        f"'labels': torch.rand(batch, {labels})",
    ]
    for name, code in inputs.items():
        if name in names:
            yield from (f"{{{name!r}: {code}, {target}}}" for target in targets)


def _target_codes(output: Any) -> Iterator[str]:
    """Code of targets for what the model returned, most likely first."""
    leaves = [getattr(output, "logits", None), *tree_leaves(output)]
    out = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)
    if out is None:
        return
    rows, *rest = out.shape
    size = f"batch * {rows // ROWS}" if rows > ROWS and rows % ROWS == 0 else "batch" if rows == ROWS else str(rows)
    sizes = [size, *map(str, rest)]
    whole = ", ".join(sizes)
    if rest and rest[0] > 1:  # classes, of an image or its pixels
        yield f"torch.randint({rest[0]}, ({', '.join([size, *sizes[2:]])},))"
        yield f"torch.randint({rest[0]}, ({size},))"
    if len(rest) > 1:  # tokens
        yield f"torch.randint({rest[-1]}, ({', '.join(sizes[:-1])}))"
        yield f"torch.randint({rest[-1]}, ({' * '.join(sizes[:-1])},))"
    yield f"torch.rand({whole})"
    yield f"torch.randint(2, ({whole},)).float()"
    if rest == [1]:
        yield f"torch.rand({size})"
        yield f"torch.randint(2, ({size},)).float()"
    yield f"torch.randint(2, ({size},))"
    yield f"torch.rand({size})"
