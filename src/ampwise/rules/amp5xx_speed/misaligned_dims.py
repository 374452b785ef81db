from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.check.source.precision import argument_of
from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.rules.amp5xx_speed.misaligned_layers import misaligned_layers

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.tune.align.matmuls import StepMatmuls
    from ampwise.tune.bench.speeds import SpeedComparison
    from ampwise.watch.time_use import ProfiledMatmul, TimeUse

RULE = Rule(
    code="AMP503",
    name="misaligned-dims",
    severity=Severity.INFO,
    summary="A layer's size is not a multiple of 8.",
    why=(
        "Tensor cores read 16-byte words: 8 elements of FP16 or BF16. A matmul with a size that is not a multiple of 8 "
        "runs with slower kernels or on padded copies; an A100 prefers multiples of 64. It only affects speed."
    ),
    fix="Round the size up: a hidden size of 1001 to 1008, a vocabulary of 50257 to 50304; unused rows are harmless.",
    bad="up = nn.Linear(512, 1001)\ndown = nn.Linear(1001, 512)",
    good="up = nn.Linear(512, 1008)\ndown = nn.Linear(1008, 512)",
    on_by_default=False,
)
NEEDS = (
    ("autocast", "GradScaler"),
    ("Linear(", "Conv", "Embedding("),
    (".backward(", "GradScaler", "cuda.amp", "autocast()", 'autocast("cuda', "autocast('cuda", "float16"),
)

# The names of each layer's two size arguments, in positional order.
LAYERS = {
    "Linear": ("in_features", "out_features"),
    "Embedding": ("num_embeddings", "embedding_dim"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), ("in_channels", "out_channels")),
}
MULTIPLE = 8
SMALL = 64  # below this the layer is too small to matter
VOCABULARY = 8192  # this many outputs are a vocabulary, which can be padded; fewer may be classes
NOTABLE = 0.05  # of the matmul work
LEAST = 1e9  # FLOPs per step: with less work, the launches take longer
NAMED = 3
FIX = (
    "Pad it, which does not change its results: ampwise.pad_(model), with head= if an embedding produces the logits; "
    "or round the size up where the layer is created."
)


def check_source(code: SourceFile) -> Findings:
    layers = []  # node, class, and the two sizes
    for call in code.nodes(ast.Call):
        space, _, kind = (code.outline.imports.qualified(call.func) or "").rpartition(".")
        if space == "torch.nn" and kind in LAYERS:
            # Sizes written as literals in the layer itself; a named size was chosen elsewhere.
            given = [argument_of(call, name, position) for position, name in enumerate(LAYERS[kind])]
            literals = [node.value if isinstance(node, ast.Constant) else None for node in given]
            size_in, size_out = (value if isinstance(value, int) else None for value in literals)
            layers.append((call, kind, size_in, size_out))
    layers.sort(key=lambda layer: (layer[0].lineno, layer[0].col_offset))
    taken = {size: index for index, (_, kind, size, _) in enumerate(layers) if kind != "Embedding"}  # the last each
    reported: set[int] = set()
    for index, (call, kind, _, size) in enumerate(layers):
        if size is None or size % MULTIPLE == 0 or size <= SMALL or size in reported:
            continue
        if taken.get(size, -1) > index or (kind == "Linear" and size >= VOCABULARY):
            reported.add(size)
            better = -(-size // MULTIPLE) * MULTIPLE
            yield RULE.at(code.script.place(call), f"{size} is not a multiple of 8; {better} is")


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    if row is None or speeds.device != "cuda":
        return
    off, share = _misaligned(row.products, sum(product.flops for product in row.products))
    if share >= NOTABLE:
        message = f"{row.label}: {_message(share, [f'{each.op} {each.shape}' for each in off])}"
        evidence = {"share": share, "experiment": speeds.align_command}
        yield RULE.at(Place(device=speeds.device_name), message, evidence=evidence)


def check_time(use: TimeUse) -> Findings:
    if use.device != "cuda" or use.flops < LEAST * max(use.profiled_steps, 1):
        return
    off, share = _misaligned(use.matmuls, use.flops)
    if share >= NOTABLE:
        message = _message(share, [f"{each.op} {each.shape} ({each.count} times)" for each in off])
        evidence = {"share": share, "sizes": len(off), "steps": use.profiled_steps}
        yield RULE.at(Place(device=use.device), message, evidence=evidence)


def _misaligned(products: Sequence[ProfiledMatmul], work: float) -> tuple[list[ProfiledMatmul], float]:
    """Return the misaligned matmuls, and their fraction of the work."""
    off = [product for product in products if product.is_half and product.aligned is False]
    return off, sum(product.flops for product in off) / work if work else 0.0


def _message(share: float, off: Sequence[str]) -> str:
    more = f" and {len(off) - NAMED} more" if len(off) > NAMED else ""
    named = ", ".join(off[:NAMED])
    return f"{share:.0%} of the matmul work has a row length that is not a multiple of 8: {named}{more}"


def check_matmuls(step: StepMatmuls) -> Findings:
    yield from misaligned_layers(RULE, step, "linear", FIX)
