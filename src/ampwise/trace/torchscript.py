"""Find the line of an operation in TorchScript, which runs without Python frames."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ampwise.finding.call_site import CallSite
from ampwise.numbers.op_families import base_name

__all__ = ["line_in_script"]

SOURCE = re.compile(r'File "(.+?)", line (\d+)')
SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def line_in_script(op: str, called_at: CallSite, things: Iterable[Any]) -> CallSite:
    """Return the line of an operation in the TorchScript among these things, if only one of their lines runs it.

    called_at: the line of Python that ran it, which is returned otherwise.
    """
    name = base_name(op)
    here = linecache.getline(called_at.file or "", called_at.line or 0)
    if name in here:  # the line itself may have run it
        return called_at
    lines: set[tuple[str, int]] = set()
    for scripted in _scripted(things):
        graph = scripted.inlined_graph  # its nodes live as long as it does
        for node in graph.findAllNodes(f"aten::{name}", recurse=True):
            found = SOURCE.search(node.sourceRange())
            lines |= {(found[1], int(found[2]))} if found is not None else set()
    if len(lines) != 1:
        return called_at
    file, line = next(iter(lines))
    return replace(called_at, file=file, line=line, span=None, called_from=called_at.in_text)


def _scripted(things: Iterable[Any]) -> Iterable[Any]:
    for thing in things:
        if isinstance(thing, SCRIPTED):
            yield thing
        elif isinstance(thing, nn.Module):
            yield from (each for each in thing.modules() if isinstance(each, SCRIPTED))
        elif isinstance(thing, FunctionType):
            known = [thing.__globals__.get(name) for name in thing.__code__.co_names]
            yield from (each for each in known if isinstance(each, SCRIPTED))
