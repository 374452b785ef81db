"""A run, or two beside each other, as one HTML file that needs nothing else and sends nothing anywhere."""

from ampwise.report.page.render import MARK, comparison_page, page, update

__all__ = ["MARK", "comparison_page", "page", "update"]
