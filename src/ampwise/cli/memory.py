"""Estimate the GPU memory of a training step, without a GPU.

MAKE is your function that makes the model and a batch, train.py:make; `ampwise init train.py` writes one.
The step runs on tensors without memory: forward, backward, clip, optimizer, as on CUDA, with its autocast and fused
kernels. Every tensor is followed from allocation to release through a model of torch's caching allocator. No GPU is
needed, and no weights are allocated. Without MAKE, --params or --layers and --hidden describe a decoder transformer;
sizes that are not given get usual values, which are reported.

Examples:
  ampwise memory train.py:make
  ampwise memory train.py:make --batch 16,32,64 --gpu a100
  ampwise memory --params 7B --gpu h200
  ampwise memory --params 7B --seq 4096 --checkpointing --fsdp 8
  ampwise memory --layers 24 --hidden 2048 --heads 16 --optimizer adamw8bit
  ampwise memory --params 7B --precision bf16,bf16-pure,kahan
  ampwise memory train.py:make --json | jq '.estimates[].peak_bytes'

The exit code is 0, 1 if the step does not fit the GPU given with --gpu in any precision, and 2 on an error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.cli import print_json
from ampwise.cli._arguments import add_make, check_precision, count
from ampwise.errors import BadInput, UnknownName
from ampwise.finding import terminal
from ampwise.report.result_view import print_result
from ampwise.train.low_bit.pure_bf16 import OPTIONS, PURE, split_precisions
from ampwise.train.precision.names import EMULATE, PLAIN

GROUP = "Choose a precision"
NEEDS_TORCH = True
OPTIMIZERS = (
    *("adamw", "adam", "sgd", "sgd-momentum", "adamw8bit", "adamw4bit", "adamwfp8", "adam8bit", "adam4bit", "adamfp8"),
    *("lion", "muon", "adafactor"),
)
SIZES = {
    "layers": "number of layers",
    "hidden": "width of a layer",
    "heads": "attention heads",
    "kv_heads": "key and value heads (default: as many as heads)",
    "ffn": "inner width of an MLP",
    "vocab": "size of the vocabulary (default: 32000)",
    "seq": "tokens in a sequence (default: 2048)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_make(parser, nargs="?")
    add("--params", metavar="N", help="parameters of a decoder transformer, such as 124M or 7B")
    add("--arch", metavar="KIND", help="the kind of model, as for advise; without MAKE it is a transformer")
    for name, help_text in SIZES.items():
        add(f"--{name.replace('_', '-')}", metavar="N", type=count, help=help_text)
    add("--batch", metavar="ROWS", help="batch sizes, comma-separated (default: the batch that MAKE makes, or 1)")
    add(
        "--precision",
        metavar="LIST",
        help="comma-separated: fp32, tf32, fp16, bf16, fp8, bf16-pure (default: the first four)",
    )
    add("--optimizer", metavar="NAME", help="such as adamw, sgd or adamw8bit (default: MAKE's, or adamw)")
    add("--checkpointing", action="store_true", help="with activation checkpointing of repeated blocks")
    add("--fsdp", metavar="RANKS", type=count, help="memory of one rank with FSDP over this many ranks")
    add("--ddp", action="store_true", help="include DDP's gradient buckets")
    add("--compiled", action="store_true", help="also show the range of peaks with torch.compile")
    add("--gpu", metavar="NAME", help="a device of the catalog (default: this machine's, if it has one)")
    add("--no-largest", action="store_true", help="do not look for the largest batch")
    add("--json", action="store_true", help="JSON, as `ampwise schema memory` describes it")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    try:
        batches = None if args.batch is None else [count(size.strip()) for size in args.batch.split(",")]
    except argparse.ArgumentTypeError:
        raise BadInput(f"--batch {args.batch}: expected whole numbers of rows, such as 8 or 8,16,32.") from None
    from ampwise.tune.advise.model import parse_count

    precisions = None if args.precision is None else split_precisions(args.precision)
    for name in precisions or ():
        if name.partition(",")[0] != PURE and not name.startswith(EMULATE):
            check_precision("--precision", name, (*PLAIN, "fp8", PURE, *OPTIONS))
    if args.fsdp is not None and args.ddp:
        raise BadInput("--fsdp and --ddp exclude each other: give one of them.")
    if args.optimizer is not None and args.optimizer not in OPTIMIZERS:
        listing = f"--optimizer takes {', '.join(OPTIMIZERS)}."
        raise UnknownName("optimizer", args.optimizer, OPTIMIZERS, listing=listing)
    if args.params is not None:
        parse_count(args.params)
    if args.make is None and args.arch not in (None, "transformer"):
        raise BadInput(
            f"--arch {args.arch[:80]}: sizes describe a decoder transformer only. For another model name your "
            "function, train.py:make (`ampwise init train.py` writes one)."
        )
    if args.make is None and args.params is None and not any(getattr(args, name) for name in SIZES):
        raise BadInput(
            "no model given: name your function, train.py:make (`ampwise init train.py` writes one), or give sizes: "
            "--params 7B."
        )
    from ampwise.tune.memory.estimate import memory

    # Keep what the user's code prints out of our output.
    showing = terminal.progress_line("making the model", "counting {}", prefix="ampwise: ", quiet=args.quiet)
    with showing as progress, contextlib.redirect_stdout(sys.stderr):
        result = memory(
            args.make,
            params=args.params,
            precisions=precisions,
            batch=batches,
            optimizer=args.optimizer,
            checkpointing=args.checkpointing,
            fsdp=args.fsdp,
            ddp=args.ddp,
            compiled=args.compiled,
            gpu=args.gpu,
            largest=not args.no_largest,
            progress=progress,
            **{name: getattr(args, name) for name in SIZES if getattr(args, name) is not None},
        )
    if args.json:
        print_json(result.as_dict())
    else:
        print_result(result)
    fits_nowhere = all(str(each.fits) == "no" for each in result.estimates)
    return 1 if args.gpu is not None and fits_nowhere else 0
