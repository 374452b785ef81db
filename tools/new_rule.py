"""Write the files of a new rule: the rule with its checks, and the fixture that tests it.

    python -m tools.new_rule clip-by-value --group order

The code is the next free one of the group. Tests fail until every TODO is filled in.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.finding.registry import RETIRED_CODES

__all__ = ["main", "new_rule"]

REPOSITORY = Path(__file__).resolve().parent.parent
RULES = "src/ampwise/rules"
FIXTURES = "tests/rules/fixtures"

RULE = '''\
from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import OptimizerStep, ScalerStep

RULE = Rule(
    code="{code}",
    name="{name}",
    severity=Severity.WARNING,
    summary="TODO: what is wrong, in one sentence.",
    why="TODO: what happens then, with numbers.",
    fix="TODO: what to do instead.",
    bad="TODO = 1",
    good="TODO = 2",
)
# A file without one word of each group cannot have the mistake, and is not parsed. TODO
NEEDS = ((".backward(",),)


def check_source(code: SourceFile) -> Findings:
    """Find it in a script. ``code.regions`` are training steps with all paths through them."""
    for call in code.nodes(ast.Call):
        if code.outline.imports.qualified(call.func) == "torch.TODO":
            yield RULE.at(code.script.place(call), "TODO: what is wrong with this line")


def check_event(step: OptimizerStep | ScalerStep) -> Findings:
    """Find it in a running script. Delete this check if a run does not show the mistake."""
    if step.optimizer == "TODO":
        yield RULE.at(step.site.place, "TODO: what is wrong with this call")
'''

FIXTURE = '''\
# {code} {name}: mark faulty lines; functions named fine_* look alike and are right.


def faulty(model, optimizer, loss):
    loss.backward()
    optimizer.step()  # TODO: the mistake, marked with an expect comment that names {code}


def fine_todo(model, optimizer, loss):
    loss.backward()
    optimizer.step()


def run_todo():
    """TODO: runs on a CPU; a line that a run must report has a comment with "at run time:" and the code."""
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
'''


def new_rule(name: str, group: str, root: Path = REPOSITORY) -> list[Path]:
    """Write the two files of a rule and return their paths."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise BadInput(f"rule name {name!r}: expected lower-case words joined by hyphens, such as clip-scaled-grads.")
    folders = _folders(root)
    if group not in folders:
        raise UnknownName("group", group, folders, listing=f"The groups are {', '.join(folders)}.")
    stem = name.replace("-", "_")
    files = {root / RULES / folders[group] / f"{stem}.py": RULE, root / FIXTURES / f"{stem}.py": FIXTURE}
    for path in files:
        if path.exists():
            raise BadInput(f"{path.relative_to(root)} exists already.")
    code = _next_code(folders[group], root)
    for path, text in files.items():
        path.write_text(text.format(code=code, name=name), encoding="utf-8")
    return list(files)


def _next_code(folder: str, root: Path) -> str:
    """Return the code after the highest one of the group; codes of removed rules are never used again."""
    prefix = _prefix(folder)
    digits = len("AMP000") - len(prefix)
    # AMP53x and AMP54x are groups of their own within AMP5xx.
    inner = [each for each in map(_prefix, _folders(root).values()) if each.startswith(prefix) and each != prefix]
    texts = [path.read_text(encoding="utf-8") for path in (root / RULES).glob("amp*/*.py")]
    used = {*RETIRED_CODES, *(code for text in texts for code in re.findall(r'code="(AMP\d+)"', text))}
    own = [code for code in used if code.startswith(prefix) and not code.startswith(tuple(inner))]
    number = int(max(own, default=prefix + "0" * digits).removeprefix(prefix)) + 1
    code = f"{prefix}{number:0{digits}}"
    if number >= 10**digits or code.startswith(tuple(inner)):
        raise BadInput(f"{folder}: all codes are used.")
    return code


def _prefix(folder: str) -> str:
    return folder.partition("_")[0].upper().rstrip("X")


def _folders(root: Path) -> dict[str, str]:
    """Return the folders of rules by the name of their group."""
    return {path.name.partition("_")[2]: path.name for path in sorted((root / RULES).glob("amp*_*"))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="new_rule", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="the name of the rule, after the bad pattern: clip-scaled-grads")
    parser.add_argument("--group", default="order", help=f"{', '.join(_folders(REPOSITORY))} (default: order)")
    args = parser.parse_args(argv)
    for path in new_rule(args.name, args.group):
        print(f"wrote {path.relative_to(REPOSITORY)}")
    print("Fill in the TODOs, then: pytest tests/rules/test_fixtures.py tests/rules/test_registry.py")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AmpwiseError as error:
        sys.exit(f"new_rule: error: {error}")
