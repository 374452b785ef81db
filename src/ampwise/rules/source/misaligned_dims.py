"""Layer sizes that are not 16-byte aligned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP503",
    name="misaligned-dims",
    severity=Severity.INFO,
    summary="A layer's size is not a multiple of 8.",
    why=(
        "Tensor cores read 16-byte words: 8 elements of FP16 or BF16. A matmul with a size that is not a multiple of "
        "8 runs with slower kernels or on padded copies; multiples of 64 are preferred on an A100. It affects speed, "
        "not correctness."
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


class _Layer:
    __slots__ = ("kind", "node", "size_in", "size_out")

    def __init__(self, node: ast.Call, kind: str, size_in: int | None, size_out: int | None) -> None:
        self.node = node
        self.kind = kind
        self.size_in = size_in
        self.size_out = size_out


def check(code: SourceFile) -> Iterator[Finding]:
    layers = sorted(_layers(code), key=lambda layer: (layer.node.lineno, layer.node.col_offset))
    taken = {layer.size_in: index for index, layer in enumerate(layers) if layer.kind != "Embedding"}  # the last each
    reported: set[int] = set()
    for index, layer in enumerate(layers):
        size = layer.size_out
        if size is None or size % MULTIPLE == 0 or size <= SMALL or size in reported:
            continue
        goes_on = taken.get(size, -1) > index
        if goes_on or (layer.kind == "Linear" and size >= VOCABULARY):
            reported.add(size)
            better = -(-size // MULTIPLE) * MULTIPLE
            yield RULE.at(code.script.place(layer.node), f"{size} is not a multiple of 8; {better} is")


def _layers(code: SourceFile) -> Iterator[_Layer]:
    for node in code.nodes(ast.Call):
        space, _, kind = (code.outline.imports.qualified(node.func) or "").rpartition(".")
        if space == "torch.nn" and kind in LAYERS:
            sizes = [_size(node, name, position) for position, name in enumerate(LAYERS[kind])]
            yield _Layer(node, kind, *sizes)


def _size(call: ast.Call, name: str, position: int) -> int | None:
    """Return a size written as a literal in the layer itself; a named size was chosen elsewhere."""
    node = argument_of(call, name, position)
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) else None
