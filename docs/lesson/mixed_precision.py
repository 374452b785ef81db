# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mixed precision training
#
# A GPU multiplies matrices of 16-bit numbers several times as fast as matrices of 32-bit ones.
# Mixed precision training uses that speed without harming the result: matmuls run in 16 bits, and
# 32 bits are kept where 16 are not enough.
#
# This lesson is a notebook. Its models are trained here, on a CPU, while the page is built; every
# number in the text is checked by an `assert` in a cell near it. Afterwards you will know
#
# - what FP32, TF32, FP16, BF16, FP8 and MX formats can hold, and what they round to zero;
# - why FP16 needs a loss scale and BF16 does not, and what BF16 costs in return;
# - how to write the training step yourself with `torch.amp`, and in one call with `ampwise.Engine`;
# - how much memory and time it saves, counted and measured;
# - fifteen ways in which it goes wrong, most of them without an error, each with its fix.
#
# Helpers come first, folded, like all code that only draws: `show` adds a figure with a text
# alternative to the page, `table` adds a table, and `results` reads a result of our benchmarks.

# %% tags=["hide-input"]
import base64
import contextlib
import copy
import io
import json
import math
import os
import tempfile
import textwrap
import warnings
from html import escape
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import display
from matplotlib.patches import Patch, Rectangle
from torch import nn

import ampwise
from ampwise.cli import main as ampwise_command
from ampwise.tune.memory.autocast_ops import FP32 as IN_FP32
from ampwise.tune.memory.autocast_ops import FP32_OUTPUT, LOWER

os.environ["NO_COLOR"] = "1"  # of what `ampwise` prints
torch.set_num_threads(1)  # small tensors: a second thread would only wait for the first

LOST, SUBNORMAL, NORMAL, OVERFLOW = "#d0534d", "#e3a23c", "#5b8fd6", "#8e5bb5"
INK, SOFT, RULE = "#1d2126", "#5f6670", "#e2e3df"
LINES = {"FP32": "#1d2126", "TF32": "#7a8794", "FP16": "#2f6fc4", "BF16": "#c26a1b"}

plt.rcParams.update(
    {
        "svg.hashsalt": "lesson",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": INK,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "legend.frameon": False,
        "figure.facecolor": "white",
    }
)


def show(figure, alt, caption):
    """Show a figure as SVG on a white background, with text for screen readers and a caption."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    source = "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()
    # On a phone, a figure keeps a width at which it can be read, and is scrolled.
    look = "background:#fff;border-radius:6px;width:100%;min-width:600px;max-width:none;padding:8px"
    image = f'<img src="{source}" alt="{escape(alt)}" style="{look}">'
    picture = f'<div tabindex="0" style="overflow-x:auto">{image}</div>'
    words = (
        f'<figcaption style="font-size:0.9em;opacity:0.85">{escape(caption)}</figcaption>'
    )
    whole = f'<figure style="margin:1em 0;max-width:820px">{picture}{words}</figure>'
    display({"text/html": whole, "text/plain": f"{alt} {caption}"}, raw=True)


def table(headings, rows):
    """Show a table, as HTML and as text."""
    lines = [headings, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    plain = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines[1:]
    )
    grid = f'<table class="docutils align-left"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    whole = f'<div class="table-wrapper docutils container">{grid}</div>'
    display({"text/html": whole, "text/plain": plain}, raw=True)


def results(name):
    """Return the rows of a benchmark result as dictionaries, and the whole file."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    file = json.loads(path.read_text(encoding="utf-8"))
    return [dict(zip(file["columns"], row, strict=True)) for row in file["rows"]], file


def measured_on(file):
    machine = file["machine"]
    where = machine.get("gpu") or machine["system"]
    return f"{where}, torch {file['versions']['torch']}, {file['date']}"


def percent(part, whole=1):
    """Format a share in percent; "0" only if it is exactly zero."""
    share = 100 * part / whole
    if share == 0 or share >= 10:
        return f"{share:.0f}"
    return "<0.01" if share < 0.01 else f"{share:.2g}"


# %% [markdown]
# The lesson reads two things from its repository: a text to train on, and the results of our own
# benchmarks. It looks for them in the folders above the notebook.


# %%
def repository():
    """Return the folder above this notebook that has both."""
    here = Path(globals().get("__file__", "notebook")).resolve().parent
    for folder in (here, *here.parents):
        if (folder / "benchmarks" / "results").is_dir():
            return folder
    raise FileNotFoundError(
        f"No ampwise checkout at or above {here}: run this notebook inside one."
    )


ROOT = repository()

# %% [markdown]
# ## 1. What a format can hold
#
# A floating-point number is a sign, an exponent and a mantissa. The exponent's bits decide the
# **range**: how large and how small a number may be. The mantissa's bits decide the **precision**:
# how many neighbours there are between 1 and 2. Every narrow format is a choice between the two,
# and all of its limits follow from three numbers.

# %% tags=["hide-input"]
NAMES = ["fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3"]
FORMATS = [ampwise.find_format(name) for name in NAMES]
PARTS = {"sign": "#5f6670", "exponent": "#5b8fd6", "mantissa": "#e3a23c"}

figure, axes = plt.subplots(figsize=(8, 2.9))
for row, fmt in enumerate(FORMATS):
    kinds = ["sign"] + ["exponent"] * fmt.exponent_bits + ["mantissa"] * fmt.mantissa_bits
    for bit, kind in enumerate(kinds):
        axes.add_patch(Rectangle((bit, -row), 0.86, 0.7, color=PARTS[kind], linewidth=0))
    for bit in range(fmt.bits, int(fmt.bytes_per_value * 8)):
        axes.add_patch(
            Rectangle(
                (bit, -row), 0.86, 0.7, fill=False, edgecolor="#c9ccc8", linewidth=0.8
            )
        )
    axes.text(
        -0.6,
        0.35 - row,
        fmt.title.removeprefix("FP8 "),
        ha="right",
        va="center",
        weight="bold",
    )
    split = f"1 + {fmt.exponent_bits} + {fmt.mantissa_bits}"
    axes.text(32.6, 0.35 - row, f"{split} = {fmt.bits} bits", va="center", color=SOFT)
axes.legend(
    handles=[Patch(color=colour, label=part) for part, colour in PARTS.items()]
    + [Patch(facecolor="white", edgecolor="#c9ccc8", label="stored, not read")],
    loc="upper center",
    bbox_to_anchor=(0.46, -0.02),
    ncols=4,
    handlelength=1,
)
axes.set(xlim=(-4, 42), ylim=(-5.3, 0.9))
axes.axis("off")
show(
    figure,
    "Six rows of coloured squares, one square a bit: sign, exponent and mantissa of FP32, TF32, BF16, FP16, E5M2 "
    "and E4M3.",
    "The bits of six formats. TF32 is how tensor cores may read FP32 tensors: 19 bits count, 32 are stored.",
)
assert [fmt.bits for fmt in FORMATS] == [32, 19, 16, 16, 8, 8]
assert [fmt.bytes_per_value for fmt in FORMATS] == [4, 4, 2, 2, 1, 1]

# %% [markdown]
# Below the smallest number that has all of its mantissa bits, the smallest *normal*, formats go on
# for a while with **subnormals**: the smaller the number, the fewer bits are left of it, down to
# one. Guides often confuse the two. FP16's smallest normal is 6.10e-5; its smallest number is
# 5.96e-8. Nor do numbers become zero right below that: a number is rounded to the nearer neighbour,
# so everything above half of the smallest one survives.

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 3.1))
for row, fmt in enumerate(FORMATS):
    low, normal, high = (
        math.log2(limit) for limit in (fmt.smallest, fmt.smallest_normal, fmt.max)
    )
    axes.barh(-row, normal - low, left=low, height=0.56, color=SUBNORMAL)
    axes.barh(-row, high - normal, left=normal, height=0.56, color=NORMAL)
    axes.text(
        low - 3,
        -row,
        f"{fmt.smallest:.1e}",
        ha="right",
        va="center",
        fontsize=8.5,
        color=SOFT,
    )
    axes.text(
        high + 3,
        -row,
        f"{fmt.max:.2g}" if high > 20 else f"{fmt.max:,.0f}",
        va="center",
        fontsize=8.5,
        color=SOFT,
    )
axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
axes.set_yticks(
    [-row for row in range(len(FORMATS))],
    [fmt.title.removeprefix("FP8 ") for fmt in FORMATS],
)
axes.set_xticks(
    range(-150, 151, 25), [f"$2^{{{e}}}$" if e else "1" for e in range(-150, 151, 25)]
)
axes.set(xlim=(-186, 160))
axes.legend(
    handles=[
        Patch(color=NORMAL, label="normal: all bits"),
        Patch(color=SUBNORMAL, label="subnormal: fewer bits"),
    ],
    loc="upper center",
    bbox_to_anchor=(0.5, -0.1),
    ncols=2,
    handlelength=1.2,
)
show(
    figure,
    "Bars over powers of two. FP32, TF32 and BF16 reach from about 2 to the -140 to 2 to the 128; FP16 and E5M2 "
    "from about 2 to the -24 and -16 to 2 to the 16; E4M3 from 2 to the -9 to 448.",
    "What each format reaches, from its smallest number above zero to its largest. BF16 has FP32's range, FP16 does "
    "not.",
)

# %% [markdown]
# The same limits as numbers, and tests of what guides get wrong about FP16:

# %%
COLUMNS = {
    "largest": lambda fmt: f"{fmt.max:.5g}",
    "smallest normal": lambda fmt: f"{fmt.smallest_normal:.3g}",
    "smallest": lambda fmt: f"{fmt.smallest:.3g}",
    "rounds to 0 at or below": lambda fmt: f"2^{fmt.flush_exponent}",
    "gap above 1": lambda fmt: f"{fmt.epsilon:.3g}",
    "digits": lambda fmt: f"{fmt.decimal_digits:.1f}",
}
table(
    ["format", *COLUMNS],
    [[f.title, *(said(f) for said in COLUMNS.values())] for f in FORMATS],
)


def fp16(value):
    return torch.tensor(value, dtype=torch.float64).half().item()


FP16, BF16 = ampwise.find_format("fp16"), ampwise.find_format("bf16")
assert (FP16.max, FP16.smallest_normal, FP16.smallest) == (65504, 2.0**-14, 2.0**-24)
assert f"{FP16.smallest_normal:.3g} {FP16.smallest:.3g}" == "6.1e-05 5.96e-08"
assert fp16(1e-7) == fp16(1.2e-7) == 2 * 2.0**-24  # two guides say: 0. It is 1.19e-7
assert fp16(3e-8) == 2.0**-24  # up to the smallest number
assert fp16(2.98e-8) == fp16(2.0**-25) == 0  # everything below becomes 0
assert fp16(65519) == 65504
assert fp16(65520) == math.inf
assert BF16.max > 3.3e38
assert BF16.epsilon == 8 * FP16.epsilon  # three bits fewer

# %% [markdown]
# ### Blocks that share a scale
#
# Eight bits are too few for a tensor as it is: E4M3 ends at 448 and begins at 2⁻⁹. So FP8 is always
# used with a scale: one for a whole tensor, if its values are similar; an **MX block** has one for
# every 32 values: a power of two, stored once in 8 bits (E8M0). MXFP8 is E4M3 in such blocks, and
# takes 8.25 bits a value. MXFP4 does the same with 4-bit elements. NVFP4 has 4-bit elements in blocks
# of 16, each with a scale in E4M3, and one more scale for the whole tensor.
#
# Below are 128 numbers whose size changes from block to block. Plain E4M3 loses half
# of them; with a scale for each block, the range moves along with the numbers.

