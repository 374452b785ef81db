"""Estimate the GPU memory of a training step in every precision, without allocating it.

MAKER names a function of yours that returns a model, a batch and a loss function:

  def make(batch=16):                       # in train.py; the parameter is optional
      model = Net()
      x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

It may return the optimizer as a fourth value. The step runs on tensors without memory: forward, backward, clip,
optimizer, as on CUDA, with its autocast and fused kernels. Every tensor is followed from allocation to release through
a model of torch's caching allocator. No GPU is needed, and no weights are allocated: a 7B model takes seconds. Without
a MAKER, --params or --layers and --hidden describe a decoder transformer; sizes that are not given get usual values,
which are reported.

Examples:
  ampwise memory train:make
  ampwise memory train.py:make --batch 16,32,64 --gpu a100-sxm-80
  ampwise memory --params 7B --gpu h200
  ampwise memory --params 7B --seq 4096 --checkpointing --fsdp 8 --precision bf16
  ampwise memory --layers 24 --hidden 2048 --heads 16 --optimizer adamw8bit
  ampwise memory --params 7B --precision bf16,bf16-pure,kahan,bf16-pure,bf16-states
  ampwise memory train:make --json | jq '.estimates[] | {precision, batch, peak_bytes}'

The exit code is 0, 1 if the step does not fit the GPU given with --gpu in any precision, and 2 on an error.

With --json, memory is in bytes, and unknown values are null:
  {name, parameters, trained_parameters, shape, optimizer, checkpointing, fsdp, ddp, gpu, context_bytes, estimates,
   largest_batch, notes}
    one of the estimates  {precision, batch, peak_bytes, reserved_bytes, needed_bytes, phase, peak_split_bytes,
                           most_bytes, phase_peak_bytes, fits, fsdp_ranks, smallest_memory_bytes,
                           bytes_per_parameter}
    gpu                   {name, memory_bytes, usable_bytes, basis}
peak_bytes corresponds to torch.cuda.max_memory_allocated(), reserved_bytes to max_memory_reserved(), and needed_bytes
adds an allowance for the CUDA context. peak_split_bytes is what the peak consists of, most_bytes the maximum of each
kind at any time, bytes_per_parameter the bytes of weights, gradients and optimizer state together. fits is yes, tight
(the allocator must release memory at every step) or no; fsdp_ranks is how many ranks it would take if it does not fit.
largest_batch is per precision, on that GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from ampwise.cli import print_json
from ampwise.errors import BadInput
from ampwise.finding import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from ampwise.tune.memory.result import MemoryEstimate

__all__ = ["add_arguments", "run"]

NEEDS_TORCH = True
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
    add("maker", metavar="MAKER", nargs="?", help="module:function or file.py:function, such as train:make")
    add("--params", metavar="N", help="parameters of a decoder transformer, such as 124M or 7B")
    for name, help_text in SIZES.items():
        add(f"--{name.replace('_', '-')}", metavar="N", type=int, help=help_text)
    add("--batch", metavar="ROWS", help="batch sizes, comma-separated (default: the batch that MAKER makes, or 1)")
    add(
        "--precision",
        metavar="LIST",
        help="comma-separated: fp32, tf32, fp16, bf16, bf16-pure (default: the first four)",
    )
    add("--optimizer", metavar="NAME", help="such as adamw, sgd or adamw8bit (default: MAKER's, or adamw)")
    add("--checkpointing", action="store_true", help="with activation checkpointing of repeated blocks")
    add("--fsdp", metavar="RANKS", type=int, help="memory of one rank with FSDP over this many ranks")
    add("--ddp", action="store_true", help="include DDP's gradient buckets")
    add("--gpu", metavar="NAME", help="a device of the catalog (default: this machine's, if it has one)")
    add("--no-largest", action="store_true", help="do not look for the largest batch")
    add("--json", action="store_true", help="JSON, as described above")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    try:
        batches = None if args.batch is None else [int(size) for size in args.batch.split(",")]
    except ValueError:
        raise BadInput(f"--batch {args.batch}: expected whole numbers of rows, such as 8 or 8,16,32.") from None
    from ampwise.train.low_bit.pure_bf16 import split_precisions
    from ampwise.tune.memory.estimate import memory

    # Keep what the user's code prints out of our output.
    showing = terminal.progress_line("making the model", "counting {}", prefix="ampwise: ", quiet=args.quiet)
    with showing as progress, contextlib.redirect_stdout(sys.stderr):
        result = memory(
            args.maker,
            params=args.params,
            precisions=None if args.precision is None else split_precisions(args.precision),
            batch=batches,
            optimizer=args.optimizer,
            checkpointing=args.checkpointing,
            fsdp=args.fsdp,
            ddp=args.ddp,
            gpu=args.gpu,
            largest=not args.no_largest,
            progress=progress,
            **{name: getattr(args, name) for name in SIZES if getattr(args, name) is not None},
        )
    if args.json:
        print_json(result.as_dict())
    else:
        terminal.print_tables(lambda out: _show(out, result))
    fits_nowhere = all(str(each.fits) == "no" for each in result.estimates)
    return 1 if args.gpu is not None and fits_nowhere else 0


def _show(out: Console, result: MemoryEstimate) -> None:
    from ampwise.tune.memory.result import CAPTION, headline, lines, title, verdicts

    def say(text: str, style: str = "") -> None:
        out.print(terminal.printable(text), style=style, markup=False, emoji=False)

    say(headline(result), style="bold")
    for batch in result.batches:
        out.print()
        table = terminal.table(title(result, batch))
        for precision in result.precisions:
            table.add_column(precision, justify="right", no_wrap=True)
        table.add_column("basis", style="dim", no_wrap=True)
        for line in lines(result, batch):
            table.add_row(line.label, *line.cells, line.basis, style="bold" if line.strong else "")
        out.print(table)
    out.print()
    for verdict in verdicts(result):
        say(verdict)
    for note in (CAPTION, *result.notes):
        say(note, style="dim")
