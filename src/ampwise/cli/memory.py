"""Say how much memory a training step takes on a GPU, in every precision, without taking it.

MAKER names a function of yours that returns a model, a batch and what makes the loss of it:

  def make(batch=16):                       # in train.py; the parameter is optional
      model = Net()
      x, y = torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

A fourth thing that it returns is the optimizer. The step is run with tensors that have shapes and no memory: forward,
backward, clip, optimizer, as CUDA would run them, its autocast and its fused kernels included, and every tensor is
followed from its allocation to its end through a copy of torch's caching allocator. No GPU is needed, and no weights
are allocated: a model of 7 B takes seconds. Without a MAKER, --params or --layers and --hidden describe a decoder
transformer; what is not said of it is as it usually is, and is told.

Examples:
  ampwise memory train:make
  ampwise memory train.py:make --batch 16,32,64 --gpu a100-sxm-80
  ampwise memory --params 7B --gpu h200
  ampwise memory --params 7B --seq 4096 --checkpointing --fsdp 8 --precision bf16
  ampwise memory --layers 24 --hidden 2048 --heads 16 --optimizer adamw8bit
  ampwise memory --params 7B --precision bf16,bf16-pure,kahan,bf16-pure,bf16-states
  ampwise memory train:make --json | jq '.estimates[] | {precision, batch, peak_bytes}'

The exit code is 0; with --gpu it is 1 when the step fits that GPU in none of the precisions; and it is 2 when nothing
could be counted.

With --json, memory is in bytes, and what is not known is null:
  {name, parameters, trained_parameters, shape, optimizer, checkpointing, fsdp, ddp, gpu, context_bytes, estimates,
   largest_batch, notes}
    one of the estimates  {precision, batch, peak_bytes, reserved_bytes, needed_bytes, phase, peak_split_bytes,
                           most_bytes, phase_peak_bytes, fits, fsdp_ranks, smallest_memory_bytes,
                           bytes_per_parameter}
    gpu                   {name, memory_bytes, usable_bytes, basis}
peak_bytes is what torch.cuda.max_memory_allocated() would say and reserved_bytes what max_memory_reserved() would; with
CUDA's context, an allowance, it is needed_bytes. peak_split_bytes is what the peak consists of, most_bytes the most of
each kind at any time, bytes_per_parameter those of weights, gradients and optimizer state together. fits is yes, tight
(the allocator has to give memory back at every step) or no; fsdp_ranks how many ranks it would take then. largest_batch
is by precision, on that GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.printers import terminal

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from ampwise.tune.memory.result import MemoryEstimate

__all__ = ["add_arguments", "run"]

SIZES = {
    "layers": "how many",
    "hidden": "the width of a layer",
    "heads": "of attention",
    "kv_heads": "of keys and values (default: as many as heads)",
    "ffn": "the inner width of an MLP",
    "vocab": "words in the vocabulary (default: 32000)",
    "seq": "tokens of a sequence (default: 2048)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "maker", metavar="MAKER", nargs="?", help="module:function or file.py:function, such as train:make"
    )
    parser.add_argument("--params", metavar="N", help="of a decoder transformer, such as 124M or 7B")
    for name, said in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int, help=said)
    parser.add_argument(
        "--batch", metavar="ROWS", help="sizes of the batch, with commas (default: what MAKER makes, or 1)"
    )
    parser.add_argument(
        "--precision",
        metavar="LIST",
        help="of fp32, tf32, fp16, bf16 and bf16-pure, with commas (default: the first four)",
    )
    parser.add_argument(
        "--optimizer", metavar="NAME", help="such as adamw, sgd or adamw8bit (default: MAKER's, or adamw)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="repeated blocks are computed again when needed")
    parser.add_argument("--fsdp", metavar="RANKS", type=int, help="what each of so many ranks holds with FSDP")
    parser.add_argument("--ddp", action="store_true", help="count DDP's buckets")
    parser.add_argument(
        "--gpu", metavar="NAME", help="a device of the catalog (default: this machine's, if it has one)"
    )
    parser.add_argument("--no-largest", action="store_true", help="do not look for the largest batch")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say how far it is")


def run(args: argparse.Namespace) -> int:
    result = _estimated(args)
    if args.json:
        from ampwise.strict_json import dumps

        terminal.write(dumps(result.as_dict()), sys.stdout)
    else:
        terminal.print_tables(lambda out: _show(out, result))
    fits_nowhere = all(str(each.fits) == "no" for each in result.estimates)
    return 1 if args.gpu is not None and fits_nowhere else 0


def _estimated(args: argparse.Namespace) -> MemoryEstimate:
    _need_torch()
    from ampwise.low_bit.pure import names_in
    from ampwise.tune.memory.estimate import memory

    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    # What the user's code prints is not what was asked for.
    with _progress(args.quiet) as tell, contextlib.redirect_stdout(sys.stderr):
        return memory(
            args.maker,
            params=args.params,
            precisions=None if args.precision is None else names_in(args.precision),
            batch=_batches(args.batch),
            optimizer=args.optimizer,
            checkpointing=args.checkpointing,
            fsdp=args.fsdp,
            ddp=args.ddp,
            gpu=args.gpu,
            largest=not args.no_largest,
            tell=tell,
            **sizes,
        )


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise memory needs torch: pip install 'ampwise[torch]'") from error


def _batches(text: str | None) -> list[int] | None:
    from ampwise.errors import BadInput

    try:
        return None if text is None else [int(size) for size in text.split(",")]
    except ValueError:
        raise BadInput(f"--batch {text}: expected are numbers of rows, such as 8 or 8,16,32.") from None


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], object] | None]:
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.text import Text

        out = terminal.console(sys.stderr)
        with out.status("making the model") as status:  # Text: a name is not markup
            yield lambda doing: status.update(Text(terminal.printable(f"counting {doing}")))
    else:
        yield lambda doing: terminal.say("ampwise: counting {}", doing)


def _show(out: Console, result: MemoryEstimate) -> None:
    from ampwise.tune.memory.text import CAPTION, headline, lines, title, verdicts

    _say(out, headline(result), style="bold")
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
    for said in verdicts(result):
        _say(out, said)
    for note in (CAPTION, *result.notes):
        _say(out, note, style="dim")


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(terminal.printable(text), style=style, markup=False, emoji=False)
