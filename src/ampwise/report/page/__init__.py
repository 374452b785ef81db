"""A run, or two beside each other, as one HTML file that needs nothing else and sends nothing anywhere."""

from ampwise.report.page.render import comparison_page, page, update
from ampwise.report.page.templates import MARK

__all__ = ["MARK", "comparison_page", "page", "update"]