# %% tags=["hide-input"]
MXFP8, E4M3 = ampwise.find_format("mxfp8"), ampwise.find_format("e4m3")
generator = torch.Generator().manual_seed(0)
sizes = torch.tensor([2.0**-2, 2.0**-14, 2.0**-6, 2.0**-18]).repeat_interleave(32)
row = sizes * torch.randn(128, generator=generator)

figure, both = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
kept_share = {}
for axes, fmt in zip(both, (E4M3, MXFP8), strict=True):
    kept = ampwise.cast(row, fmt.name) != 0
    kept_share[fmt.title] = kept.float().mean().item()
    for start in range(0, 128, 32):
        largest = row[start : start + 32].abs().max().item()
        # The rule of the MX specification: 2**8 is the largest power of two that E4M3 holds.
        scale = 2.0 ** (math.floor(math.log2(largest)) - 8) if fmt is MXFP8 else 1.0
        low, normal, high = (
            math.log2(scale * limit)
            for limit in (E4M3.smallest, E4M3.smallest_normal, E4M3.max)
        )
        axes.add_patch(
            Rectangle(
                (start, normal), 32, high - normal, color=NORMAL, alpha=0.22, linewidth=0
            )
        )
        axes.add_patch(
            Rectangle(
                (start, low), 32, normal - low, color=SUBNORMAL, alpha=0.35, linewidth=0
            )
        )
    sizes, places = row.abs().log2(), torch.arange(128) + 0.5
    axes.plot(places[kept], sizes[kept], ".", color=INK, markersize=4)
    axes.plot(places[~kept], sizes[~kept], "x", color=LOST, markersize=4.5)
    scales = "no scale" if fmt is E4M3 else "a scale for every 32"
    axes.set_title(f"{fmt.title}, {scales}: {percent(1 - kept_share[fmt.title])} % lost")
    axes.set(
        xlim=(0, 128), ylim=(-35, 12), xticks=range(0, 129, 32), xlabel="place in the row"
    )
both[0].set_yticks(
    range(-32, 13, 8), [f"$2^{{{e}}}$" if e else "1" for e in range(-32, 13, 8)]
)
both[0].set_ylabel("magnitude")
show(
    figure,
    "Two panels with the same 128 points in four groups of 32. Left, one fixed band for E4M3: two groups lie below "
    "it and are crossed out. Right, a band of the same height for each group, at its height: nothing is crossed out.",
    "Shaded: what E4M3 can hold (blue with all bits, amber with fewer). Crosses are rounded to zero.",
)
assert kept_share[E4M3.title] < 0.6
assert kept_share[MXFP8.title] > 0.98
assert (MXFP8.block_size, MXFP8.bits_per_value, E4M3.max, E4M3.smallest) == (
    32,
    8.25,
    448,
    2.0**-9,
)
assert ampwise.find_format("mxfp4").block_size == 32
NVFP4 = ampwise.find_format("nvfp4")
assert (NVFP4.block_size, NVFP4.scale, NVFP4.tensor_scale) == (16, E4M3, True)

# %% [markdown]
# ## 2. The gradients of a real model
#
# Weights are no problem: nearly all are within a factor of a thousand of 1, and any 16-bit format
# holds that. Gradients are different. A loss is a mean over many predictions, 1024 here, so each
# prediction contributes a thousandth or less, and in the backward pass a gradient is multiplied by
# small weights, layer after layer.
#
# The model is a GPT with four blocks that learns to write *Paradise Lost* letter by letter. Its
# matmuls go through `multiply`, which does what the tensor cores of a GPU do under autocast:
# operands in 16 bits, sums in FP32, a result in 16 bits. (CPUs have autocast, too, but few multiply
# in FP16 quickly.)


# %%
EMULATED = True


def multiply(operation, *operands, **options):
    """Run ``operation`` as tensor cores do under autocast: with FP32 sums."""
    if not (EMULATED and torch.is_autocast_enabled("cpu")):
        return operation(*operands, **options)
    narrow = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        rounded = (operand.to(narrow).float() for operand in operands)
        return operation(*rounded, **options).to(narrow)


class Linear(nn.Linear):
    def forward(self, x):
        bias = [] if self.bias is None else [self.bias]
        return multiply(F.linear, x, self.weight, *bias)


# %% [markdown]
# The model is a standard one: attention and a layer of ReLUs, four times, between an embedding and a
# head.


