"""HTML pages of a run or of a comparison: one self-contained file each, which loads and sends nothing."""

from ampwise.report.page.render import comparison_page, page, update
from ampwise.report.page.templates import GENERATOR_MARK

__all__ = ["GENERATOR_MARK", "comparison_page", "page", "update"]
