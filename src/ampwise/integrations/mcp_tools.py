"""What an agent can ask: each tool turns its arguments into the command line of a verb, and runs that.

What reads never loads a file of the user's as code. What does (``run``, ``replay``, and the two that take a function's
name) needs ``allow_run``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ampwise.errors import BadInput
from ampwise.integrations.mcp_folder import Folder, Named, Word
from ampwise.integrations.mcp_process import Ended, Launch, launch
from ampwise.printers.terminal import printable
from ampwise.strict_json import dumps

__all__ = ["MAY_LOAD", "NEEDS_ALLOW_RUN", "READS_ONLY", "Tools"]

READS_ONLY = ("check", "explain", "advise", "memory", "formats", "gpu", "read_report")
MAY_LOAD = ("advise", "memory")  # given a function, and with allow_run
NEEDS_ALLOW_RUN = ("run",)  # not even there without it

LONGEST = 40_000  # characters of an answer: what an agent can read at once
MOST_FINDINGS = 100
MOST_NOTES = 20
SECONDS = 300.0
MOST_SECONDS = 3600.0
LONGEST_WORD = 200
LONGEST_TEXT = 1_000_000
MOST_AT_ONCE = 4  # requests that are worked on; others wait for their turn,
MOST_WAITING = 100  # up to so many


class Tools:
    """The tools, for one folder."""

    def __init__(self, folder: Folder, *, allow_run: bool = False, run_verb: Launch = launch) -> None:
        from anyio import Semaphore

        self._folder, self._allow_run, self._run_verb = folder, allow_run, run_verb
        self._turns, self._waiting = Semaphore(MOST_AT_ONCE), 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tools there are, in the order they are shown in."""
        found = [name for name, value in vars(Tools).items() if not name.startswith("_") and callable(value)]
        return tuple(name for name in found if self._allow_run or name not in NEEDS_ALLOW_RUN)

    async def check(self, paths: list[str] | None = None, text: str = "", select: str = "", ignore: str = "") -> str:
        """paths: files and folders (default: all). text: code to check instead, before it is a file. select, ignore:
        rules by code (AMP101), start of a code (AMP1), name, or ALL; with commas. Nothing is run or written.

        The answer: {findings: [{code, name, severity, message, file, cell, line, column, fix, mendable}], left_out,
        notes}. `explain` says more about a code, `fix` mends.
        """
        rules = _options(select=select, ignore=ignore)
        ended = await self._check(["--json", "--no-fix", "--exit-zero", *rules], paths, text)
        found = _parsed(ended.out)
        shown = [_slim(each) for each in found[:MOST_FINDINGS]]
        while shown and len(dumps(shown)) > LONGEST:
            del shown[len(shown) // 2 :]
        return dumps({"findings": shown, "left_out": len(found) - len(shown), "notes": _notes(ended.err)})

    async def fix(self, paths: list[str] | None = None, write: bool = False, unsafe: bool = False) -> str:
        """paths: files and folders (default: all). The answer is a unified diff, and nothing is written unless
        write is true. unsafe: also where mending may change what else the script does.
        """
        unsafely = "--unsafe-fixes" if unsafe else "--no-unsafe-fixes"
        ended = await self._check(["--diff", "--no-fix", unsafely], paths)
        told = _notes(ended.err)
        if write and ended.out:
            left = await self._check(["--fix", "--json", "--exit-zero", unsafely], paths)
            told = ["written", f"{len(_parsed(left.out))} findings are left", *_notes(left.err)]
        return _shortened("".join(f"{line}\n" for line in told) + ended.out)

    async def explain(self, rule: str) -> str:
        """rule: a code (AMP101) or a name (clip-scaled-grads): what is wrong, why it matters, the fix, bad and good."""
        return (await self._verb("explain", [_word(rule)])).out

    async def advise(
        self,
        gpu: str | float | None = None,
        params: str | int | None = None,
        arch: str | None = None,
        want: str | None = None,
        scaling: str | None = None,
        symptom: str | None = None,
        ideas: list[str] | None = None,
        measured: float | None = None,
        subject: str | None = None,
    ) -> str:
        """gpu: a device (h200), a compute capability (8.6), or cpu; without it, this machine. params: 124M, 7B. arch:
        transformer, cnn. want: what one has in mind, fp16, bf16, tf32, fp8. scaling: none, dynamic, manual:1000.
        symptom: nan, slow, memory, skipped. ideas: what was proposed, autocast-off, bf16-is-newer. measured: a
        speed-up. subject: module:function that makes model, batch and loss; needs --allow-run.

        The answer: precision, why (each with its basis), what speaks against what was wanted, triage, code to paste.
        """
        options = _options(
            gpu=gpu, params=params, arch=arch, want=want, scaling=scaling, symptom=symptom, measured=measured
        )
        proposed = [word for idea in ideas or () for word in _options(idea=idea)]
        maker = [] if subject is None else [self._loaded("advise subject", subject)]
        return _shortened((await self._verb("advise", ["--json", *options, *proposed, *maker])).out)

    async def memory(
        self,
        params: str | int | None = None,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
        vocab: int | None = None,
        seq: int | None = None,
        batch: str | int | None = None,
        precision: str | None = None,
        optimizer: str | None = None,
        gpu: str | None = None,
        fsdp: int | None = None,
        checkpointing: bool = False,
        maker: str | None = None,
    ) -> str:
        """A decoder transformer by its size: params (7B) or layers, hidden, heads, vocab, seq. batch: 16 or 16,32.
        precision: fp32, tf32, fp16, bf16, bf16-pure, with commas. optimizer: adamw, sgd, adamw8bit. gpu: a device it
        is to fit. fsdp: ranks that share it. checkpointing: of activations. maker: module:function that makes model,
        batch and loss, in the place of a size; needs --allow-run.
        """
        sizes = _options(params=params, layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, batch=batch)
        how = _options(precision=precision, optimizer=optimizer, gpu=gpu, fsdp=fsdp, checkpointing=checkpointing)
        own = [] if maker is None else [self._loaded("memory maker", maker)]
        return _shortened((await self._verb("memory", ["--json", "-q", *sizes, *how, *own])).out)

    async def formats(self, names: list[str] | None = None) -> str:
        """names: number formats (fp16, e4m3, mxfp8; default: all): range, precision, and what needs scaling."""
        return _shortened((await self._verb("formats", ["--json", *map(_word, names or ())])).out)

    async def gpu(self, name: str | None = None, want: list[str] | None = None) -> str:
        """name: a device of the catalog (h200, "NVIDIA A100-SXM4-80GB"); without it, this machine, and what is wrong
        with it. want: formats this machine's GPU should have matrix units for.
        """
        wanted = [word for each in want or () for word in _options(want=each)]
        named = [] if name is None else [_word(name)]
        return _shortened((await self._verb("gpu", ["--json", *wanted, *named])).out)

    async def replay(self, capsule: str, build: str, precision: str | None = None, device: str | None = None) -> str:
        """capsule: the folder of a bad step that was saved. build: module:function that makes model and loss.
        precision, device: to run it in and on. Needs --allow-run.
        """
        self._needs_allow_run("replay builds the model with your code")
        made = Named("maker", [build], before="--build=")
        how = _options(precision=precision, device=device)
        ended = await self._verb("replay", ["--output-format=full", *how, made, Named("folder", [capsule])])
        return _shortened("\n".join([*_notes(ended.err), ended.out]))

    async def read_report(self, run: str, other: str | None = None) -> str:
        """run: the folder of a record that `ampwise run` left: verdict, findings, where the time went, layer by layer.
        other: a later one, to compare it with.
        """
        records = Named("folder", [each for each in (run, other) if each is not None])
        return _shortened((await self._verb("report", [records])).out)

    async def run(self, script: str, args: list[str] | None = None, output: str = "", seconds: float = SECONDS) -> str:
        """script: a training script of the folder, run as it is and watched. args: its own arguments. output: the
        record's folder, which must not be there yet (default: a new one in ampwise-runs/). It is stopped after
        seconds. The answer: its exit code, the end of what it printed, and the summary; `read_report` has the rest.
        """
        self._needs_allow_run("run executes a script")
        if not 0 < seconds <= MOST_SECONDS:
            raise BadInput(f"seconds={seconds:g}: above 0 and up to {MOST_SECONDS:g}.")
        where = [Named("new", [output], before="--output=")] if output else []
        words = ["run", *where, Named("file", [script]), *(args or ())]
        ended = await self._run_verb(words, cwd=self._folder.root, seconds=seconds)
        if ended.code == 2 and ended.err.startswith("ampwise: error: "):
            raise BadInput(_last_line(ended))
        half = LONGEST // 2
        return f"exit code {ended.code}\n{_end_of(ended.out, half)}\n{_end_of(ended.err, half)}"

    async def _check(self, options: Sequence[str], paths: list[str] | None, text: str = "") -> Ended:
        if len(text) > LONGEST_TEXT:
            raise BadInput(f"text: of {len(text)} characters; up to {LONGEST_TEXT} are taken. Name a file.")
        where: list[Word] = [Named("settings"), "-"] if text else [Named("scripts", paths or ["."])]
        return await self._verb("check", [*options, *where], text or None)

    async def _verb(self, verb: str, words: Sequence[Word], text: str | None = None) -> Ended:
        """A verb that is to end with 0 or 1; what it says otherwise is the error."""
        if self._waiting >= MOST_WAITING:
            raise BadInput(f"{self._waiting} requests are not answered yet: ask again when they are.")
        self._waiting += 1
        try:
            async with self._turns:
                ended = await self._run_verb([verb, *words], cwd=self._folder.root, seconds=SECONDS, text=text)
        finally:
            self._waiting -= 1
        if ended.code not in (0, 1) or "Traceback (most recent call last)" in ended.err:
            raise BadInput(_last_line(ended))
        return ended

    def _loaded(self, what: str, name: str) -> Named:
        self._needs_allow_run(f"{what}={name[:LONGEST_WORD]!r} loads your code")
        return Named("maker", [name])

    def _needs_allow_run(self, what: str) -> None:
        if not self._allow_run:
            raise BadInput(
                f"{what}, and this server was started without --allow-run. Ask the user: ampwise mcp --allow-run"
            )


def _options(**given: str | float | bool | None) -> list[str]:
    """As --name=value, which cannot be taken for another option."""
    left_open = (None, False)  # by identity: 0 is a number that was given, and the verb's to refuse
    said = {
        name: value for name, value in given.items() if value != "" and not any(value is each for each in left_open)
    }
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in said.items()]