# %%
class Block(nn.Module):
    bend = staticmethod(F.relu)

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.join = Linear(width, width, bias=False)
        self.expand = Linear(width, 4 * width, bias=False)
        self.contract = Linear(4 * width, width, bias=False)

    def forward(self, x):
        query, key, value = (
            self.qkv(self.ln_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = multiply(
            F.scaled_dot_product_attention, query, key, value, is_causal=True
        )
        x = x + self.join(mixed.transpose(1, 2).flatten(-2))
        return x + self.contract(self.bend(self.expand(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, letters, width=48, blocks=4, context=128):
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(letters, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.ln, self.head = nn.LayerNorm(width), Linear(width, letters, bias=False)
        for matrix in (
            parameter for parameter in self.parameters() if parameter.ndim == 2
        ):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, x):
        return self.head(
            self.ln(self.blocks(self.letters(x) + self.places.weight[: x.shape[1]]))
        )


# %% [markdown]
# Its data: windows of 128 letters, eight at a time, the same ones for every run below.

# %%
TEXT = (ROOT / "benchmarks" / "data" / "paradise_lost.txt").read_text(encoding="utf-8")
LETTERS = {letter: number for number, letter in enumerate(sorted(set(TEXT)))}
WINDOWS = torch.tensor([LETTERS[letter] for letter in TEXT]).unfold(0, 129, 1)
STEPS = 40


def batches(steps=STEPS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        picked = WINDOWS[torch.randint(len(WINDOWS), (8,), generator=generator)]
        yield picked[:, :-1], picked[:, 1:]


def fresh():
    """Return the untrained model, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(len(LETTERS))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def warmup(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=10)


def loss_of(model, x, y):
    """Return the loss, which is always computed in FP32."""
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


# %% [markdown]
# Train it, in FP32 for now, with a short warm-up and gradient clipping. Later sections compare with
# these losses.

# %%
model, optimizer = fresh()
scheduler = warmup(optimizer)
losses = {"FP32": []}
for x, y in batches():
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    losses["FP32"].append(loss.item())

wide_model = model
parameters = sum(parameter.numel() for parameter in model.parameters())
first, final = losses["FP32"][0], losses["FP32"][-1]
print(f"{parameters:,} parameters; loss {first:.2f} -> {final:.2f} in {STEPS} steps")
assert first > 4.2
assert final < 3
assert y.numel() == 1024
weights = ampwise.census(dict(wide_model.named_parameters())).total()
near_one = sum(count for exponent, count in weights.histogram() if -10 <= exponent < 10)
assert near_one > 0.9 * weights.nonzeros

# %% [markdown]
# Now look at one backward pass. Two kinds of gradients are 16-bit under autocast: those of
# **activations**, which flow from layer to layer, and those of **weights**, which are the result of
# a matmul before they are accumulated in FP32. `ampwise.census` counts them by powers of two. One
# count answers every question that follows, since scaling by a power of two only shifts it.


# %%
def gradients(model, x, y, dtype=None, scale=1.0):
    """Return the gradients of each linear layer's output, and those of each weight."""
    activations = {}
    hooks = [
        module.register_full_backward_hook(
            lambda _, __, flowing, name=name: activations.update(
                {name: flowing[0].clone()}
            )
        )
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    ]
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = loss_of(model, x, y)
    (loss * scale).backward()  # noqa: AMP308
    for hook in hooks:
        hook.remove()
    weights = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }
    return activations, weights


x, y = next(batches(seed=7))
exact_activations, exact_weights = gradients(wide_model, x, y)
flowing, arriving = (ampwise.census(exact_activations), ampwise.census(exact_weights))
whole = flowing.total()
lost, short = whole.flushed("fp16"), whole.subnormal("fp16").high
print(f"{whole.nonzeros:,} gradients, from {whole.amin:.1e} to {whole.amax:.1e}")
print(f"FP16 makes {lost:,} of them zero, and takes bits from {short:,} more")

# %% [markdown]
# The same as a figure. Each bar is a power of two, coloured by what FP16 does to it.

# %% tags=["hide-input"]
FATES = {"gone": LOST, "fewer bits": SUBNORMAL, "as it is": NORMAL, "inf": OVERFLOW}


def fate(exponent, fmt=FP16):
    """Return what a format does to numbers between 2**exponent and 2**(exponent + 1)."""
    if exponent + 1 <= fmt.flush_exponent:
        return "gone"
    if exponent + 1 <= fmt.lowest_exponent:
        return "fewer bits"
    return "inf" if exponent > fmt.overflow_binade else "as it is"


def draw_gradients(axes, census, k=0, left=-44, right=24):
    """Draw a histogram of these numbers times 2**k by powers of two, with FP16's limits."""
    moved = census.scaled(k)
    for exponent, count in moved.histogram():
        fell = fate(exponent)
        share = 100 * count / moved.nonzeros
        axes.bar(exponent + 0.5, share, width=0.88, color=FATES[fell])
    axes.axvspan(left, FP16.flush_exponent, color=LOST, alpha=0.09, linewidth=0)
    axes.axvspan(
        math.log2(FP16.overflow_threshold), right, color=OVERFLOW, alpha=0.11, linewidth=0
    )
    for limit in (
        FP16.flush_exponent,
        FP16.lowest_exponent,
        math.log2(FP16.overflow_threshold),
    ):
        axes.axvline(limit, color=INK, linewidth=0.8, linestyle="--")
    ticks = [-40, -32, -25, -14, -8, 0, 8, 16]
    axes.set(xlim=(left, right), ylabel="% of them")
    axes.set_xticks(ticks, [f"$2^{{{e}}}$" if e else "1" for e in ticks])


def legend_of_fates(figure):
    handles = [Patch(color=colour, label=name) for name, colour in FATES.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        handlelength=1.4,
        title="in FP16",
    )


def said_of(census, k=0):
    lost, short = census.flushed("fp16", k), census.subnormal("fp16", k).high
    gone, shortened = percent(lost, census.nonzeros), percent(short, census.nonzeros)
    return f"{gone} % gone, {shortened} % with fewer bits"


figure, (above, below) = plt.subplots(
    2, 1, figsize=(8, 4.6), sharex=True, layout="constrained"
)
draw_gradients(above, whole)
draw_gradients(below, arriving.total())
above.set_title(f"gradients of activations: {said_of(whole)}")
below.set_title(f"gradients of weights: {said_of(arriving.total())}")
for limit, words, side in (
    (-25.4, "becomes zero", "right"),
    (-13.6, "all bits", "left"),
    (16.4, "inf", "left"),
):
    above.text(limit, above.get_ylim()[1] * 0.92, words, ha=side, fontsize=9, color=SOFT)
below.set_xlabel("magnitude of a gradient, without a loss scale")
legend_of_fates(figure)
show(
    figure,
    "Two histograms over powers of two with FP16's limits as dashed lines. The activations' gradients lie mostly "
    "between the limits of zero and of all bits, and their left tail reaches into the zone that becomes zero. Most of "
    "the weights' gradients lie right of both. Above 1 there is nothing.",
    "One backward pass of the trained model, in FP32. Left of 2⁻²⁵ FP16 has only zero "
    f"({percent(whole.flushed('fp16'), whole.nonzeros)} % of what flows between layers); up to 2⁻¹⁴ it keeps fewer "
    "bits; from 65520 on it has only inf.",
)
lost_share = whole.flushed("fp16") / whole.nonzeros
assert 0.03 < lost_share < 0.15
assert whole.subnormal("fp16").high / whole.nonzeros > 0.7
assert arriving.total().flushed("fp16") / arriving.total().nonzeros < 0.01
assert max(whole.amax, arriving.total().amax) < 1
assert arriving.total().subnormal("fp16").high / arriving.total().nonzeros < 0.5

# %% [markdown]
# This is not quite what guides say. The gradients of weights survive: they are sums over a thousand
# letters. FP16 harms the gradients that flow *between* layers. Some become zero, and more than seven
# in ten lose bits. All of FP16's range above 1, meanwhile, is unused.
#
# The damage is also uneven. Nearly all gradients that become zero belong to `qkv`, the layer that
# computes the queries, keys and values of attention, and most of them to the keys. Their gradients
# are small differences while attention is still nearly uniform:


# %%
def gone(gradient):
    counted = ampwise.census(gradient)
    return counted.flushed("fp16") / counted.nonzeros


by_layer = {name: gone(gradient) for name, gradient in exact_activations.items()}
last = exact_activations["blocks.3.qkv"].chunk(3, dim=-1)
by_part = {
    f"blocks.3.qkv, {part}": gone(g)
    for part, g in zip(["queries", "keys", "values"], last, strict=True)
}
worst = sorted(by_layer, key=by_layer.get, reverse=True)[:5]
shares = {name: by_layer[name] for name in worst} | by_part
table(
    ["flowing back into", "% gone in FP16"], [[n, percent(s)] for n, s in shares.items()]
)
assert all(name.endswith("qkv") for name in worst[:3])
assert by_layer[worst[0]] > 0.1 > 10 * by_layer[worst[4]]
queries, keys, values = by_part.values()
assert keys > 2 * queries > 4 * values

# %% [markdown]
# This was a prediction from FP32 gradients. To test it, run the same pass in FP16 without a loss
# scale, and count the zeros that are not zero in FP32:


# %%
def zeroed(narrow):
    """Return the share of FP32's non-zero gradients that became zero."""
    gone = sum(
        int(((exact_activations[name] != 0) & (narrow[name] == 0)).sum())
        for name in narrow
    )
    return gone / whole.nonzeros


unscaled, _ = gradients(wide_model, x, y, torch.float16)
print(f"predicted {percent(lost_share)} %, measured {percent(zeroed(unscaled))} %")
assert all(gradient.dtype == torch.float16 for gradient in unscaled.values())
assert abs(zeroed(unscaled) - lost_share) < 0.02

# %% [markdown]
# ## 3. Loss scaling shifts the gradients
#
# Multiply the loss by 2¹⁶, and by the chain rule every gradient is multiplied by 2¹⁶: the histogram
# moves 16 places to the right, into the unused part. Divide by 2¹⁶ in FP32 before the optimizer
# step, and only the rounding has changed: scaling by a power of two loses no bits. Too large a scale
# makes the largest gradients overflow.

# %% tags=["hide-input"]
edge = max(
    k for k in range(64) if not whole.overflowed("fp16", k)
)  # the largest that fits
figure, rows = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
for axes, k in zip(rows, (0, 16, edge + 8), strict=True):
    draw_gradients(axes, whole, k)
    over = whole.overflowed("fp16", k)
    scale = f"scale $\\mathbf{{2^{{{k}}}}}$" if k else "no scale"
    beyond = (
        f", {over.low:,} to {over.high:,} are inf: the step is lost" if over.high else ""
    )
    axes.set_title(f"{scale}: {said_of(whole, k)}{beyond}")
rows[-1].set_xlabel("magnitude of a gradient of activations, times the scale")
legend_of_fates(figure)
show(
    figure,
    "The same histogram three times: without a scale, its left tail is in the zone of zeros; times 2 to the 16 it "
    "lies in the middle of FP16's range; times a still larger scale its right end is beyond the limit.",
    "A loss scale moves the histogram. At 2¹⁶, with which torch begins, "
    f"{percent(whole.flushed('fp16', 16), whole.nonzeros)} % vanish.",
)
assert whole.flushed("fp16", 16) / whole.nonzeros < lost_share / 50
assert not whole.overflowed("fp16", 16)
assert whole.overflowed("fp16", edge + 8).low > 0

# %% [markdown]
# The same count shows what *every* scale would do. There is a wide range between underflow and
# overflow, so a loss scale need not be exact, and can be found by trial.

# %% tags=["hide-input"]
exponents = range(-4, 37)
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
gone = [100 * whole.flushed("fp16", k) / whole.nonzeros for k in exponents]
short = [
    100 * (whole.flushed("fp16", k) + whole.subnormal("fp16", k).high) / whole.nonzeros
    for k in exponents
]
axes.fill_between(exponents, gone, color=LOST, alpha=0.75, linewidth=0)
axes.fill_between(exponents, gone, short, color=SUBNORMAL, alpha=0.5, linewidth=0)
axes.axvspan(edge + 0.5, 36, color=OVERFLOW, alpha=0.16, linewidth=0)
axes.axvline(16, color=INK, linewidth=0.8, linestyle="--")
axes.text(15.7, 82, "torch begins here", ha="right", fontsize=9, color=SOFT)
axes.text(
    edge + 1.1,
    42,
    "the largest gradient is inf:\nevery step is skipped",
    fontsize=9,
    color=SOFT,
)
axes.text(0.6, 24, "fewer bits", fontsize=9)
axes.text(-3.7, 6, "gone", fontsize=9, color="white", weight="bold")
axes.set(xlim=(-4, 36), ylim=(0, 100), ylabel="% of the gradients", xlabel="loss scale")
axes.set_xticks(range(0, 37, 4), [f"$2^{{{k}}}$" for k in range(0, 37, 4)])
show(
    figure,
    "Share of gradients that vanish or lose bits against the loss scale: both fall to nothing towards 2 to the 16; "
    "further on a shaded zone begins in which the largest gradient overflows.",
    f"What every loss scale would do to these gradients. Up to 2^{edge} nothing overflows.",
)
assert 18 <= edge <= 30

# %% [markdown]
# Measured in FP16, with the scale:

# %%
scaled, _ = gradients(wide_model, x, y, torch.float16, scale=2.0**16)
without, with_it = percent(zeroed(unscaled)), percent(zeroed(scaled))
print(f"{without} % vanish without a scale, {with_it} % with it")
assert zeroed(scaled) < zeroed(unscaled) / 20

# %% [markdown]
# ## 4. Overflow
#
# The other end of FP16's range is near: 65504. There are four ways to exceed it, and a smaller loss
# scale fixes only one of them.

# %%
product = multiply(F.linear, torch.full((1, 64), 40.0), torch.full((1, 64), 40.0)).item()
with torch.autocast("cpu", torch.float16):
    overflowed = multiply(
        F.linear, torch.full((1, 64), 40.0), torch.full((1, 64), 40.0)
    ).item()
print(
    f"a product of two rows of 64 forties: {product:,.0f} in FP32, {overflowed} in FP16"
)
print(
    "exp(11.08), exp(11.1) in FP16:", *torch.tensor([11.08, 11.1]).half().exp().tolist()
)
print(
    "a sum of 70,000 ones in FP16:", torch.ones(70_000, dtype=torch.float16).sum().item()
)
_, pushed = gradients(wide_model, x, y, torch.float16, scale=2.0 ** (edge + 8))
bad = sum(not gradient.isfinite().all() for gradient in pushed.values())
print(f"gradients at a scale of 2^{edge + 8}: {bad} of {len(pushed)} have inf or NaN")
assert product == 102_400
assert overflowed == math.inf
assert torch.tensor(11.08).half().exp().isfinite()
assert torch.tensor(11.1).half().exp().isinf()
assert torch.ones(70_000, dtype=torch.float16).sum().isinf()
assert torch.tensor(88.0).bfloat16().exp().isfinite()
assert torch.tensor(89.0).bfloat16().exp().isinf()
assert bad > 0

# %% [markdown]
# The last is normal: *scaled gradients* overflow, the step is skipped, the scale is halved, and only
# one batch is lost. An overflow in the *forward* pass (the first three) is a bug at any scale:
# compute that part in FP32, or use BF16, whose `exp` works up to 88.
#
# To tell the two apart, repeat the step with a scale of 1. If the gradients are finite, it was the
# scale. (ampwise finds [where a NaN came from](../trace.md) automatically.)
#
# ### Dynamic loss scaling
#
# So the scale is found by trial. `GradScaler` starts at 65536, halves after every overflow, and
# doubles after 2000 steps without one. The whole rule:


# %%
def next_scale(scale, clean_steps, overflowed, interval=2000):
    """Return the scale and the count of clean steps after a step."""
    if overflowed:
        return scale / 2, 0
    return (scale * 2, 0) if clean_steps + 1 == interval else (scale, clean_steps + 1)


scaler = torch.amp.GradScaler("cpu")
assert scaler.get_scale() == 65536.0
assert scaler.get_growth_interval() == 2000
assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
assert next_scale(65536.0, 5, overflowed=True) == (32768.0, 0)
assert next_scale(65536.0, 1999, overflowed=False) == (131072.0, 0)

# %% [markdown]
# ## 5. The step with torch.amp
#
# Here is the complete step with `torch.amp`. The order matters: section 9 shows what happens if a
# line is in another place.
#
# 1. run the forward pass **inside** autocast, and the backward pass outside;
# 2. `scale` the loss, and call backward on that;
# 3. `unscale_`, then clip: the norm must be that of unscaled gradients;
# 4. `scaler.step` skips the optimizer step if a gradient is inf or NaN;
# 5. `update` changes the scale, once a step;
# 6. the scheduler advances only if the optimizer did. `torch.amp` does not say whether it did; the
#    usual sign is that the scale went down, and reading the scale syncs with the GPU.
#
# To see something within 40 steps, the scale starts far too high, and tries to double every 9
# steps.

# %%
SCALING = {"init_scale": 2.0**24, "growth_interval": 9}


def train_by_hand(model, optimizer, data):
    scaler, scheduler = torch.amp.GradScaler("cpu", **SCALING), warmup(optimizer)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < before
        if not skipped:
            scheduler.step()
        yield loss.item(), before, skipped


model, optimizer = fresh()
told, weights_by_hand = [], None
for number, facts in enumerate(train_by_hand(model, optimizer, batches()), start=1):
    told.append(facts)
    if number == 12:
        weights_by_hand = copy.deepcopy(model.state_dict())
losses["FP16"] = [loss for loss, _, _ in told]
skips = [number for number, (_, _, skipped) in enumerate(told) if skipped]
first, final = losses["FP16"][0], losses["FP16"][-1]
print(f"FP16: loss {first:.2f} -> {final:.2f}, {len(skips)} of {STEPS} steps skipped")

# %% [markdown]
# The scale falls from its wrong start to where the gradients fit, one skipped step at a time, and
# then tries a larger scale from time to time:

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
scales = [math.log2(scale) for _, scale, _ in told]
axes.step(
    range(STEPS),
    scales,
    where="post",
    color=LINES["FP16"],
    linewidth=1.8,
    label="loss scale",
)
axes.plot(
    skips,
    [scales[number] for number in skips],
    "x",
    color=LOST,
    markersize=7,
    label="skipped: inf in a gradient",
)
axes.set(xlabel="step", xlim=(-1, STEPS))
axes.set_yticks(range(16, 25, 2), [f"$2^{{{k}}}$" for k in range(16, 25, 2)])
axes.legend(loc="upper right", ncols=2)
show(
    figure,
    "The loss scale over 40 steps: a stair down from 2 to the 24 with a cross at each of the first steps, then "
    "level parts of 9 steps that rise by one and now and then fall back with a cross.",
    f"{len(skips)} skipped steps, {len([n for n in skips if n < 20])} of them while the scale finds its place.",
)
falling = [skipped for _, _, skipped in told].index(False)
assert skips[:falling] == list(range(falling))
assert 3 <= falling <= 16
assert all(
    told[number + 1][1] == told[number][1] / 2 for number in skips if number + 1 < STEPS
)
assert max(scales[falling:]) > scales[falling]  # it has tried to grow
scale, clean_steps = SCALING["init_scale"], 0
for _, told_scale, skipped in told:  # the rule written down above, step by step
    assert told_scale == scale
    scale, clean_steps = next_scale(
        scale, clean_steps, skipped, SCALING["growth_interval"]
    )

# %% [markdown]
# ### What autocast does
#
# Autocast decides by operation. Matmuls run in 16 bits, whatever their input dtype. For other
# operations there are lists, which are **not the same on a CPU as on CUDA**: softmax, layer_norm, sum
# and exp run in FP32 on CUDA, but on a CPU in the dtype of their input, which after a matmul is FP16;
# mean and batch_norm are on neither list. The CPU column below is measured with FP16 and FP32 inputs;
# the CUDA column is torch's list. ([All operations](../concepts/autocast.md).)

# %% tags=["hide-input"]
ones = torch.ones(4)
TRIED = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4)),
    "matmul": lambda x: x @ torch.ones(4, 4),
    "softmax.int": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), ones, ones),
    "batch_norm": lambda x: F.batch_norm(x, ones.clone(), ones.clone(), ones, ones),
    "exp": torch.exp,
    "sum": torch.sum,
    "mean": torch.mean,
    "mse_loss": lambda x: F.mse_loss(x, x),
}


