"""docs/peers.md: what ampwise and other software did in each conformance case."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.markdown import NOTICE, Pages, facts, page, plain, table

from ampwise.errors import BadInput

__all__ = ["peers_page"]


def peers_page(file: Path) -> Pages:
    """Return the page by its path under the repository."""
    parts = [NOTICE, "# Peers", *(_peers(_read_peers(file)) if file.is_file() else ["Nothing seen yet: `make peers`."])]
    return {"docs/peers.md": page(parts)}


def _read_peers(file: Path) -> dict[str, Any]:
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
        for case in record["cases"].values():
            unknown = [name for name in case["outcomes"] if name not in record["contenders"]]
            if unknown:
                raise BadInput(f"{file}: {unknown[0]} has no versions; run `make peers`")
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{file}: not a record of peers ({error!r}); run `make peers`") from error
    return record


def _peers(record: Mapping[str, Any]) -> Iterator[str]:
    contenders, cases = record["contenders"], record["cases"]
    yield (
        "How ampwise and other software behave in situations that occur in mixed-precision training. Every case was "
        "run, on a CPU, with the versions below. `lightning + ampwise` is Lightning's own loop with ampwise's scaler "
        "instead of torch's. A dash: not tried, or the case does not occur there."
    )
    rows = [
        (f"[{case['title']}](#{name})", *(_verdict(case["outcomes"].get(other)) for other in contenders))
        for name, case in cases.items()
    ]
    yield table(["case", *contenders], rows)
    yield "## Versions"
    yield table(
        ["contender", "versions", "date"],
        [(name, facts(seen["versions"]), seen["date"]) for name, seen in contenders.items()],
    )
    yield (
        "`make peers` runs every case with all of these that are installed and records the outcomes; `make docs` "
        "writes this page from the record. `make test` runs them, too, and fails if a recorded version behaves "
        "differently. The code of the cases is in `tests/conformance`, under the name below each title."
    )
    yield "## Cases"
    for name, case in cases.items():
        yield f'<a id="{name}"></a>\n\n### {case["title"]}\n\n`{name}`'
        yield plain(case["why"])
        seen = ((other, case["outcomes"][other]) for other in contenders if other in case["outcomes"])
        yield table(["", "", "outcome"], [(other, _verdict(outcome), outcome["seen"]) for other, outcome in seen])


def _verdict(outcome: Mapping[str, Any] | None) -> str | None:
    return None if outcome is None else "right" if outcome["right"] else "**wrong**"