def _word(name: str) -> str:
    """A name for a command line."""
    if not name.strip() or name.startswith("-") or not name.isprintable() or len(name) > LONGEST_WORD:
        raise BadInput(f"{printable(name[:LONGEST_WORD])!r}: a name is expected.")
    return name


def _slim(found: dict[str, Any]) -> dict[str, Any]:
    """What of a finding is for an agent."""
    at = found["location"] or {}
    return {
        **{key: found[key] for key in ("code", "name", "severity", "message")},
        "file": found["filename"],
        "cell": found["cell"],
        "line": at.get("row"),
        "column": at.get("column"),
        "fix": found["fix"]["message"],
        "mendable": {"safe": "yes", "unsafe": "with unsafe"}.get(found["fix"]["applicability"], "no"),
    }


def _parsed(out: str) -> list[dict[str, Any]]:
    """The findings; what was not checked is on stderr, too, and among the notes."""
    try:
        found: list[dict[str, Any]] = json.loads(out or "[]")
    except ValueError:  # so much that its middle was left out
        raise BadInput("there are too many findings to tell: name fewer files, or select rules.") from None
    return [each for each in found if each["code"] is not None]


def _notes(err: str) -> list[str]:
    lines = [line.removeprefix("ampwise: ") for line in err.splitlines() if line.strip()]
    return lines[:MOST_NOTES] + ([f"and {len(lines) - MOST_NOTES} lines more"] if len(lines) > MOST_NOTES else [])


def _last_line(ended: Ended) -> str:
    lines = [line for line in ended.err.splitlines() if line.strip()]
    said = lines[-1] if lines else f"it ended with {ended.code} and said nothing"
    return printable(said.removeprefix("ampwise: ").removeprefix("error: "))[:2000]


def _shortened(text: str) -> str:
    over = len(text) - LONGEST
    return text if over <= 0 else f"{text[:LONGEST]}\n[... {over} characters left out: ask for less]"


def _end_of(text: str, most: int) -> str:
    over = len(text) - most
    return text if over <= 0 else f"[{over} characters left out ...]\n{text[-most:]}"