def runs_in(operation):
    """Return what an operation runs in under CPU autocast, by its output dtype."""
    with torch.autocast("cpu", torch.float16):
        out = {operation(torch.ones(4, 4, dtype=given)).dtype for given in SHORT}
    return SHORT[out.pop()] if len(out) == 1 else "as it comes"


SHORT = {torch.float16: "FP16", torch.float32: "FP32"}
on_cpu = {name: runs_in(operation) for name, operation in TRIED.items()}
on_cuda = {
    name: "FP16"
    if name in LOWER
    else "FP32"
    if name in IN_FP32 | FP32_OUTPUT
    else "as it comes"
    for name in TRIED
}
table(
    ["operation, in FP16 autocast", "CPU", "CUDA"],
    [[name.split(".")[0], on_cpu[name], on_cuda[name]] for name in TRIED],
)
assert on_cpu["linear"] == on_cuda["linear"] == "FP16"
for name in ("softmax.int", "layer_norm", "sum", "exp"):
    assert (on_cpu[name], on_cuda[name]) == ("as it comes", "FP32")
for name in ("mean", "batch_norm"):
    assert on_cpu[name] == on_cuda[name] == "as it comes"

# %% [markdown]
# ## 6. The step with Engine
#
# The same step in one call. `Engine` does what the loop above does, always in the right order, and
# reports for every step whether it was skipped. On a CPU its weights equal those of the loop above,
# bit for bit. (`trace=False` disables the replay that explains bad steps; here they are
# intentional.)

# %%
model, optimizer = fresh()
engine = ampwise.Engine(
    model,
    optimizer,
    precision="fp16",
    clip_norm=1.0,
    scheduler=warmup(optimizer),
    scaling=SCALING,
    trace=False,
)
for x, y in batches(steps=12):
    step = engine.step(lambda x, y: loss_of(model, x, y), x, y)

print(step, f"skipped {engine.skipped_steps} so far")
assert all(
    torch.equal(weight, weights_by_hand[name])
    for name, weight in model.state_dict().items()
)
assert engine.history["skipped"] == [skipped for _, _, skipped in told[:12]]

# %% [markdown]
# ## 7. FP16 or BF16
#
# BF16 has FP32's exponent. The histogram of section 2 fits it without any scale, with more than forty
# powers of two to spare at its lower end. In return it has three fewer mantissa bits: BF16 rounds
# eight times as coarsely as FP16. The error of a gradient is eight times as large, too, if the model
# is smooth. With ReLU the ratio is smaller, since both formats have an additional error: where
# rounding moves a number across zero, a whole gradient is switched on or off.

# %%
for name in ("fp16", "bf16"):
    lost = percent(whole.flushed(name), whole.nonzeros)
    short = percent(whole.subnormal(name).high, whole.nonzeros)
    print(f"{name} without a scale: {lost} % gone, {short} % with fewer bits")


def error_of(dtype, scale):
    """Return the relative error of the weights' gradients against FP32."""
    _, exact = gradients(wide_model, *next(batches(seed=7)))
    _, narrow = gradients(wide_model, *next(batches(seed=7)), dtype, scale)
    apart = sum((narrow[n].double() / scale - exact[n]).square().sum() for n in exact)
    return math.sqrt(
        apart / sum(gradient.double().square().sum() for gradient in exact.values())
    )


def rounding_of(dtype):
    matrix = wide_model.head.weight.detach()
    return ((matrix.to(dtype).float() - matrix).norm() / matrix.norm()).item()


errors = {"a rounded matrix": [rounding_of(torch.float16), rounding_of(torch.bfloat16)]}
for name, bend in {"GELU": F.gelu, "ReLU": F.relu}.items():
    Block.bend = staticmethod(bend)
    of_both = [error_of(torch.float16, 2.0**16), error_of(torch.bfloat16, 1.0)]
    errors[f"the gradient, with {name}"] = of_both
print("errors, as a share:")
for what, (in_16, in_b16) in errors.items():
    print(f"{what}: FP16 {in_16:.1e}, BF16 {in_b16:.1e}: {in_b16 / in_16:.1f} times")
assert whole.amin > BF16.smallest_normal * 2.0**40
times = {what: in_b16 / in_16 for what, (in_16, in_b16) in errors.items()}
assert 7.5 < times["a rounded matrix"] < 8.5
assert 6.5 < times["the gradient, with GELU"] < 9.5
assert 2 < times["the gradient, with ReLU"] < 6

# %% [markdown]
# Does that matter? Train once more, in BF16, with the Engine: no scale, no skipped step. The noise of
# the batches is much larger than that of the rounding.

# %%
model, optimizer = fresh()
engine = ampwise.Engine(
    model,
    optimizer,
    precision="bf16",
    clip_norm=1.0,
    scheduler=warmup(optimizer),
    trace=False,
)
for x, y in batches():
    step = engine.step(lambda x, y: loss_of(model, x, y), x, y)
losses["BF16"] = engine.history["loss"]
assert engine.skipped_steps == 0
assert step.scale == 1

# %% [markdown]
# The three runs together. FP16 is a few steps behind: it skipped steps while its scale came down from
# the value that this lesson chose:

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(losses["FP32"], color="#c3c7cb", linewidth=5, label="FP32")
axes.plot(losses["FP16"], "--", color=LINES["FP16"], linewidth=1.8, label="FP16")
axes.plot(losses["BF16"], color=LINES["BF16"], linewidth=1.5, label="BF16")
axes.axvspan(0, falling, color=LOST, alpha=0.08, linewidth=0)
axes.text(falling / 2, 2.35, "FP16\nskips", ha="center", fontsize=9, color=SOFT)
axes.set(xlabel="step", ylabel="loss", xlim=(0, STEPS - 1), ylim=(2.2, 4.5))
axes.legend(loc="upper right")
show(
    figure,
    "Three falling loss curves. FP32 and BF16 nearly coincide; FP16 stays level for its skipped steps, then falls "
    "alike.",
    "The same model, data, seed, warm-up and clipping in three precisions.",
)
last = {name: sum(curve[-10:]) / 10 for name, curve in losses.items()}
print(
    "mean loss of the last ten steps:",
    {name: round(loss, 3) for name, loss in last.items()},
)
apart = max(abs(a - b) for a, b in zip(losses["BF16"], losses["FP32"], strict=True))
wobble = max(abs(a - b) for a, b in pairwise(losses["FP32"][-10:]))
print(
    f"BF16 and FP32 are never more than {apart:.3f} apart; from step to step: up to {wobble:.3f}"
)
assert 0 < apart < wobble / 10
assert abs(last["FP16"] - last["FP32"]) < 0.2

# %% [markdown]
# So: **BF16 where the hardware multiplies in it, FP16 with a loss scale where it does not.** That
# depends on the device's tensor cores, not on what torch reports:
# `torch.cuda.is_bf16_supported()` returns True for a V100, which emulates it slowly, unless you pass
# `including_emulation=False`. `precision="auto"` chooses by the tensor cores; for other devices than
# this machine's there is a catalog:

# %%
CARDS = [
    "Tesla V100-SXM2-16GB",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA B200",
]
known = {name: ampwise.find_gpu(name).tensor_core_formats for name in CARDS}
asked = ["tf32", "fp16", "bf16", "fp8", "mxfp8"]
table(
    ["device", *asked],
    [[name, *("yes" if fmt in known[name] else "-" for fmt in asked)] for name in CARDS],
)
assert "bf16" not in known["Tesla V100-SXM2-16GB"]
assert "bf16" in known["NVIDIA GeForce RTX 3090"]  # guides say it has none
assert "fp8" not in known["NVIDIA GeForce RTX 3090"]
assert "fp8" in known["NVIDIA H100 80GB HBM3"]

# %% [markdown]
# There are two reasons to prefer FP16: its three additional bits, where rounding is the problem (such
# as in reinforcement learning, where a sampler and a trainer have to agree), and hardware without
# BF16. On Ampere and later both run at the same rate.
#
# ## 8. What it saves
#
# ### Memory
#
# "Half the memory" is not what autocast gives. It leaves the weights in FP32, and so their
# gradients, and Adam's two moments. Count the bytes of the model that was just trained in BF16:

# %%
loss_of(model, x, y).backward()
moments = [
    state[name]
    for state in optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq")
]
held = {
    "weights": list(model.parameters()),
    "gradients": [parameter.grad for parameter in model.parameters()],
    "Adam's moments": moments,
}
bytes_each = {
    name: sum(t.numel() * t.element_size() for t in tensors) / parameters
    for name, tensors in held.items()
}
table(
    ["BF16 autocast", "bytes per parameter"],
    [*bytes_each.items(), ("total", sum(bytes_each.values()))],
)
assert bytes_each == {"weights": 4, "gradients": 4, "Adam's moments": 8}

# %% [markdown]
# 16 bytes per parameter, in FP32 and under autocast. Until the backward pass is done, autocast even
# adds up to 2: the 16-bit copies of the weight matrices. What shrinks is what the forward pass saves
# for the backward pass: the activations. How much that is depends on the batch. `ampwise.memory` runs
# a step on tensors that have a shape but no memory, as CUDA would run it, and counts the bytes. For
# this GPT (with one window, nearly all of it is the workspace of cuBLAS, the library of matmuls):


