"""The server of `ampwise mcp`: the tools of ``mcp_tools`` over stdin and stdout, by the official SDK."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import AmpwiseError, BadInput, MissingDependency
from ampwise.integrations.mcp_folder import Folder
from ampwise.integrations.mcp_process import Launch, end_all, launch
from ampwise.integrations.mcp_tools import MAY_LOAD, READS_ONLY, Tools

if TYPE_CHECKING:
    from mcp.server import MCPServer

__all__ = ["FIRST", "TOO_LATE", "make_server", "need_mcp", "serve"]

FIRST, TOO_LATE = (2, 3), (3, 0)  # the versions of the SDK that this was tested with, as in pyproject.toml
INSTALL = 'pip install "ampwise[mcp]"'
VERBS = {"fix": "check", "read_report": "report"}  # where a tool has not its verb's name
FOR_AGENTS = """\
Mixed-precision training for PyTorch: find mistakes in scripts (check, fix, explain), choose a precision (advise, gpu,
formats, memory), explain runs (read_report, replay). Prove it with a tool before you claim it. Paths are below {root},
and nothing else is read. {running}"""
RUNNING = {
    True: "Scripts and functions of the user may be run: the user started this server with --allow-run.",
    False: "No code of the user is run or imported: for that the user starts this server with --allow-run.",
}


def serve(root: str | Path, *, allow_run: bool) -> None:
    """Answer on stdin and stdout until stdin ends."""
    folder = Folder(root)
    need_mcp()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    make_server(folder, allow_run=allow_run, run_verb=partial(launch, own_code=allow_run)).run("stdio")


def _leave(number: int, _frame: object) -> None:
    """End with what we started. At once: a thread waits for stdin, and nothing wakes it."""
    end_all()
    os._exit(128 + number)


def need_mcp() -> None:
    """MissingDependency without the SDK, BadInput with a version that this was not tested with."""
    try:
        version = importlib.metadata.version("mcp")
        importlib.import_module("mcp.server")
    except ImportError as error:
        raise MissingDependency(f"ampwise mcp needs the package mcp: {INSTALL}") from error
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not FIRST <= found < TOO_LATE:
        tested = f"{_dotted(FIRST)} or later, below {_dotted(TOO_LATE)}"
        raise BadInput(f"ampwise mcp was tested with mcp {tested}, and {version} is installed: {INSTALL}")


def make_server(folder: Folder, *, allow_run: bool = False, run_verb: Launch = launch) -> MCPServer[Any]:
    """The server with its tools, not yet running."""
    from mcp.types import ToolAnnotations

    from ampwise.printers.tool import installed_version

    tools = Tools(folder, allow_run=allow_run, run_verb=run_verb)
    server = _server_type()(
        "ampwise",
        version=installed_version() or "",
        instructions=FOR_AGENTS.format(root=folder.root, running=RUNNING[allow_run]),
        log_level="WARNING",  # to stderr
    )
    only_reads = set(READS_ONLY).difference(MAY_LOAD if allow_run else ())
    for name in tools.names:
        server.add_tool(
            getattr(tools, name),
            name=name,
            description=_description(name),
            annotations=ToolAnnotations(read_only_hint=name in only_reads, open_world_hint=False),
            structured_output=False,
        )
    return server


def _server_type() -> type[MCPServer[Any]]:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

    class Server(MCPServer[Any]):
        """Errors on purpose, and arguments that do not fit, in a line; others are ours, and a traceback on stderr."""

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            try:
                return await super().call_tool(name, arguments, context)
            except ToolError as error:
                told = error.__cause__ if isinstance(error.__cause__, AmpwiseError) else error
                if isinstance(told, UnexpectedToolError):
                    raise
                raise ToolError(" ".join(str(told).split())) from error

    return Server


def _description(name: str) -> str:
    """What the verb says of itself, and what this tool takes."""
    verb = importlib.import_module(f"ampwise.cli.{VERBS.get(name, name)}")
    first = "Mend what `check` finds" if name == "fix" else str(verb.__doc__).partition("\n")[0].rstrip(".")
    own = " ".join((getattr(Tools, name).__doc__ or "").split())
    return f"{first}. {own}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
