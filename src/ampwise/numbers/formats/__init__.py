"""Number formats: their limits (``format``), the catalog (``catalog``), and rounding to them (``cast``)."""

from ampwise.numbers.formats.catalog import BLOCK_FORMATS, FORMATS, all_names, find_format, find_scalar_format
from ampwise.numbers.formats.format import BlockFormat, Format, binade_of, short_number

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "BlockFormat",
    "Format",
    "all_names",
    "binade_of",
    "find_format",
    "find_scalar_format",
    "short_number",
]
