"""The server of `ampwise mcp`: the tools of ``mcp_tools`` over stdin and stdout, with the official SDK."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.errors import AmpwiseError, BadInput, MissingDependency
from ampwise.integrations.mcp_folder import AgentFolder
from ampwise.integrations.mcp_process import CommandLauncher, end_all, launch
from ampwise.integrations.mcp_tools import MAY_LOAD, READS_ONLY, AgentTools

if TYPE_CHECKING:
    from mcp.server import MCPServer

__all__ = ["FIRST", "TOO_LATE", "make_server", "need_mcp", "serve"]

FIRST, TOO_LATE = (2, 3), (3, 0)  # tested versions of the SDK, as in pyproject.toml
INSTALL = 'pip install "ampwise[mcp]"'
COMMAND_OF_TOOL = {"fix": "check", "read_report": "report"}  # tools that are not named after their command
FOR_AGENTS = """\
Mixed-precision training for PyTorch: find mistakes in scripts (check, fix, explain), choose a precision (advise, gpu,
formats, memory), explain runs (read_report, replay). Prove a claim with a tool before you make it. Only paths below
{root} are read. {running}"""
RUNNING = {
    True: "The user's scripts and functions may be run: the user started this server with --allow-run.",
    False: "The user's code is neither run nor imported; the user can allow it with `ampwise mcp --allow-run`.",
}


def serve(root: str | Path, *, allow_run: bool) -> None:
    """Answer on stdin and stdout until stdin ends."""
    folder = AgentFolder(root)
    need_mcp()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    make_server(folder, allow_run=allow_run, run_command=partial(launch, own_code=allow_run)).run("stdio")


def _leave(number: int, _frame: object) -> None:
    """End the process and its children at once: a thread blocked on stdin cannot be woken."""
    end_all()
    os._exit(128 + number)


def need_mcp() -> None:
    """Raise MissingDependency without the SDK, BadInput with an untested version."""
    try:
        version = importlib.metadata.version("mcp")
        importlib.import_module("mcp.server")
    except ImportError as error:
        raise MissingDependency(f"ampwise mcp needs the package mcp: {INSTALL}") from error
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not FIRST <= found < TOO_LATE:
        tested = f"{_dotted(FIRST)} or later, below {_dotted(TOO_LATE)}"
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

    class OneLineErrorServer(MCPServer[Any]):
        """Server that answers an AmpwiseError or wrong arguments with one line; other errors are bugs of ours."""

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            try:
                return await super().call_tool(name, arguments, context)
            except ToolError as error:
                cause = error.__cause__ if isinstance(error.__cause__, AmpwiseError) else error
                if isinstance(cause, UnexpectedToolError):
                    raise
                raise ToolError(" ".join(str(cause).split())) from error

    return OneLineErrorServer


def _description(name: str) -> str:
    """Return the first line of the command's help, and the arguments of this tool."""
    command = importlib.import_module(f"ampwise.cli.{COMMAND_OF_TOOL.get(name, name)}")
    first = "Fix what `check` finds" if name == "fix" else str(command.__doc__).partition("\n")[0].rstrip(".")
    own = " ".join((getattr(AgentTools, name).__doc__ or "").split())
    return f"{first}. {own}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
