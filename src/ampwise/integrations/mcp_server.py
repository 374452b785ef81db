"""The server of `ampwise mcp`: tools for an agent over stdin and stdout, with the official SDK.

Each tool turns its arguments into the command line of an ampwise command, and runs it. Tools that only read never load
the user's files as code. Those that do (``run``, ``replay``, and ``advise`` and ``memory`` with a function's name) need
``allow_run``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import AmpwiseError, BadInput, MissingDependency
from ampwise.finding.strict_json import dumps
from ampwise.finding.terminal import printable
from ampwise.integrations.mcp_process import CommandLauncher, CommandResult, end_all, launch
from ampwise.integrations.mcp_worker import AgentFolder, NamedPath, Word

if TYPE_CHECKING:
    from mcp.server import MCPServer

FIRST, TOO_LATE = (2, 3), (3, 0)  # tested versions of the SDK, as in pyproject.toml
INSTALL = 'pip install "ampwise[mcp]"'
COMMAND_OF_TOOL = {"fix": "check", "read_report": "report"}  # tools that are not named after their command
FOR_AGENTS = """\
Mixed-precision training for PyTorch: find mistakes in scripts (check, fix, explain), choose a precision (advise, gpu,
formats, memory), explain runs (read_report, replay). Prove a claim with a tool before you make it. Only paths below
{root} are read. {running}"""
RUNNING = {
    True: "User code may be run (--allow-run).",
    False: "User code is not run; the user can allow it with `ampwise mcp --allow-run`.",
}
READS_ONLY = ("check", "explain", "advise", "memory", "formats", "gpu", "read_report")
MAY_LOAD = ("advise", "memory")  # load user code if they get a function, and with allow_run only
NEEDS_ALLOW_RUN = ("run",)  # offered with allow_run only

LONGEST = 40_000  # characters of an answer: what an agent can read at once
LONGEST_SUMMARY, LONGEST_OUTPUT = 12_000, 4_000  # characters of a run's stderr, with the findings, and of its stdout
MOST_FINDINGS = 100
SEVERITIES = ("error", "warning", "info")
MOST_NOTES = 20
SECONDS = 300.0
MOST_SECONDS = 3600.0
LONGEST_WORD = 200
LONGEST_TEXT = 1_000_000
MOST_AT_ONCE = 4  # requests that run at the same time; others are queued
MOST_WAITING = 100  # requests that run or are queued


def serve(root: str | Path, *, allow_run: bool) -> None:
    """Answer on stdin and stdout until stdin ends."""
    folder = AgentFolder(root)
    need_mcp()

    def leave(number: int, _frame: object) -> None:
        """End the process and its children at once: a thread blocked on stdin cannot be woken."""
        end_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    make_server(folder, allow_run=allow_run, run_command=partial(launch, own_code=allow_run)).run("stdio")


def need_mcp() -> None:
    """Raise MissingDependency without the SDK, BadInput with an untested version."""
    try:
        version = importlib.metadata.version("mcp")
        importlib.import_module("mcp.server")
    except ImportError as error:
        raise MissingDependency(f"ampwise mcp needs the package mcp: {INSTALL}") from error
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not FIRST <= found < TOO_LATE:
        tested = "{}.{} or later, below {}.{}".format(*FIRST, *TOO_LATE)
        raise BadInput(f"ampwise mcp needs mcp {tested}, but {version} is installed: {INSTALL}")


def make_server(
    folder: AgentFolder, *, allow_run: bool = False, run_command: CommandLauncher = launch
) -> MCPServer[Any]:
    """Make the server with its tools; it does not run yet."""
    from mcp.types import ToolAnnotations

    from ampwise.finding.version import installed_version

    tools = AgentTools(folder, allow_run=allow_run, run_command=run_command)
    server = _server_type()(
        "ampwise",
        version=installed_version() or "",
        instructions=FOR_AGENTS.format(root=folder.root, running=RUNNING[allow_run]),
        log_level="WARNING",  # to stderr
    )
    only_reads = set(READS_ONLY).difference(MAY_LOAD if allow_run else ())
    for name in tools.names:
        # The first line of the command's help, and what this tool adds to it.
        command = importlib.import_module(f"ampwise.cli.{COMMAND_OF_TOOL.get(name, name)}")
        first = "Fix what `check` finds" if name == "fix" else str(command.__doc__).partition("\n")[0].rstrip(".")
        server.add_tool(
            getattr(tools, name),
            name=name,
            description=f"{first}. {_documented(name)[0]}".rstrip(),
            annotations=ToolAnnotations(read_only_hint=name in only_reads, open_world_hint=False),
            structured_output=False,
        )
    return server


def _documented(tool: str) -> tuple[str, dict[str, str]]:
    """Return what a tool's docstring says: the first paragraph, and a text for each parameter."""
    first, _, rest = inspect.cleandoc(getattr(AgentTools, tool).__doc__).partition("\n\n")
    return " ".join(first.split()), dict(line.split(": ", 1) for line in rest.splitlines())


