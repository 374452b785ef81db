"""Print the completion script for bash, zsh or fish.

The script is plain text, made from the commands and options of this version: make it again after an update. Nothing of
ampwise runs when the shell starts, nor while you type.

Examples:
  eval "$(ampwise completion bash)"
  ampwise completion bash > ~/.local/share/bash-completion/completions/ampwise
  ampwise completion zsh >> ~/.zshrc
  ampwise completion fish > ~/.config/fish/completions/ampwise.fish
"""

from __future__ import annotations

import argparse
import os
import sys

from ampwise.errors import BadInput
from ampwise.finding.terminal import write

GROUP = "Start"
SHELLS = ("bash", "zsh", "fish")
# A word before the cursor that is no option is the command; where nothing matches, bash completes files (-o default).
BASH = """\
_ampwise() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${{COMP_WORDS[i]}} in -*) ;; *) command=${{COMP_WORDS[i]}}; break ;; esac
  done
  local options= values=
  case $command in
{commands}
  esac
  COMPREPLY=()
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [ "${{cur#-}}" != "$cur" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$cur"))
  fi
}}
complete -o default -F _ampwise ampwise
"""
ZSH = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=SHELLS, help="bash, zsh or fish (default: yours)")


def run(args: argparse.Namespace) -> int:
    shell = args.shell or os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119
    if shell not in SHELLS:
        raise BadInput(f"completion: there is none for the shell {shell!r}. Name one of {', '.join(SHELLS)}.")
    write(fish() if shell == "fish" else (ZSH if shell == "zsh" else "") + bash(), sys.stdout)
    return 0


def _actions(command: str) -> list[argparse.Action]:
    """Return the arguments of a command that its help shows."""
    from ampwise.cli import build_parser

    return [action for action in build_parser([command]).command._actions if action.help != argparse.SUPPRESS]


def bash() -> str:
    """Return the script for bash: for each command its options, and the values of those that have a choice."""
    from ampwise.cli import commands

    names = " ".join([*commands(), "help"])
    lines = [f'    "") values="{names}"; [ "${{cur#-}}" = "$cur" ] || {{ values=; options="--help --version"; }} ;;']
    lines.append(f'    help) values="{" ".join(commands())}" ;;')
    for command in commands():
        actions = _actions(command)
        options = " ".join(option for action in actions for option in action.option_strings)
        choices = [
            f'{"|".join(action.option_strings)}) values="{" ".join(map(str, action.choices))}" ;;'
            for action in actions
            if action.choices and action.option_strings
        ]
        first = next((action.choices for action in actions if not action.option_strings and action.choices), None)
        own = f' [ "$prev" != {command} ] || values="{" ".join(map(str, first))}";' if first else ""
        cases = f" case $prev in {' '.join(choices)} esac;" if choices else ""
        lines.append(f'    {command}) options="{options}";{own}{cases} ;;')
    return BASH.format(commands="\n".join(lines))


def fish() -> str:
    """Return the script for fish, which also shows what each command and option is for."""
    from ampwise.cli import commands, summaries

    def quoted(text: str) -> str:
        escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    lines = [
        *(
            f"complete -c ampwise -n __fish_use_subcommand -fa {name} -d {quoted(text)}"
            for name, text in summaries().items()
        ),
        f"complete -c ampwise -n '__fish_seen_subcommand_from help' -fa '{' '.join(commands())}'",
        "complete -c ampwise -n __fish_use_subcommand -s V -l version -d 'show the version and exit'",
    ]
    for command in commands():
        for action in _actions(command):
            words = ["complete", "-c", "ampwise", "-n", f"'__fish_seen_subcommand_from {command}'"]
            for option in action.option_strings:
                words += ["-l", option[2:]] if option.startswith("--") else ["-s", option[1:]]
            if action.choices:
                words += ["-xa" if action.option_strings else "-fa", quoted(" ".join(map(str, action.choices)))]
            elif not action.option_strings:
                continue
            elif action.nargs != 0:
                words.append("-r")
            help_text = (action.help or "") % {**vars(action), "prog": "ampwise"}
            lines.append(" ".join([*words, "-d", quoted(help_text)]))
    return "\n".join([*lines, ""])
