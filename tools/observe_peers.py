"""Run every conformance case with every installed contender, and record the outcomes.

    python tools/observe_peers.py    writes tests/conformance/seen.json, from which docs/peers.md is generated

Outcomes of contenders that are not installed are kept as recorded, with their versions and date. `make` does not
install DeepSpeed: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RECORD = REPOSITORY / "tests" / "conformance" / "seen.json"


def main() -> int:
    sys.path.insert(0, str(REPOSITORY / "tests"))  # the cases live with the tests, which are no package
    registry = importlib.import_module("conformance.registry")
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"contenders": {}, "cases": {}}
    cases = registry.all_cases()
    present = [name for name in contenders(cases) if registry.installed(name)]
    if "ampwise" not in present:
        print("observe_peers: error: ampwise is not installed here; `make peers` sees to that", file=sys.stderr)
        return 2
    today = datetime.date.today().isoformat()
    new = {name: {"versions": registry.versions(name), "date": today} for name in present}
    record = {
        "contenders": {name: new.get(name) or old["contenders"].get(name) for name in contenders(cases)},
        "cases": {name: observed(case, present, old["cases"].get(name, {})) for name, case in cases.items()},
    }
    missing = [name for name, facts in record["contenders"].items() if facts is None]
    if missing:
        print(f"observe_peers: error: never seen and not installed here: {', '.join(missing)}", file=sys.stderr)
        return 2
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def contenders(cases: dict[str, Any]) -> list[str]:
    """Return the contenders: ampwise first, then in the order of the cases, those with ampwise's scaler last."""
    names = list(dict.fromkeys(name for case in cases.values() for name in case.runs))
    return sorted(names, key=lambda name: (name != "ampwise", " + " in name))


def observed(case: Any, present: list[str], old: dict[str, Any]) -> dict[str, Any]:
    outcomes = {}
    for name in case.runs:
        if name in present:
            outcome = case.outcome(name)
            outcomes[name] = {"right": outcome.right, "seen": outcome.seen}
            print(f"{'right' if outcome.right else 'WRONG'}  {case.name}: {name}: {outcome.seen}")
        elif name in old.get("outcomes", {}):
            outcomes[name] = old["outcomes"][name]
    return {"title": case.title, "why": case.why, "outcomes": outcomes}


if __name__ == "__main__":
    sys.exit(main())