# %%
def make(batch=8):
    model = GPT(len(LETTERS))
    x = torch.zeros(batch, 128, dtype=torch.long)
    return model, (x, x), lambda x, y: loss_of(model, x, y)


EMULATED = False  # as on a GPU, where tensor cores need no help
counted = ampwise.memory(make, precisions=["fp32", "bf16"], batch=[1, 256], largest=False)
EMULATED = True
peaks = {
    batch: [counted.at(name, batch).peak for name in ("fp32", "bf16")]
    for batch in (1, 256)
}
saved = {batch: 1 - narrow / wide for batch, (wide, narrow) in peaks.items()}
table(
    ["windows per batch", "FP32, peak MB", "BF16, peak MB", "saved"],
    [
        [
            batch,
            *(f"{peak / 1e6:,.1f}" for peak in peaks[batch]),
            f"{100 * saved[batch]:.1f} %",
        ]
        for batch in peaks
    ],
)
assert saved[1] < 0.03
assert 0.25 < saved[256] < 0.4  # a third
assert counted.at("fp32", 1).split["workspaces"] > 0.9 * counted.at("fp32", 1).peak
assert 1.5 < counted.at("bf16", 256).most["cast cache"] / parameters <= 2

# %% [markdown]
# The same for 7 B parameters, a popular example (one widely shared guide says 122 GB in FP32 and
# 117 GB in FP16, with FP16 gradients, which autocast does not have, and 5 GB of activations whatever
# the batch). These numbers are from `ampwise memory`, for four sequences of 2,048 tokens; each column
# is a maximum, in GB of 10⁹ bytes. The peak is below the sum of its row, since activations are freed
# while gradients are allocated:

# %%
seven_billion, file = results("lowbit_7b")
KINDS = ["parameters", "gradients", "optimizer state", "activations"]
SHOWN = ["precision", "optimizer", "bytes a parameter", *KINDS, "peak"]
table(SHOWN, [[row[column] for column in SHOWN] for row in seven_billion])
print(f"derived, not measured: {measured_on(file)}")
by_precision = {(row["precision"], row["optimizer"]): row for row in seven_billion}
plain, mixed = by_precision["fp32", "adamw"], by_precision["bf16", "adamw"]
for row in (plain, mixed):
    assert row["bytes a parameter"] == 16
    assert row["peak"] < sum(row[kind] for kind in KINDS)
assert mixed["gradients"] == plain["gradients"]
assert 0.08 < 1 - mixed["peak"] / plain["peak"] < 0.13
assert by_precision["bf16-pure", "adamw8bit"]["peak"] < plain["peak"] / 2

# %% [markdown]
# Autocast alone saves a tenth of that peak; to halve it takes BF16 weights that do not lose small
# updates, and an optimizer with an 8-bit state ([fewer bytes per parameter](../low_bit.md)). The GPT
# above is the other extreme, a small model with a large batch, which saves a third.
#
# ### Time
#
# Speed depends on the model and the device, not only on the format. These are complete training
# steps, measured by `ampwise bench`, from the results in the repository:

# %% tags=["hide-input"]
SUBJECTS = {
    "precisions_relevance_gpu": "small scorer",
    "precisions_resnet50_gpu": "ResNet-50",
    "precisions_gpt2_gpu": "GPT-2 124M",
    "precisions_gpt1300m_gpu": "GPT 1.3B",
}
speed, sources = {}, []
for name, title in SUBJECTS.items():
    rows, file = results(name)
    sources.append(measured_on(file))
    # The scorer's FP16 row is called "fp16, heads in FP32".
    speed[title] = {row["row"].split(",")[0]: row for row in rows}
compiled = {
    row["row"]: row
    for row in results("precisions_gpt2_compiled_gpu")[0]
    if row["row"].endswith("compiled")
}
speed["GPT-2 124M,\ncompiled"] = {name.split()[0]: row for name, row in compiled.items()}

figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
for place, rows in enumerate(speed.values()):
    for shift, name in enumerate(("tf32", "fp16", "bf16")):
        row, at = rows[name], place + 0.27 * (shift - 1)
        spread = [[row["×FP32"] - row["low"]], [row["high"] - row["×FP32"]]]
        label = name.upper() if not place else None
        axes.bar(at, row["×FP32"], 0.25, color=LINES[name.upper()], label=label)
        axes.errorbar(at, row["×FP32"], spread, color=INK, linewidth=1)
        axes.text(
            at, row["high"] + 0.12, f"{row['×FP32']:.1f}", ha="center", fontsize=8.5
        )
axes.axhline(1, color=INK, linewidth=0.9, linestyle="--", label="FP32")
axes.set_xticks(range(len(speed)), list(speed))
axes.set(ylabel="times as fast as FP32", xlim=(-0.5, len(speed) - 0.4))
axes.legend(loc="upper left", ncols=4, handlelength=1.4)
machines = sorted(set(sources))
show(
    figure,
    "Grouped bars: speed of TF32, FP16 and BF16 relative to FP32 for a small scorer, ResNet-50, GPT-2 124M, a GPT "
    "of 1.3 B and a compiled GPT-2. The gain of FP16 and BF16 grows with the model, from 2 to 9.",
    "Whole steps, as a ratio to eager FP32; thin lines span from the 10 % to the 90 % quantile. The scorer's FP16 "
    f"keeps its heads in FP32. Measured on {'; '.join(machines)}.",
)
gain = {
    title: {name: row["×FP32"] for name, row in rows.items()}
    for title, rows in speed.items()
}
assert min(gain[title]["bf16"] for title in gain if title.startswith("GPT")) > 5
assert all(
    0.9 < gain[title]["fp16"] / gain[title]["bf16"] < 1.1
    for title in gain
    if title.startswith("GPT")
)
assert 1.15 < gain["ResNet-50"]["fp16"] / gain["ResNet-50"]["bf16"] < 1.35
assert (
    gain["small scorer"]["fp16"]
    < gain["small scorer"]["tf32"]
    < gain["small scorer"]["bf16"]
    < 3
)
assert 40 < speed["small scorer"]["fp16"]["idle %"] < 60
assert torch.get_float32_matmul_precision() == "highest"  # TF32 is off
assert all(2 < gains["tf32"] < 4 for gains in gain.values())

# %% [markdown]
# Three results stand out. Guides promise "2 to 3 times"; a GPT is more than five times faster, a
# small model less than three times, and there FP16 is slower than TF32: the GPU is idle half of the
# time. FP16 and BF16 matmuls run at the same rate, yet complete steps differ in both directions: by a
# few percent in the GPTs, by about a quarter in ResNet-50, where FP16 is faster (we do not know why).
# And TF32 alone is two to four times faster than FP32; it is one switch,
# `torch.set_float32_matmul_precision("high")`, and off by default for matmuls.
#
# Your model on your device may differ: `ampwise bench train.py:make` measures it, and says why if
# little is gained.
#
# ## 9. Pitfalls
#
# Mixed precision seldom fails with an error. Most of these examples run and are wrong: first the
# failing cell, with the damage in numbers, then the fixed one. A comment such as "noqa: AMP101" tells
# the linter, `ampwise check`, that the mistake is intentional; without it, this lesson would not
# pass. The model is now a small one:


