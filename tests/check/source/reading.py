"""Small sources read as the linter reads them, and the questions that the tests put into them."""

import ast
import textwrap

from ampwise.check.source.project import Project


def code_of(text, **others):
    """What ``script.py`` tells, beside other files given by their stems."""
    texts = {"script.py": textwrap.dedent(text)}
    texts |= {f"{stem}.py": textwrap.dedent(other) for stem, other in others.items()}
    return Project(list(texts), texts).code("script.py")


def asked(code):
    """The arguments of each ``ask(...)`` that the traces of a file come by, each with its context."""
    return [
        (site.context, argument)
        for trace in code.traces
        for site in trace.calls
        if isinstance(site.node, ast.Call) and isinstance(site.node.func, ast.Name) and site.node.func.id == "ask"
        for argument in site.node.args
    ]


def keys_asked(text, **others):
    return [context.frame.key(node) for context, node in asked(code_of(text, **others))]


def values_asked(text, **others):
    """For each question the values in sight, as source; None for one that cannot be told."""
    return [
        [value.node and ast.unparse(value.node) for value in context.frame.values(node)]
        for context, node in asked(code_of(text, **others))
    ]


def function_of(code, name):
    return next(function for function in code.outline.functions if function.name == name)


def kinds(events):
    return [event.kind for event in events]