def _short_schema(tool: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's parameters with descriptions, and without what an agent can do without.

    Pydantic writes a title for each parameter, and that it may be null and is by default; leaving it out does the same.
    """
    described = {}
    for name, text in _documented(tool)[1].items():
        found = {key: value for key, value in schema["properties"][name].items() if key not in ("title", "default")}
        types = [each for each in found.pop("anyOf", []) if each != {"type": "null"}]
        same = types[0] if len(types) == 1 else {"type": [each["type"] for each in types]} if types else {}
        described[name] = {**found, **same, "description": text}
    return {"type": "object", "properties": described, "required": schema.get("required", [])}


def _server_type() -> type[MCPServer[Any]]:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

    class OneLineErrorServer(MCPServer[Any]):
        """Server that answers an AmpwiseError or wrong arguments with one line; other errors are bugs of ours."""

        async def list_tools(self) -> Any:
            tools = await super().list_tools()
            return [
                tool.model_copy(update={"input_schema": _short_schema(tool.name, tool.input_schema)}) for tool in tools
            ]

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            try:
                return await super().call_tool(name, arguments, context)
            except ToolError as error:
                cause = error.__cause__ if isinstance(error.__cause__, AmpwiseError) else error
                if isinstance(cause, UnexpectedToolError):
                    raise
                raise ToolError(" ".join(str(cause).split())) from error

    return OneLineErrorServer


class AgentTools:
    """Tools for one folder.

    What agents read is made of docstrings: the first paragraph is added to the tool's description, and each line after
    it describes a parameter.
    """

    def __init__(self, folder: AgentFolder, *, allow_run: bool = False, run_command: CommandLauncher = launch) -> None:
        from anyio import Semaphore

        self._folder, self._allow_run, self._run_command = folder, allow_run, run_command
        self._turns, self._waiting = Semaphore(MOST_AT_ONCE), 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order in which they are shown."""
        found = [name for name, value in vars(AgentTools).items() if not name.startswith("_") and callable(value)]
        return tuple(name for name in found if self._allow_run or name not in NEEDS_ALLOW_RUN)

    async def check(self, paths: list[str] | None = None, text: str = "", select: str = "", ignore: str = "") -> str:
        """Answers with findings, the worst first. `fix` applies fixes, `explain` says more about a code.

        paths: files and folders (default: all)
        text: code to check instead of files
        select: only these rules: codes (AMP101), starts of codes (AMP1) or names, comma-separated, or ALL
        ignore: rules to leave out, in the same way
        """
        rules = _options(select=select, ignore=ignore)
        ended = await self._check(["--json", "--no-fix", "--exit-zero", *rules], paths, text)
        found = sorted(_parsed(ended.out), key=lambda each: SEVERITIES.index(each["severity"]))
        shown = [_slim(each) for each in found[:MOST_FINDINGS]]
        while shown and len(dumps(shown, indent=None)) > LONGEST:
            del shown[len(shown) // 2 :]
        more = {"left_out": len(found) - len(shown), "notes": _notes(ended.err)}
        return dumps({"findings": shown, **{key: value for key, value in more.items() if value}}, indent=None)

    async def fix(self, paths: list[str] | None = None, write: bool = False, unsafe: bool = False) -> str:
        """Answers with a unified diff.

        paths: files and folders (default: all)
        write: change the files
        unsafe: include fixes that may change what the script does
        """
        unsafe_option = "--unsafe-fixes" if unsafe else "--no-unsafe-fixes"
        ended = await self._check(["--diff", "--no-fix", unsafe_option], paths)
        notes = _notes(ended.err)
        if write and ended.out:
            left = await self._check(["--fix", "--json", "--exit-zero", unsafe_option], paths)
            notes = ["written", f"{len(_parsed(left.out))} findings remain", *_notes(left.err)]
        return _shortened("".join(f"{line}\n" for line in notes) + ended.out)

    async def explain(self, rule: str) -> str:
        """Answers with the mistake, why it matters, the fix, and bad and good code.

        rule: a code (AMP101) or a name (clip-scaled-grads)
        """
        return (await self._command("explain", [_word(rule)])).out

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
        make: str | None = None,
    ) -> str:
        """Answers with the precision, reasons, objections to what was wanted, triage, and code to paste.

        gpu: a device (h200), a compute capability (8.6) or cpu (default: this machine)
        params: how many parameters: 124M, 7B
        arch: transformer, cnn, ...
        want: the precision that the user wants: fp16, bf16, tf32, fp8
        scaling: none, dynamic or manual:1000
        symptom: nan, slow, memory, skipped, ...
        ideas: what was proposed: autocast-off, bf16-is-newer, ...
        measured: a measured speedup
        make: your function that makes model, batch and loss: train.py:make; needs --allow-run
        """
        options = _options(
            gpu=gpu, params=params, arch=arch, want=want, scaling=scaling, symptom=symptom, measured=measured
        )
        proposed = [word for idea in ideas or () for word in _options(idea=idea)]
        own = [] if make is None else [self._loaded("advise make", make)]
        return _compact((await self._command("advise", ["--json", *options, *proposed, *own])).out)

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
        make: str | None = None,
    ) -> str:
        """Describe a decoder transformer by params or by its sizes, or name a function.

        params: how many parameters: 7B
        layers: its blocks
        hidden: width
        heads: of attention
        vocab: size of the vocabulary
        seq: tokens in a sequence
        batch: 16 or 16,32
        precision: fp32, tf32, fp16, bf16, bf16-pure; comma-separated
        optimizer: adamw, sgd, adamw8bit, ...
        gpu: a device that it should fit
        fsdp: ranks that share it
        checkpointing: with activation checkpointing
        make: your function that makes model, batch and loss: train.py:make; needs --allow-run
        """
        sizes = _options(params=params, layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, batch=batch)
        how = _options(precision=precision, optimizer=optimizer, gpu=gpu, fsdp=fsdp, checkpointing=checkpointing)
        own = [] if make is None else [self._loaded("memory make", make)]
        return _compact((await self._command("memory", ["--json", "-q", *sizes, *how, *own])).out)

    async def formats(self, names: list[str] | None = None) -> str:
        """Answers with range, precision and need for scaling.

        names: fp16, e4m3, mxfp8, ... (default: all)
        """
        return _compact((await self._command("formats", ["--json", *map(_word, names or ())])).out)

    async def gpu(self, name: str | None = None, want: list[str] | None = None) -> str:
        """For this machine, also what is wrong with it.

        name: a device of the catalog: h200, "NVIDIA A100-SXM4-80GB" (default: this machine)
        want: formats that this machine's GPU should have tensor cores for
        """
        wanted = [word for each in want or () for word in _options(want=each)]
        named = [] if name is None else [_word(name)]
        return _compact((await self._command("gpu", ["--json", *wanted, *named])).out)

    async def replay(self, capsule: str, make: str, precision: str | None = None, device: str | None = None) -> str:
        """Needs --allow-run.

        capsule: the folder of a saved bad step
        make: your function that makes model and loss: train.py:make
        precision: to rerun it in: fp32, ...
        device: to rerun it on: cpu, cuda
        """
        self._needs_allow_run("replay builds the model with your code")
        made = NamedPath("maker", [make])
        how = _options(precision=precision, device=device)
        ended = await self._command("replay", ["--output-format=full", *how, NamedPath("folder", [capsule]), made])
        return _shortened("\n".join([ended.out.rstrip("\n"), *_notes(ended.err)]))

    async def read_report(self, run: str, other: str | None = None) -> str:
        """Answers with the verdict and the findings first.

        run: the folder that `ampwise run` wrote
        other: a later run, to compare it with
        """
        records = NamedPath("folder", [each for each in (run, other) if each is not None])
        return _shortened((await self._command("report", [records])).out)

    async def run(self, script: str, args: list[str] | None = None, output: str = "", seconds: float = SECONDS) -> str:
        """Answers with the exit code, the findings, and the end of the script's output; `read_report` has the details.

        script: a training script in the folder
        args: its arguments
        output: the folder of the record, which must not exist yet (default: a new one in ampwise-runs/)
        seconds: stop it after so many (default: 300)
        """
        self._needs_allow_run("run executes a script")
        if not 0 < seconds <= MOST_SECONDS:
            raise BadInput(f"seconds={seconds:g}: expected a number above 0 and at most {MOST_SECONDS:g}.")
        where = [NamedPath("new", [output], before="--output=")] if output else []
        words = ["run", *where, NamedPath("file", [script]), *(args or ())]
        ended = await self._run_command(words, cwd=self._folder.root, seconds=seconds)
        if ended.code == 2 and ended.err.startswith("ampwise: error: "):
            raise BadInput(_last_line(ended))
        summary, output = _end_of(ended.err, LONGEST_SUMMARY), _end_of(ended.out, LONGEST_OUTPUT)
        return f"exit code {ended.code}\n{summary}\noutput of the script:\n{output}"

    async def _check(self, options: Sequence[str], paths: list[str] | None, text: str = "") -> CommandResult:
        if len(text) > LONGEST_TEXT:
            raise BadInput(f"text: expected at most {LONGEST_TEXT} characters, got {len(text)}. Name a file instead.")
        where: list[Word] = [NamedPath("settings"), "-"] if text else [NamedPath("scripts", paths or ["."])]
        return await self._command("check", [*options, *where], text or None, may_miss_files=True)

    async def _command(
        self, command: str, words: Sequence[Word], text: str | None = None, *, may_miss_files: bool = False
    ) -> CommandResult:
        """Run a command; another exit code than 0 or 1 raises BadInput with its last line.

        may_miss_files: 2 is for files that could not be checked, too, which do not spoil the result for the others.
        """
        if self._waiting >= MOST_WAITING:
            raise BadInput(f"{self._waiting} requests are still running: try again later.")
        self._waiting += 1
        try:
            async with self._turns:
                ended = await self._run_command([command, *words], cwd=self._folder.root, seconds=SECONDS, text=text)
        finally:
            self._waiting -= 1
        missed_files = may_miss_files and ended.code == 2 and "ampwise: error: " not in ended.err
        if (ended.code not in (0, 1) and not missed_files) or "Traceback (most recent call last)" in ended.err:
            raise BadInput(_last_line(ended))
        return ended

    def _loaded(self, what: str, name: str) -> NamedPath:
        self._needs_allow_run(f"{what}={name[:LONGEST_WORD]!r} loads your code")
        return NamedPath("maker", [name])

    def _needs_allow_run(self, what: str) -> None:
        if not self._allow_run:
            raise BadInput(
                f"{what}, but this server was started without --allow-run. Ask the user to run: ampwise mcp --allow-run"
            )


