"""Lines that gave parameters a 16-bit format: casts of models, and modules made in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site

__all__ = ["HalfCasts"]


WIDTHS = (torch.float16, torch.bfloat16)


class HalfCasts:
    """Remember which line made a parameter 16 bits wide."""

    def __init__(self) -> None:
        self._sites: dict[int, tuple[weakref.ref[Tensor], CallSite]] = {}
        self._default: CallSite | None = None  # where the default dtype became a 16-bit one

    def default_set(self) -> None:
        self._default = calling_site() if _is_half(torch.get_default_dtype()) else None

    def made(self, parameter: Tensor) -> None:
        """Note a parameter that a module gets."""
        if _is_half(parameter.dtype) and id(parameter) not in self._sites:
            self._note([parameter], self._default or calling_site())

    @staticmethod
    def wide_ones(model: nn.Module) -> list[Tensor]:
        """Return the parameters of a model that are not 16 bits wide, before a cast."""
        return [each for each in nn.Module.parameters(model) if not _is_half(each.dtype)]

    def converted(self, wide: Sequence[Tensor]) -> None:
        """Note those that a cast has made 16 bits wide."""
        half = [each for each in wide if _is_half(each.dtype)]
        if half:
            self._note(half, calling_site())

    def _note(self, parameters: Sequence[Tensor], site: CallSite) -> None:
        for each in parameters:
            self._sites[id(each)] = (weakref.ref(each), site)

    def site_of_first(self, optimizer: Any) -> CallSite | None:
        """Return the line that made the first parameter of an optimizer 16 bits wide; this runs at each step."""
        first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
        return None if first is None or first.dtype not in WIDTHS else self.site_of(first)

    def site_of(self, parameter: Tensor) -> CallSite | None:
        refer, site = self._sites.get(id(parameter), (None, None))
        return site if refer is not None and refer() is parameter and _is_half(parameter.dtype) else None


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in WIDTHS
