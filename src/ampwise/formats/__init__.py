"""Number formats: what each can hold (``format``), which there are (``catalog``), rounding to them (``cast``)."""

from ampwise.formats.catalog import BLOCK_FORMATS, FORMATS, all_names, find_format, find_scalar_format
from ampwise.formats.format import BlockFormat, Format, binade_of

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "BlockFormat",
    "Format",
    "all_names",
    "binade_of",
    "find_format",
    "find_scalar_format",
]