def _options(**given: str | float | bool | None) -> list[str]:
    """Return options as --name=value, which cannot be taken for another option."""
    unset = (None, False)  # by identity: 0 is a value, which the command may refuse
    chosen = {name: value for name, value in given.items() if value != "" and not any(value is each for each in unset)}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()]


def _word(name: str) -> str:
    """Return a name that is safe on a command line; BadInput for any other."""
    if not name.strip() or name.startswith("-") or not name.isprintable() or len(name) > LONGEST_WORD:
        raise BadInput(
            f"{printable(name[:LONGEST_WORD])!r}: expected a name of at most {LONGEST_WORD} printable characters that "
            "does not start with '-'."
        )
    return name


def _slim(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a finding that an agent needs; unknown ones are left out."""
    at = found["location"] or {}
    slim = {
        **{key: found[key] for key in ("code", "name", "severity", "message")},
        "file": found["filename"],
        "cell": found["cell"],
        "line": at.get("row"),
        "column": at.get("column"),
        "fix": found["fix"]["message"],
        "fixable": {"safe": "yes", "unsafe": "with unsafe"}.get(found["fix"]["applicability"], "no"),
    }
    return {key: value for key, value in slim.items() if value is not None}


def _parsed(out: str) -> list[dict[str, Any]]:
    """Return the findings; entries without a code are about unchecked files, which the notes also have."""
    try:
        found: list[dict[str, Any]] = json.loads(out or "[]")
    except ValueError:  # so long that its middle was cut out
        raise BadInput("too many findings to show: name fewer files, or select rules.") from None
    return [each for each in found if each["code"] is not None]


def _notes(err: str) -> list[str]:
    lines = [line.removeprefix("ampwise: ") for line in err.splitlines() if line.strip()]
    return lines[:MOST_NOTES] + ([f"and {len(lines) - MOST_NOTES} more lines"] if len(lines) > MOST_NOTES else [])


def _last_line(ended: CommandResult) -> str:
    lines = [line for line in ended.err.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exited with code {ended.code} and no message"
    return printable(last.removeprefix("ampwise: ").removeprefix("error: "))[:2000]


def _compact(out: str) -> str:
    """Return JSON on one line, which takes an agent a third fewer tokens; what is no JSON, as it is."""
    try:
        return _shortened(dumps(json.loads(out), indent=None))
    except ValueError:
        return _shortened(out)


def _shortened(text: str) -> str:
    over = len(text) - LONGEST
    return text if over <= 0 else f"{text[:LONGEST]}\n[... {over} characters left out: ask for less]"


def _end_of(text: str, most: int) -> str:
    over = len(text) - most
    return text if over <= 0 else f"[{over} characters left out ...]\n{text[-most:]}"