# %%
def toy(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(Linear(16, 32), nn.ReLU(), Linear(32, 4))
    return model, torch.randn(64, 16), torch.randint(4, (64,))


def half_loss(model, x, y):
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    return F.cross_entropy(logits.float(), y)


def flat(model):
    return torch.cat(
        [parameter.detach().flatten().float() for parameter in model.parameters()]
    )


# %% [markdown]
# ### Order
#
# **1. FP16 without a loss scale.** A network fits a curve; its loss has a weight of 1e-4, as
# auxiliary losses have. In FP32 that makes no difference to Adam, which divides by the size of the
# gradient. In FP16 the small gradients are zero before Adam sees them.


# %% tags=["failing", "pitfall-no-scale"]
def fit(forward, scaler):
    """Fit sin(6x); return the unweighted losses and the share of zero gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(1, 32), nn.Tanh(), Linear(32, 32), nn.Tanh(), Linear(32, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 512)[:, None]
    curve = []
    for _ in range(250):
        optimizer.zero_grad()
        with forward():
            y = model(x)
        loss = F.mse_loss(y.float(), torch.sin(6 * x))
        scaler.scale(1e-4 * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        curve.append(loss.item())
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return curve, (grads == 0).float().mean().item()


def in_fp16():
    return torch.autocast("cpu", torch.float16)


curve_fp32, zeros_fp32 = fit(
    contextlib.nullcontext, torch.amp.GradScaler("cpu", enabled=False)
)
curve_unscaled, zeros_unscaled = fit(in_fp16, torch.amp.GradScaler("cpu", enabled=False))
print(f"last loss: FP32 {curve_fp32[-1]:.4f}, unscaled FP16 {curve_unscaled[-1]:.4f},")
print(f"with {percent(zeros_fp32)} and {percent(zeros_unscaled)} % of the gradients zero")
assert zeros_fp32 == 0
assert zeros_unscaled > 0.5
assert min(curve_unscaled) > 3 * min(curve_fp32)

# %% [markdown]
# Fixed: enable the scaler.

# %% tags=["fixed", "pitfall-no-scale"]
curve_scaled, zeros_scaled = fit(in_fp16, torch.amp.GradScaler("cpu"))
print(f"scaled FP16 ends at {curve_scaled[-1]:.4f}, with {percent(zeros_scaled)} % zero")
assert zeros_scaled < 0.01
assert min(curve_scaled) < 2 * min(curve_fp32)

# %% [markdown]
# The three fits. Nothing in the unscaled one looks like an error; it looks like a worse model:

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 2.7), layout="constrained")
axes.plot(curve_fp32, color=LINES["FP32"], linewidth=1.8, label="FP32")
axes.plot(curve_scaled, "--", color=LINES["FP16"], linewidth=1.8, label="FP16, scaled")
axes.plot(curve_unscaled, color=LOST, linewidth=1.8, label="FP16, no scale")
axes.set(xlabel="step", ylabel="loss", yscale="log", xlim=(0, 249))
axes.legend(loc="lower left")
show(
    figure,
    "Three loss curves on a logarithmic scale. FP32 and scaled FP16 fall together below 0.01; unscaled FP16 falls "
    "early, too, and from step 90 on stays above them.",
    "A curve fit in FP32 and FP16. Without a loss scale, training slows down, without any error.",
)

# %% [markdown]
# **2. Clipping before `unscale_`.** The gradients are still multiplied by 65536. Clipped to a norm
# of 0.1, and then divided by the scale, they have a norm of 0.1 / 65536. Guides say that such
# clipping "does nothing"; in fact it stops the training.


# %% tags=["failing", "pitfall-clip"]
def step_clipped_early(model, x, y):
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.amp.GradScaler("cpu"),
    )
    scaler.scale(half_loss(model, x, y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: AMP101
    scaler.step(optimizer)
    scaler.update()


model, x, y = toy()
before = flat(model)
step_clipped_early(model, x, y)
moved_wrong = (flat(model) - before).norm().item()
print(f"clipped to 0.1, and the weights moved by {moved_wrong:.1e}")
assert moved_wrong < 1e-5

# %% [markdown]
# Fixed: unscale first. (`scaler.clip_(optimizer, 0.1)` of `ampwise.GradScaler`, or
# `Engine(clip_norm=0.1)`, cannot get it wrong.)


# %% tags=["fixed", "pitfall-clip"]
def step_clipped(model, x, y):
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.amp.GradScaler("cpu"),
    )
    scaler.scale(half_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


model, x, y = toy()
before = flat(model)
step_clipped(model, x, y)
moved = (flat(model) - before).norm().item()
print(f"the weights moved by {moved:.3f}: {moved / moved_wrong:,.0f} times as far")
assert abs(moved - 0.1) < 1e-3
assert 0.5 < moved / moved_wrong / 65536 < 2

# %% [markdown]
# **3. A step that bypasses the scaler.** `optimizer.step()` instead of `scaler.step(optimizer)`: gradients
# that are 65536 times too large, and no check for inf.


# %% tags=["failing", "pitfall-step-past-scaler"]
def step_past_scaler(model, x, y):
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu"),
    )
    loss = half_loss(model, x, y)
    scaler.scale(loss).backward()
    optimizer.step()  # noqa: AMP109
    return loss.item()


model, x, y = toy()
loss = step_past_scaler(model, x, y)
wrecked = half_loss(model, x, y).item()
print(f"loss {loss:.2f} -> {wrecked:.2f}")
assert not wrecked < 100  # also True for NaN

# %% [markdown]
# Fixed: the scaler steps, and `update` follows.


# %% tags=["fixed", "pitfall-step-past-scaler"]
def step_by_scaler(model, x, y):
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu"),
    )
    loss = half_loss(model, x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


model, x, y = toy()
loss = step_by_scaler(model, x, y)
after = half_loss(model, x, y).item()
print(f"loss {loss:.3f} -> {after:.3f}")
assert after < loss

# %% [markdown]
# **4. Weights in FP16.** `model.half()` is not mixed precision: the weights themselves lose what
# updates add. The scaler refuses, with a message that many find puzzling.

# %% tags=["failing", "pitfall-half-weights"]
model, x, y = toy()
halved = copy.deepcopy(model).half()
optimizer, scaler = (
    torch.optim.SGD(halved.parameters(), lr=0.1),
    torch.amp.GradScaler("cpu"),
)
scaler.scale(F.cross_entropy(halved(x.half()).float(), y)).backward()
refused = None
try:
    scaler.unscale_(optimizer)
except ValueError as error:
    refused = str(error)
print(f"ValueError: {refused}")
assert refused == "Attempting to unscale FP16 gradients."

# %% [markdown]
# Fixed: keep the weights in FP32; autocast makes the 16-bit copies for matmuls.

# %% tags=["fixed", "pitfall-half-weights"]
model, x, y = toy()
optimizer, scaler = (
    torch.optim.SGD(model.parameters(), lr=0.1),
    torch.amp.GradScaler("cpu"),
)
scaler.scale(half_loss(model, x, y)).backward()
scaler.unscale_(optimizer)
print("weights:", model[0].weight.dtype, "gradients:", model[0].weight.grad.dtype)
assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float32

# %% [markdown]
# ### Bookkeeping
#
# **5. Testing for a skipped step in the wrong way.** Guides use
# `scaler._found_inf_per_device(optimizer)`. It is a dictionary with an entry for each device, so it
# is true whenever there are gradients, finite or not.

# %% tags=["failing", "pitfall-was-it-skipped"]
model, x, y = toy()
optimizer, scaler = (
    torch.optim.SGD(model.parameters(), lr=0.1),
    torch.amp.GradScaler("cpu"),
)
before = flat(model)
scaler.scale(half_loss(model, x, y)).backward()
scaler.step(optimizer)
says_skipped = bool(scaler._found_inf_per_device(optimizer))
scaler.update()
moved = not torch.equal(before, flat(model))
print(f"says skipped: {says_skipped}; but the weights moved: {moved}")
assert says_skipped
assert moved

# %% [markdown]
# Fixed: `ampwise.GradScaler`, a subclass of torch's, has `skipped`. So has a step of the Engine.

# %% tags=["fixed", "pitfall-was-it-skipped"]
model, x, y = toy()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), ampwise.GradScaler("cpu")
answers = []
for batch in (x, x * math.inf):
    optimizer.zero_grad()
    scaler.scale(half_loss(model, batch, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    answers.append(scaler.skipped)
print(f"a good batch skipped: {answers[0]}; a batch with inf skipped: {answers[1]}")
assert answers == [False, True]

# %% [markdown]
# **6. A scheduler that advances on skipped steps.** The scale starts too high here, as it may in any
# run, and ten steps are skipped. The warm-up is over before the first update.

# %% tags=["failing", "pitfall-scheduler"]
model, x, y = toy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
scaler, before = torch.amp.GradScaler("cpu", init_scale=2.0**40), flat(model)
with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # torch warns once that the scheduler came first, and not why
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()  # noqa: AMP114
rate, moved = scheduler.get_last_lr()[0], not torch.equal(before, flat(model))
print(f"after ten steps the learning rate is {rate:.2f}; the weights moved: {moved}")
assert math.isclose(rate, 0.1)
assert not moved

# %% [markdown]
# Fixed: the Engine does not advance its scheduler on a skip. (With `torch.amp`: see section 5.)

# %% tags=["fixed", "pitfall-scheduler"]
model, x, y = toy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
engine = ampwise.Engine(
    model,
    optimizer,
    "fp16",
    scheduler=scheduler,
    scaling={"init_scale": 2.0**40},
    trace=False,
)
for _ in range(10):
    engine.step(lambda x, y: F.cross_entropy(model(x).float(), y), x, y)
print(f"{engine.skipped_steps} steps skipped, learning rate still {engine.lr:.2f}")
assert engine.skipped_steps == 10
assert math.isclose(engine.lr, 0.01)

# %% [markdown]
# **7. Accumulation divided wrongly.** Four micro-batches make a step. Not divided at all, their
# gradient is several times too large. Divided by four it is still wrong if the micro-batches
# differ: a mean of means is not the mean over tokens. Here most targets of the last micro-batches
# are padding (-100).

# %% tags=["failing", "pitfall-accumulation"]
model, x, y = toy()
kept = torch.tensor([16, 8, 4, 2]).repeat_interleave(16) > torch.arange(16).repeat(4)
y = y.masked_fill(~kept, -100)
true_gradient = torch.autograd.grad(F.cross_entropy(model(x), y), model[2].weight)[0]
summed, averaged = torch.zeros_like(true_gradient), torch.zeros_like(true_gradient)
for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(model(micro_x), micro_y), model[2].weight
    )
    summed += gradient
    averaged += gradient / 4
ratio = (summed.norm() / true_gradient.norm()).item()
error = ((averaged - true_gradient).norm() / true_gradient.norm()).item()
print(f"not divided: {ratio:.1f} times the gradient of the whole batch")
print(f"divided by 4: wrong by {100 * error:.0f} %")
assert ratio > 2
assert error > 0.2

# %% [markdown]
# Fixed: pass the weight of a micro-batch to the Engine. Its update then equals that of the whole
# batch. (Without the Engine: `reduction="sum"`, divided by the number of targets in all four.)

# %% tags=["fixed", "pitfall-accumulation"]
start = copy.deepcopy(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine = ampwise.Engine(
    model, optimizer, "fp32", accumulate=4, weight=lambda x, y: (y != -100).sum()
)
for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
    step = engine.step(lambda x, y: F.cross_entropy(model(x), y), micro_x, micro_y)
update = start["2.weight"] - model[2].weight.detach()
error = ((update - true_gradient).norm() / true_gradient.norm()).item()
print(f"relative difference from the update of the whole batch: {error:.0e}")
assert step.applied
assert error < 1e-5

# %% [markdown]
# **8. A checkpoint without the scaler.** This model needs a scale far below 65536. Resumed without
# it, the scaler starts from its initial scale again: steps are skipped once more, and the run differs
# from an uninterrupted one.


# %% tags=["failing", "pitfall-checkpoint"]
def steps(model, optimizer, scaler, count):
    """Train on a loss with large gradients; return how many steps were skipped."""
    skipped = 0
    for number in range(count):
        torch.manual_seed(number)
        x, y = torch.randn(64, 16), torch.randint(4, (64,))
        optimizer.zero_grad()
        scaler.scale(1e4 * half_loss(model, x, y)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


def parts():
    model, _, _ = toy()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.amp.GradScaler("cpu"),
    )


model, optimizer, scaler = parts()
first_skips = steps(model, optimizer, scaler, 20)
incomplete, complete = io.BytesIO(), io.BytesIO()
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(saved, incomplete)
torch.save({**saved, "scaler": scaler.state_dict()}, complete)
steps(model, optimizer, scaler, 20)
unbroken = flat(model)

model, optimizer, scaler = parts()
loaded = torch.load(io.BytesIO(incomplete.getvalue()), weights_only=True)
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
again = steps(model, optimizer, scaler, 20)
print(f"skipped at the start: {first_skips}; skipped once more after the resume: {again}")
print(f"the same weights as the unbroken run: {torch.equal(flat(model), unbroken)}")
assert again >= first_skips - 1 >= 1
assert not torch.equal(flat(model), unbroken)

# %% [markdown]
# Fixed: save the scaler's state in the checkpoint. (`engine.state_dict()` contains it, and the state
# of schedulers and random number generators.)

# %% tags=["fixed", "pitfall-checkpoint"]
model, optimizer, scaler = parts()
loaded = torch.load(io.BytesIO(complete.getvalue()), weights_only=True)
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
scaler.load_state_dict(loaded["scaler"])
assert loaded["scaler"]["scale"] < 1000
again = steps(model, optimizer, scaler, 20)
same = torch.equal(flat(model), unbroken)
print(f"skipped after the resume: {again}; the same weights: {same}")
assert again == 0
assert same

# %% [markdown]
# **9. A scale without a floor.** If the loss itself is inf, no scale helps, and `torch.amp` goes on
# halving: 2⁻¹⁰⁰, 2⁻¹⁴⁰, 0. At 0 the scaled gradients are 0, the check finds nothing, and dividing
# by 0 makes every weight NaN.

# %% tags=["failing", "pitfall-floor"]
weight = nn.Parameter(torch.ones(3))
optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
bad_steps = 0
while scaler.get_scale() > 0:
    optimizer.zero_grad()
    scaler.scale((weight * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    bad_steps += 1
held_until_then = weight.detach().clone()
optimizer.zero_grad()
scaler.scale(weight.sum()).backward()  # and now a good batch
scaler.step(optimizer)
scaler.update()
print(f"the scale is 0 after {bad_steps} bad steps;")
print(f"one good batch later the weights are {weight.tolist()}")
assert bad_steps < 200
assert torch.equal(held_until_then, torch.ones(3))
assert weight.isnan().all()

# %% [markdown]
# Fixed: `ampwise.GradScaler` has a minimum scale. There it raises an error that says why, and the
# weights are unchanged.

# %% tags=["fixed", "pitfall-floor"]
weight = nn.Parameter(torch.ones(3))
optimizer, scaler = torch.optim.SGD([weight], lr=0.1), ampwise.GradScaler("cpu")
stopped = None
try:
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale((weight * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
except ampwise.ScaleCollapsed as error:
    stopped = str(error)
print(textwrap.fill(f"ScaleCollapsed: {stopped}", 88))
assert "floor" in stopped
assert torch.equal(weight, torch.ones(3))

# %% [markdown]
# ### Range
#
# **10. A softmax written out.** Similarities between -1 and 1 over a temperature of 0.07, as in
# contrastive losses, go up to 14; `exp` in FP16 overflows from 11.09 on. (CUDA's autocast runs `exp`
# in FP32, so this works there; not on a CPU, nor in a model in `.half()`.)

# %% tags=["failing", "pitfall-softmax"]
torch.manual_seed(0)
a, b = F.normalize(torch.randn(8, 32), dim=1), F.normalize(torch.randn(8, 32), dim=1)
a = F.normalize(b + 0.1 * a, dim=1)  # pairs that are alike, as after some training
with torch.autocast("cpu", torch.float16):
    raised = torch.exp(a @ b.T / 0.07)
    loss = -torch.log(raised.diagonal() / raised.sum(1)).mean()
largest = ((a @ b.T).max() / 0.07).item()
print(
    f"largest similarity / 0.07: {largest:.1f}; exp of it: {raised.max()}; loss: {loss}"
)
assert 14 < largest < 14.3
assert raised.isinf().any()
assert not loss.isfinite()

# %% [markdown]
# Fixed: `cross_entropy` subtracts the largest logit first, in FP32.

# %% tags=["fixed", "pitfall-softmax"]
with torch.autocast("cpu", torch.float16):
    similarities = a @ b.T
loss = F.cross_entropy(similarities.float() / 0.07, torch.arange(8))
print(f"loss: {loss:.4f}")
assert loss.isfinite()

# %% [markdown]
# **11. Autocast disabled, but nothing cast.** A custom loss should run in FP32, so autocast is
# disabled for it. That casts nothing: the model's output is FP16, and now even a sum that CUDA's
# autocast would have run in FP32 is FP16.

# %% tags=["failing", "pitfall-switched-off"]
x = torch.full((1, 64), 40.0)
with torch.autocast("cpu", torch.float16):
    features = F.linear(x, torch.eye(64))
    with torch.autocast("cpu", enabled=False):
        energy = features.pow(2).sum()
print(f"{features.dtype} -> {energy.dtype}: {energy}")
assert energy.dtype == torch.float16
assert energy.isinf()

# %% [markdown]
# Fixed: cast the inputs. (`@ampwise.keep("fp32")` on a function does both.)

# %% tags=["fixed", "pitfall-switched-off"]
with torch.autocast("cpu", torch.float16):
    features = F.linear(x, torch.eye(64))
    with torch.autocast("cpu", enabled=False):
        energy = features.float().pow(2).sum()
print(f"{features.dtype} -> {energy.dtype}: {energy:,.0f}")
assert energy == 64 * 40**2

# %% [markdown]
# **12. A mask of -1e9.** FP16 has no such number.

# %% tags=["failing", "pitfall-mask"]
scores, masked = (
    torch.zeros(4, 4, dtype=torch.float16),
    torch.ones(4, 4, dtype=torch.bool).triu(1),
)
refused = None
try:
    scores.masked_fill(masked, -1e9)  # noqa: AMP403
except RuntimeError as error:
    refused = str(error)
print(f"RuntimeError: {refused}")
assert "overflow" in refused

# %% [markdown]
# Fixed: minus infinity, if every row keeps at least one position; otherwise
# `torch.finfo(scores.dtype).min`.

# %% tags=["fixed", "pitfall-mask"]
shares = scores.masked_fill(masked, -math.inf).softmax(-1)
print(shares[1].tolist())
assert shares.isfinite().all()
assert not shares[masked].any()

# %% [markdown]
# **13. An epsilon that is zero.** 1e-8 protects a logarithm in FP32. In FP16 it *is* 0.

# %% tags=["failing", "pitfall-epsilon"]
chance = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float16)
protected = torch.log(chance + 1e-8)  # noqa: AMP404
print(f"1e-8 in FP16: {fp16(1e-8)}; log(p + 1e-8): {protected.tolist()}")
assert fp16(1e-8) == 0
assert protected[0] == -math.inf

# %% [markdown]
# Fixed: cast to FP32 first, then take the logarithm. (A loss from logits, such as `cross_entropy`, needs no
# epsilon at all.)

# %% tags=["fixed", "pitfall-epsilon"]
protected = torch.log(chance.float() + 1e-8)
print(f"log(p + 1e-8) in FP32: {[round(value, 2) for value in protected.tolist()]}")
assert protected.isfinite().all()

# %% [markdown]
# ### Precision
#
# **14. BF16 weights that stop moving.** Between 0.5 and 1, BF16's numbers are 2⁻⁸ apart. An update
# of less than half of that is rounded away, each time, however many there are: 1000 steps of 0.001
# should take a weight from 1 to 0.


# %% tags=["failing", "pitfall-bf16-weights"]
def descend(weight, steps=1000):
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.item()


in_fp32 = descend(nn.Parameter(torch.ones(())))
in_bf16 = descend(nn.Parameter(torch.ones((), dtype=torch.bfloat16)))
print(f"after 1000 steps: FP32 {abs(in_fp32):.4f}, BF16 {in_bf16}")
assert abs(in_fp32) < 1e-4
assert in_bf16 == 1.0
assert torch.tensor([1 - 2.0**-8, 1 - 2.0**-9]).bfloat16().tolist() == [1 - 2.0**-8, 1.0]

# %% [markdown]
# Fixed: keep the weights in FP32 (autocast does), or use `"bf16-pure"`, with stochastic rounding or
# with a compensation term for each weight (Kahan). 300 steps of 0.001 should lead to 0.7; there are
# 1024 weights now, since stochastic rounding is right on average.


# %% tags=["fixed", "pitfall-bf16-weights"]
class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(1024))

    def forward(self):
        return self.value.float().sum()  # its gradient is 1 everywhere


ended = {}
for precision in ("bf16-pure", "bf16-pure,kahan"):
    torch.manual_seed(0)
    model = Weight()
    engine = ampwise.Engine(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), precision, trace=False
    )
    for _ in range(300):
        engine.step(model)
    assert model.value.dtype == torch.bfloat16
    ended[precision] = model.value.float().mean().item()
    print(f"{precision}: {ended[precision]:.4f} after 300 steps of 0.001")
assert all(abs(value - 0.7) < 0.01 for value in ended.values())

# %% [markdown]
# **15. One NaN, and no check.** BF16 needs no scaler, so nothing checks the gradients. With one NaN in
# one of them, clipping computes a norm of NaN, and multiplies every gradient by it. (A hook adds the
# NaN here, in place of a bad batch.)


# %% tags=["failing", "pitfall-nan"]
def poison(model):
    """Make one number of one gradient NaN from now on."""
    nan = torch.tensor([math.nan, 0.0, 0.0, 0.0])
    return model[2].bias.register_hook(lambda gradient: gradient + nan)


model, x, y = toy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
poison(model)
with torch.autocast("cpu", torch.bfloat16):
    logits = model(x)
F.cross_entropy(logits.float(), y).backward()
bad = (
    torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    .isnan()
    .sum()
)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
ruined = flat(model).isnan().float().mean().item()
print(f"NaN in {bad} gradient, and then in {percent(ruined)} % of the weights")
assert bad == 1
assert ruined == 1

# %% [markdown]
# Fixed: the Engine skips a step whose gradients are not finite, in every precision.

# %% tags=["fixed", "pitfall-nan"]
model, x, y = toy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = ampwise.Engine(model, optimizer, "bf16", clip_norm=1.0, trace=False)
before, hook = flat(model), poison(model)
step = engine.step(lambda x, y: F.cross_entropy(model(x).float(), y), x, y)
untouched = torch.equal(before, flat(model))
hook.remove()
following = engine.step(lambda x, y: F.cross_entropy(model(x).float(), y), x, y)
print(f"skipped: {step.skipped}; weights untouched: {untouched};")
print(f"a good batch after it is applied: {following.applied}")
assert step.skipped
assert untouched
assert following.applied

# %% [markdown]
# ## 10. Monitoring
#
# Three numbers say most: the scale, the share of skipped steps, and how near the gradients are to the
# lower end of the format. A run is healthy while the scale stays about the same, skips are rare, and
# few gradients lose bits. It is not if the scale is halved again and again, every few steps are
# skipped, or the loss jumps.
#
# The first two are in `engine.history`. The third needs a count, which the Engine has anyway, since
# it reads the gradients once: `engine.census()`. It has a limit: what FP16 made zero *at the current
# scale* was zero before it could be counted, so the census of an FP16 run always finds next to
# nothing lost at its own scale. The numbers just above the limit, those with fewer bits, show it
# indirectly: if they are few, those below are fewer still. And an occasional backward pass in FP32, as
# in section 2, gives the exact count, also for what flows between layers.
#
# Train the GPT for a few more steps in FP16:

# %%
engine = ampwise.Engine(
    wide_model, torch.optim.AdamW(wide_model.parameters(), lr=1e-3), "fp16", trace=False
)
layers = {}
for x, y in batches(steps=4, seed=3):
    step = engine.step(lambda x, y: loss_of(wide_model, x, y), x, y)
    if step.applied:  # or there would be infs among them
        counted = engine.census().grouped(
            lambda name: ".".join(name.split(".")[:3]).removesuffix(".weight")
        )
        layers = {
            name: census + layers.get(name, ampwise.Census())
            for name, census in counted.items()
        }
k = round(math.log2(step.scale))
everything = sum(layers.values(), ampwise.Census())
short = everything.subnormal("fp16", k).high / everything.nonzeros
print(f"scale 2^{k}, skipped {engine.skipped_steps} of {len(engine.history)} steps")
print(f"loss {step.loss:.2f}, norm of the gradients {step.grad_norm:.2f}")
print(f"gradients of weights with fewer bits at this scale: {percent(short)} %")
flows, arrives = (ampwise.census(found).total() for found in gradients(wide_model, x, y))
lost = {
    "weights": arrives.flushed("fp16", k) / arrives.nonzeros,
    "activations": flows.flushed("fp16", k) / flows.nonzeros,
}
print(
    "lost at it, by a pass in FP32:",
    {of: f"{percent(share)} %" for of, share in lost.items()},
)
assert engine.history["scale"][-1] == step.scale
assert everything.flushed("fp16", k) < 1e-4 * everything.nonzeros  # as it always is
assert short < 0.01
assert lost["weights"] < 0.0001 < lost["activations"] < 0.005

# %% [markdown]
# For every *other* scale and format the census is exact. The figure shows the share that would be lost
# if the gradients of weights were stored in a format, without a scale, or with the best one for each
# layer.

# %% tags=["hide-input"]
ASKED = {
    "FP16\nno scale": ("fp16", lambda census: 0),
    "BF16\nno scale": ("bf16", lambda census: 0),
    "E5M2\nno scale": ("e5m2", lambda census: 0),
    "E5M2\neach layer": ("e5m2", lambda census: census.best_scale("e5m2")),
    "E4M3\nno scale": ("e4m3", lambda census: 0),
    "E4M3\neach layer": ("e4m3", lambda census: census.best_scale("e4m3")),
}
names = [name for name in layers if "ln" not in name]
lost = [
    [
        100 * layers[n].flushed(fmt, scale(layers[n])) / max(1, layers[n].nonzeros)
        for fmt, scale in ASKED.values()
    ]
    for n in names
]
figure, axes = plt.subplots(figsize=(8, 0.24 * len(names) + 1.2), layout="constrained")
picture = axes.imshow(lost, aspect="auto", cmap="OrRd", vmin=0, vmax=100)
for row, shares in enumerate(lost):
    for column, share in enumerate(shares):
        axes.text(
            column,
            row,
            percent(share / 100),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share > 55 else INK,
        )
axes.set_xticks(range(len(ASKED)), list(ASKED), fontsize=8.5)
axes.set_yticks(range(len(names)), names, fontsize=8.5)
axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
axes.spines[:].set_visible(False)
show(
    figure,
    "A table coloured by the share of gradients lost: rows are layers, columns are formats and scales. FP16 and "
    "BF16 are pale throughout; E4M3 without a scale is dark, and pale with a scale for each layer.",
    "% of a layer's non-zero gradients of weights that a format rounds to zero. E4M3 is of no use without scales, "
    "and of some with.",
)
share_of = dict(
    zip(
        ASKED,
        [sum(column) / len(names) for column in zip(*lost, strict=True)],
        strict=True,
    )
)
assert share_of["BF16\nno scale"] == 0
assert share_of["E4M3\nno scale"] > 50
assert share_of["E4M3\neach layer"] < share_of["E4M3\nno scale"] / 2

# %% [markdown]
# ### Zeros are not a symptom
#
# "More than 5 % zero gradients means that training is about to fail" is not true. Look at the count
# of section 2, in FP32, where nothing is lost. Where a ReLU is off, a gradient is zero, and so are
# those of letters that did not occur:

# %%
closed = {
    name: flowing[name].zeros / flowing[name].count
    for name in flowing
    if name.endswith("expand")
}
table(
    ["flowing back into, in FP32", "% zeros"],
    [[name, percent(share)] for name, share in closed.items()],
)
absent = arriving["letters.weight"]
print(f"of all activations' gradients {percent(whole.zeros, whole.count)} % are zero;")
print(f"of the letters' embedding {percent(absent.zeros, absent.count)} %")
assert min(closed.values()) > 0.4
assert whole.zeros / whole.count > 0.2

# %% [markdown]
# What matters is the share that is *not* zero in a wider format and becomes zero in the narrow one,
# at the current scale, and whether it grows. The rules
# [AMP601](../rules/AMP601-gradient-underflow.md) and [AMP602](../rules/AMP602-underflow-rising.md)
# give a lower bound of that share, from the numbers just above the limit.
#
# ### Watching an unmodified script
#
# `ampwise run train.py` watches a script without changes to it, and without changing its results.
# Here is a script with several of the mistakes above:

# %%
SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

for _ in range(40):
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()

torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
scratch = tempfile.TemporaryDirectory()  # gone with the notebook
folder = Path(scratch.name)
(folder / "train.py").write_text(SCRIPT, encoding="utf-8")

# %% [markdown]
# It runs to its end without an error. These are the findings:


# %%
def print_wrapped(text):
    """Print a text with long lines wrapped."""
    for line in text.splitlines():
        print(textwrap.fill(line, 88, subsequent_indent="    "))


def ampwise_says(*words):
    """Run the command in the script's folder; return its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = ampwise_command(list(words))
    return code, out.getvalue() + err.getvalue()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, about the scheduler
    code, _ = ampwise_says(
        "run", "--quiet", "--no-timing", "--output", "first", "train.py"
    )
_, text = ampwise_says("report", "first", "--json")
first = json.loads(text)
found = sorted({finding["code"] for finding in first["findings"]})
for finding in first["findings"]:
    print_wrapped(f"{finding['code']} {finding['name']}: {finding['message']}")
assert code == 0
assert {"AMP101", "AMP204"} <= set(found)

# %% [markdown]
# `ampwise report first -o page.html` writes a page with curves, layers and the fix of each finding.
#
# ## 11. A checklist that runs
#
# This checklist is code. Its first half reads the script: the linter finds the mistakes without
# running anything, fixes what it safely can, and reports the others.

# %%
code, text = ampwise_says("check", "--output-format", "concise", "train.py")
print_wrapped(text)
assert code == 1
assert "AMP101" in text
assert "AMP204" in text

# %% [markdown]
# `--fix` fixes what it can without changing anything else, here the order of `unscale_` and
# clipping. What depends on your intent is reported with its line:

# %%
ampwise_says("check", "--fix", "train.py")
fixed = (folder / "train.py").read_text(encoding="utf-8")
code, text = ampwise_says("check", "--output-format", "concise", "train.py")
print_wrapped(text)
assert fixed.index("unscale_") < fixed.index("clip_grad_norm_")
assert code == 1
assert "AMP101" not in text

# %% [markdown]
# So do not advance the scheduler on a skip, and save the scaler. Then neither the linter nor a watched
# run has findings:

# %%
held = """\
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
"""
fixed = fixed.replace("    scaler.update()\n    scheduler.step()\n", held)
fixed = fixed.replace(
    "optimizer.state_dict()}", 'optimizer.state_dict(), "scaler": scaler.state_dict()}'
)
(folder / "train.py").write_text(fixed, encoding="utf-8")
code, text = ampwise_says("check", "--output-format", "concise", "train.py")
print(f"check: exit code {code}, {text}", end="")
ampwise_says("run", "--quiet", "--no-timing", "--output", "second", "train.py")
second = json.loads(ampwise_says("report", "second", "--json")[1])
print(f"run: {len(first['findings'])} findings before, {len(second['findings'])} now")
assert code == 0
assert not second["findings"]

# %% [markdown]
# The second half checks the run itself. Copy it into your project, and call it with your engine, a
# batch and your loss after a few hundred steps. (Its last check is a step with NaN, which halves the
# scale.)


# %%
def checklist(engine, model, optimizer, loss_fn, batch):
    """Yield the checks of an FP16 run, each as a sentence and whether it holds."""
    scales, skips = engine.history["scale"], engine.history["skipped"]
    recent, k = len(skips) // 2, round(math.log2(scales[-1]))
    gradients, weights = engine.census().total(), copy.deepcopy(model.state_dict())
    states = [value for state in optimizer.state.values() for value in state.values()]
    few_bits = gradients.subnormal("fp16", k).high
    yield "weights are FP32", {p.dtype for p in model.parameters()} == {torch.float32}
    yield (
        "so is the optimizer's state",
        all(value.dtype == torch.float32 for value in states if torch.is_tensor(value)),
    )
    yield (
        "fewer than 5 % of the later steps are skipped",
        sum(skips[recent:]) < 0.05 * len(skips[recent:]),
    )
    yield (
        "the scale is above 1, and not sinking",
        scales[-1] > 1 and scales[-1] >= scales[recent] / 2,
    )
    yield (
        "fewer than 5 % of the gradients lack bits",
        few_bits < 0.05 * gradients.nonzeros,
    )
    yield "losses are finite", all(math.isfinite(loss) for loss in engine.history["loss"])
    yield (
        "a checkpoint has the scaler",
        engine.state_dict()["scaler"]["scale"] == scales[-1],
    )
    bad = engine.step(lambda *batch: loss_fn(*batch) * math.nan, *batch)
    same = all(
        torch.equal(weight, weights[name]) for name, weight in model.state_dict().items()
    )
    yield "a batch with NaN is skipped, and changes no weight", bad.skipped and same


# %% [markdown]
# Applied to two runs of the small model: a normal one, and one with a loss that is too small for its
# scale.


# %%
def answers_of(scaling, weight=1.0):
    """Return the checklist's results after 60 steps on a loss of this weight."""
    model, x, y = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ampwise.Engine(
        model, optimizer, "fp16", clip_norm=1.0, scaling=scaling, trace=False
    )

    def toy_loss(x, y):
        return weight * F.cross_entropy(model(x).float(), y)

    for _ in range(60):
        engine.step(toy_loss, x, y)
    return dict(checklist(engine, model, optimizer, toy_loss, (x, y)))


well, ill = answers_of({}), answers_of({"init_scale": 1.0}, weight=1e-4)
table(
    ["", "a normal run", "a run with a loss of 1e-4, at a scale of 1"],
    [[asked, *("yes" if run[asked] else "NO" for run in (well, ill))] for asked in well],
)
assert all(well.values())
assert [asked for asked in ill if not ill[asked]] == [
    "the scale is above 1, and not sinking",
    "fewer than 5 % of the gradients lack bits",
]

# %% [markdown]
# What no code can check for you: that you compared the loss with an FP32 run once, over the first few
# hundred steps, and that `ampwise bench` shows a gain on *your* device.
#
# ## 12. Exercises
#
# The solutions are in the folded cells.
#
# **A.** A gradient of 2e-9 should survive in FP16. What is the smallest power of two that suffices as
# a loss scale? And what is the largest possible, if the largest gradient is 0.5?

# %% tags=["hide-cell"]
smallest = next(k for k in range(64) if fp16(2e-9 * 2.0**k) > 0)
largest = max(k for k in range(64) if fp16(0.5 * 2.0**k) < math.inf)
print(f"2^{smallest}, and 2^{largest}")
assert (smallest, largest) == (4, 16)
assert ampwise.census(torch.tensor([2e-9, 0.5])).flushed("fp16", smallest) == 0

# %% [markdown]
# **B.** What is the smallest learning rate at which plain SGD in BF16 moves a weight of 1.0 down,
# if the gradient is 1? Why does moving it up need another learning rate?

# %% tags=["hide-cell"]
one = torch.tensor(1.0, dtype=torch.bfloat16)
down = next(
    rate
    for rate in (2.0**-n for n in range(12, 0, -1))
    if (one.float() - rate * 1.01).bfloat16() != one
)
up = next(
    rate
    for rate in (2.0**-n for n in range(12, 0, -1))
    if (one.float() + rate * 1.01).bfloat16() != one
)
print(f"just above 2^{math.log2(down):.0f} down, 2^{math.log2(up):.0f} up:")
print("below 1, neighbouring numbers are half as far apart as above it")
assert (down, up) == (2.0**-9, 2.0**-8)

# %% [markdown]
# **C.** Adam's epsilon is 1e-8. What does it become if the optimizer's state is FP16, and what does
# the first step then do to a weight whose gradient is zero?

# %% tags=["hide-cell"]
weight = torch.ones(2, dtype=torch.float16)
mean = square = torch.zeros(2, dtype=torch.float16)  # of a gradient of zero
moved = weight - 1e-3 * mean / (square.sqrt() + 1e-8)  # noqa: AMP404
print(f"1e-8 becomes {fp16(1e-8)}, and 0 / 0 is {moved.tolist()}")
assert moved.isnan().all()

# %% [markdown]
# **D.** According to the counts of section 10, which layer would lose most in E4M3 with one scale for
# the whole model, and how much would it lose with its own scale?

# %% tags=["hide-cell"]
common = everything.best_scale("e4m3")
shares = {n: c.flushed("e4m3", common) / c.nonzeros for n, c in layers.items()}
worst = max(shares, key=shares.get)
own = (
    layers[worst].flushed("e4m3", layers[worst].best_scale("e4m3"))
    / layers[worst].nonzeros
)
print(f"{worst}: {percent(shares[worst])} % at 2^{common}, {percent(own)} % with its own")
assert own < shares[worst]

# %% [markdown]
# ## In short
#
# - FP16 has little range, BF16 has little precision. FP16 needs a loss scale; both need FP32 weights.
# - A loss scale saves the gradients that flow *between* layers. It shifts the histogram; a power of
#   two loses no bits.
# - Skipped steps are normal while the scale adapts. An inf in the forward pass is not.
# - Under autocast there are 16 bytes per parameter in every precision; activations shrink.
# - Measure the speed on your own device, with your own model.
# - The order is scale, backward, unscale, clip, step, update, scheduler. Or `engine.step(loss_fn,
#   x, y)`.
#
# Next: [a whole run in production](../guides/production.md), [the Engine](../engine.md), [the
# scaler](../scaler.md), [where a NaN came from](../trace.md), [FP8](../fp8.md),
# [memory](../memory.md), [all rules](../rules/index.md).
