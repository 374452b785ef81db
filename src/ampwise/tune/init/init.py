"""Write ``make`` for a script: read it, try drafts from the most to the least faithful, write the one that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampwise.check.atomic_write import replace_file
from ampwise.check.source.script import os_error_reason
from ampwise.errors import BadInput
from ampwise.tune.init.reading import Part, Script, read_training_script
from ampwise.tune.init.trial import Outcome, try_in_process
from ampwise.tune.init.writing import Draft, drafts_of, todo_line


@dataclass(slots=True)
class Result:
    """What was written, found, and left to do."""

    output: Path
    headline: str = ""
    complete: bool = False  # it ran, or was not to be run and nothing is missing
    found: list[Part] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)


def write_make(
    script_name: str,
    output: Path,
    *,
    force: bool,
    limit_s: float,
    run: bool,
    options: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Write the file; BadInput, in one line, for what cannot be read or written."""
    script = read_training_script(script_name)
    _check_output(output, script_name, force)
    if not limit_s > 0:  # nor NaN
        raise BadInput(f"--timeout {limit_s:g}: expected a number of seconds above 0.")
    try:
        drafts = drafts_of(script, output, options)
    except RecursionError as error:
        raise BadInput(f"{script_name}: it is nested too deeply to be read.") from error
    outcome = None
    if run and not drafts[0].todo:
        progress("calling make() in a process of its own, one step on the CPU")
        outcome = try_in_process(script_name, output, options, limit_s)
    draft = drafts[outcome.draft if outcome else 0]
    text = outcome.text if outcome and outcome.text else draft.text()
    try:
        replace_file(str(output), text.encode())
    except OSError as error:
        raise BadInput(f"{output} cannot be written: {os_error_reason(error)}.") from error

    result = Result(output, found=draft.found)
    if outcome is None:
        lines = {line.strip(): number for number, line in enumerate(text.split("\n"), 1)}
        result.headline = f"written, {len(draft.todo)} to fill in" if draft.todo else "written, not run (--no-run)"
        result.complete = not draft.todo
        result.to_do += [f"{output}:{lines[todo_line(why)]}: {why}" for why in draft.todo]
    elif outcome.ran:
        _describe_run(result, script, outcome, drafts, text)
    else:
        _describe_failure(result, script, outcome, text, options)
    if draft.copied and script.work_on_import is not None:
        line, what = script.work_on_import
        result.found.append(Part("import", f"{what} would run on import, so code is copied, not imported", line))
    return result


def _check_output(output: Path, script_name: str, force: bool) -> None:
    if output.suffix != ".py" or not output.stem.isidentifier():
        raise BadInput(
            f"-o {output}: expected the name of a Python file that can be imported, such as ampwise_make.py."
        )
    if output.exists() and output.samefile(script_name):
        raise BadInput(f"-o {output}: that is the script itself, which is never changed. Name another file.")
    if os.path.lexists(output) and not force:
        raise BadInput(f"{output} is there already. Overwrite it with -f, or name another file with -o.")
    if not output.parent.is_dir():
        raise BadInput(f"-o {output}: there is no folder {output.parent}.")


def _describe_run(result: Result, script: Script, outcome: Outcome, drafts: list[Draft], text: str) -> None:
    size = f"{outcome.parameters / 1e6:.1f} M" if outcome.parameters >= 1e5 else str(outcome.parameters)
    rows = f", batch {outcome.rows}" if outcome.rows else ""
    result.headline = (
        f"make() runs: a step on the CPU, loss {outcome.loss:.4g}, {size} parameters{rows}, {outcome.seconds:.1f} s"
    )
    result.complete = True
    if outcome.is_random:
        known = " of the size in the script" if outcome.is_known else ""
        why = f": {outcome.data_error}" if outcome.data_error else ""
        result.found.append(Part("batch", f"random data{known}{why}", 0))
    if outcome.is_random and not outcome.is_known:
        line = text[: text.index("# Random data of a size")].count("\n") + 1
        result.to_do.append(f"check {result.output}:{line}: the batch has a size that runs; set the size of yours")
    if drafts[0].optimizer and not drafts[outcome.draft].optimizer:
        result.to_do.append(f"check {drafts[0].optimizer}: it is left out, since it cannot be made here")


def _describe_failure(result: Result, script: Script, outcome: Outcome, text: str, options: Sequence[str]) -> None:
    """Say where and why make() does not run, and what to do about it."""
    place = f"{result.output}:{outcome.error_line}" if outcome.error_line else str(result.output)
    code = text.split("\n")[outcome.error_line - 1].strip() if outcome.error_line else ""
    error, again = outcome.error, f"ampwise init {script.path} -f"
    if "ModuleNotFoundError" in error:
        way_out = f"install it, or add its folder to PYTHONPATH; then: {again}"
    elif "the script exits" in error or (script.reads_options and not options and "arg" in code):
        way_out = f'give the options you train with: {again} --args="--option value"'
    elif any(word in error.lower() for word in ("makes no connection", "offline", "huggingface.co")):
        way_out = f"it is not on this machine, and init downloads nothing: download it first; then: {again}"
    elif "not done after" in error:
        way_out = f"give it longer: {again} --timeout 900"
    else:
        way_out = f"edit that line, then: ampwise memory {result.output}:make"
    result.headline = "written, but make() does not run"
    result.to_do += [f"{place}: {error}", *([f"  {code}"] if code else []), way_out]
