"""Arguments that several commands have, and their checks: none needs torch, whose import takes seconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ampwise.errors import BadInput, UnknownName
from ampwise.finding.terminal import say

RUNS = "ampwise-runs"  # where `ampwise run` writes records by default
MAKE = "your function that makes the model and a batch: train.py:make (`ampwise init train.py` writes one)"
# The device types of torch, and of backends that extend it.
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "npu", "mtia", "maia", "ipu", "vulkan", "meta", "privateuseone")


def add_make(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add the argument MAKE."""
    parser.add_argument("make", metavar="MAKE", **{"help": MAKE, **options})


def count(text: str) -> int:
    """Parse a number of things, which is at least 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def check_shared(args: argparse.Namespace) -> None:
    """Check MAKE, --gpu and --device of any command."""
    if getattr(args, "make", None) is not None:
        from ampwise.trace.user_code import check_function

        check_function(args.make)
    if getattr(args, "gpu", None) is not None:
        check_gpu(args.gpu, or_capability=getattr(args.command, "TAKES_CAPABILITY", False))
    if getattr(args, "device", None) is not None:
        kind, colon, index = args.device.partition(":")
        if kind not in DEVICES or (colon and not index.isdecimal()):
            guess = "Did you mean cuda? " if kind == "gpu" else ""
            listing = f"{guess}--device takes cpu, cuda, cuda:1, mps, …"
            raise UnknownName("device", args.device, () if guess else DEVICES, listing=listing)


def check_gpu(name: str, *, or_capability: bool = False) -> None:
    """Raise UnknownName if the catalog has no such device; of a family, such as "a100", say which one is taken."""
    from ampwise.hardware.catalog import compute_capability, gpu_named, other_variants

    known_otherwise = name.strip().lower().removeprefix("sm_")
    if or_capability and (known_otherwise in ("cpu", "") or known_otherwise.replace(".", "").isdigit()):
        return
    if compute_capability(known_otherwise):
        raise BadInput(f"--gpu {name}: a capability is not enough here. Name a device of `ampwise gpu --list`.")
    others = other_variants(name)
    if others:
        say("ampwise: {} is taken as {}; others: {}", name, gpu_named(name).name, ", ".join(others))


def check_precision(option: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownName if a precision is not one of these; what other libraries call "float16" is fp16 here."""
    from ampwise.train.precision.names import RIGHT_NAMES

    known = list(known)
    right = RIGHT_NAMES.get(name.lower().removeprefix("torch."))
    if name not in known:
        guess = f"Did you mean {right}? " if right in known else ""
        listing = f"{guess}{option} takes {', '.join(known)}."
        raise UnknownName("precision", name, () if guess else known, listing=listing)
