"""Open a secret address in a browser. Every user of the machine can read the browser's command line.

So the command line has only the name of a private file, which redirects to the address.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

from ampwise.errors import BadInput

__all__ = ["redirect_page"]

PREFIX = "ampwise-open-"
PAGE = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>ampwise</title>
<p><a href="{address}">The page of the run</a></p>
"""


@contextmanager
def redirect_page(address: str) -> Iterator[str]:
    """Yield the file:// address of a page that redirects to ``address``; the file is removed at the end."""
    folder = _private_folder()
    try:
        page = folder / "open.html"
        page.touch(mode=0o600, exist_ok=False)
        page.write_text(PAGE.format(address=escape(address)), encoding="utf-8")
        yield page.as_uri()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """Create a folder that only this user can read.

    It is in the home folder, with a name without a dot: a browser installed as a snap can read nothing else.
    """
    places = (os.path.expanduser("~"), os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir())  # noqa: PTH111
    for place in filter(os.path.isabs, places):
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # of mode 0700
        except OSError:
            continue
    raise BadInput(f"--open: none of {', '.join(places)} is writable. Open the address yourself.")
