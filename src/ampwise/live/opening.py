"""Opening a secret address in a browser. Every user of the machine can read the browser's command line.

So that has only the name of a file, which leads to the address and which nobody else can read.
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

__all__ = ["leading_to"]

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
def leading_to(address: str) -> Iterator[str]:
    """The file:// address of a page that leads on to ``address``; the file is there until this is left."""
    folder = _private_folder()
    try:
        page = folder / "open.html"
        page.touch(mode=0o600, exist_ok=False)
        page.write_text(PAGE.format(address=escape(address)), encoding="utf-8")
        yield page.as_uri()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder for this user alone.

    In the home folder and by a name without a dot: a browser that is a snap sees nothing else of the disk.
    """
    places = (os.path.expanduser("~"), os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir())  # noqa: PTH111
    for place in filter(os.path.isabs, places):
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # of mode 0700
        except OSError:
            continue
    raise BadInput(f"--open: none of {', '.join(places)} can be written to. Open the address yourself.")
