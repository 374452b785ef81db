"""Say which matrix products of a training step have sizes that waste time, and what to do about each.

Matrix units load words of 16 bytes: sizes along which matrices lie in memory are to be multiples of 8 elements of 16
bits, of 4 of 32, and, for FP8, of 16, which there is a requirement. The step of training is run once, forward and
backward. On a GPU, what better sizes would save is measured; elsewhere the step runs on tensors without memory, and
costs are derived from the work of each product. `ampwise.pad_(model)` mends what can be mended by padding.

MAKE names a function that returns model, batch and loss function:
  def make(batch=16):
      model, x, y = Net(), torch.randn(batch, 128), torch.randint(10, (batch,))
      return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)

Examples:
  ampwise align train:make
  ampwise align train.py:make --precision fp8 --gpu h100-sxm
  ampwise align train:make --batch 32 --to 64
  ampwise align train:make --json | jq '.layers[] | select(.worth_mending) | .name'

The exit code is 1 if something is worth mending, 0 if not, and 2 if that could not be found out.

With --json, {subject, precision, device, gpu, processors, to, rows, tokens, matrix_flops, step_ms, basis, layers,
padding, remarks, findings}; what is not known is null:
  one of the layers   {name, modules, kind, precision, product: {m, n, k, batches}, off: [{role, size, better}],
                       share, off_share, saved_ms, worth_mending, advice}
  padding             what ampwise.pad_ would do: {padded: [{names, before, after, how, added}],
                       left: [{name, size, why}]}
  findings            [{code, name, severity, message, place, evidence, fix}]
Shares are of the matrix work. saved_ms, in a step, is null where nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from ampwise.printers import terminal
from ampwise.printers.terminal import printable

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from rich.console import Console

    from ampwise.tune.align.result import Alignment

__all__ = ["add_arguments", "run"]

WRAPPED = 2  # the column with what is off


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("make", metavar="MAKE", help="module:function or file.py:function, such as train:make")
    parser.add_argument("--precision", metavar="NAME", default="bf16", help="fp32, tf32, fp16, bf16 (default) or fp8")
    parser.add_argument(
        "--gpu", metavar="NAME", help="what it is to run on, of `ampwise gpu --list` (default: this one)"
    )
    parser.add_argument("--device", metavar="NAME", help="where to run the step: cuda or cpu (default: cuda if there)")
    parser.add_argument("--batch", metavar="N", type=int, help="rows of the batch (default: as the function makes it)")
    parser.add_argument("--to", metavar="N", type=int, help="sizes are to be multiples of this, such as 64")
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing about how far it is")
    parser.add_argument("--json", action="store_true", help="JSON, as described above")


def run(args: argparse.Namespace) -> int:
    found = _found(args)
    if args.json:
        from ampwise.strict_json import dumps

        terminal.write(dumps(found.as_dict()), sys.stdout)
    else:
        terminal.print_tables(lambda out: _show(out, found))
    return 1 if found.findings else 0


def _found(args: argparse.Namespace) -> Alignment:
    _need_torch()
    from ampwise.tune.align.align import align

    def tell(text: str) -> None:
        if not args.quiet:
            terminal.say("ampwise: {}", text)

    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not what was asked for
        return align(
            args.make,
            precision=args.precision,
            gpu=args.gpu,
            batch=args.batch,
            to=args.to,
            device=args.device,
            tell=tell,
        )


def _need_torch() -> None:
    from ampwise.errors import MissingDependency

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("ampwise align needs torch: pip install 'ampwise[torch]'") from error


def _show(out: Console, found: Alignment) -> None:
    from ampwise.tune.align.result import HEADINGS

    _say(out, found.head_line)
    if found.off:
        table = terminal.table(*HEADINGS)
        table.columns[WRAPPED].no_wrap = False  # on a narrow terminal nothing is lost of it
        for row in found.rows():
            table.add_row(*row)
        out.print()
        out.print(table)
        out.print()
    for line in found.to_do():
        _say(out, line)
    for remark in found.remarks:
        _say(out, f"remark: {remark}")
    _say(out, found.verdict)


def _say(out: Console, text: str) -> None:
    """A line that stays one line, so that it can be searched for."""
    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)
