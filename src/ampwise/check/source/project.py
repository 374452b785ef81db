"""The checked files, read on demand (``Project``), and the analysis of each (``SourceFile``)."""
# ruff: noqa: PTH120 (pathlib takes longer to import than a check)

from __future__ import annotations

import ast
import bisect
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ampwise.check.source.accelerators import accelerates_in_fp16
from ampwise.check.source.events import EventContext, SourceEvent
from ampwise.check.source.execution_paths import MOST_PATHS
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.local_imports import imports_in
from ampwise.check.source.names import arguments_given, dotted_text
from ampwise.check.source.outline import ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.relevance import (
    COMPUTES,
    IN_HALF,
    LOSSES,
    STEPS,
    STEPS_OR_EVALUATES,
    TAKES_PART,
    TRAINS,
    WORTH_FOLLOWING,
    WORTH_READING,
    Words,
    has_any,
    is_worth_importing,
    names_called,
    says,
)
from ampwise.check.source.script import (
    SourceScript,
    UnreadableFile,
    normalised,
    read_bytes,
    read_script,
    script_from_text,
)
from ampwise.check.source.steps import MOST_ON_PATHS, Region, VisibleRegion, regions_of
from ampwise.check.source.torch_names import FRAMEWORKS
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import FOLLOWED_PER_LINE, MOST_FOLLOWED, CodeSite, CodeTrace, WorkBudget, trace_function

if TYPE_CHECKING:
    from ampwise.finding import Place

NodeType = TypeVar("NodeType", bound=ast.AST)

# Mixed precision that a script handles itself although it uses a framework.
OWN_AMP = LazyPattern(r"GradScaler|unscale_\(|(?:torch|amp)\.autocast|cuda\.amp")
EVALUATES = LazyPattern(r"^_?(eval|valid|test)|(^|_)(eval|validate|validation|test)(_|$)")
LIKE_TORCH = ("paddle", "oneflow", "mindspore", "jittor", "mxnet", "chainer")  # other libraries with a backward()
MOST_IMPORTED = 5_000  # files read because others import from them
MOST_IMPORTED_CHARACTERS = 100_000_000
MOST_LIMITS_NAMED = 3  # in one file
RECENT_TEXTS = 32  # cached, since the files of a folder import the same few
FORWARDS_REEXPORTS = 3  # how many __init__ files a name is followed through


class Project:
    """The checked files, and those that they import. Each is read once, at first use."""

    def __init__(
        self,
        paths: Sequence[str],
        texts: Mapping[str, str] | None = None,
        imported: Sequence[str] = (),
        target_torch: Mapping[str, str] | None = None,
    ) -> None:
        self.paths = [*paths, *imported]
        self.imported = frozenset(imported)  # not checked themselves
        self.texts = dict(texts or {})
        self.target_torch = dict(target_torch or {})  # settings of files
        self._codes: dict[str, SourceFile | UnreadableFile] = {}
        self._worth: dict[str, bool] = {}
        self._frames: dict[tuple[FunctionOutline, ClassOutline | None], Frame] = {}
        self._known: dict[tuple[Words, FunctionOutline], bool] = {}
        self._constructions: dict[ClassOutline, Frame | None] = {}
        self._called: dict[FunctionOutline, list[FunctionOutline]] = {}
        self._nearest: dict[tuple[str, str], str] = {}
        self._recent: dict[str, str | None] = {}
        self._imports: dict[str, list[tuple[str, set[str]]]] = {}  # of files that train
        self._imported_files = self._imported_characters = 0
        self.notes: dict[str, None] = {}  # messages about what was not analysed, and why
        self.limits: dict[str, None] = {}  # the same, because it was too much

    def with_text(self, path: str, text: str) -> Project:
        """Return the project with another text of one file; what this does not affect is shared."""
        checked = [each for each in self.paths if each not in self.imported]
        imported = [each for each in self.paths if each in self.imported]
        other = Project(checked, {**self.texts, path: text}, imported, self.target_torch)
        if len(self.paths) > 1:
            _ = self._importers_by_stem  # reads all files
            other._imports = {name: found for name, found in self._imports.items() if name != path}
            other._by_module = self._by_module
        return other

    def frame(self, function: FunctionOutline, instance_of: ClassOutline | None = None) -> Frame:
        """Return the frame of a function without a caller."""
        key = (function, instance_of)
        if key not in self._frames:
            self._frames[key] = Frame(function, self, instance_of=instance_of)
        return self._frames[key]

    def construction(self, owner: ClassOutline, function: FunctionOutline) -> Frame | None:
        """Return the frame of a class's ``__init__`` as the only call of the class in its file enters it."""
        if function.name != "__init__":
            return None
        if owner not in self._constructions:
            self._constructions[owner] = None  # while it is looked for
            code = self.code(owner.outline.path)
            named = [call for call in code.nodes(ast.Call) if dotted_text(call.func) == owner.name]
            where = code.frame(code.function_at(named[0])) if len(named) == 1 else None
            if where is not None and where.function.owner is not owner and where.definition(named[0].func) is owner:
                self._constructions[owner] = where.enter(function, named[0], owner)
        return self._constructions[owner]

    # Functions that are worth following.

    def is_worth_following(self, function: FunctionOutline, call: ast.Call, context: EventContext) -> bool:
        """Whether a function, or one that it calls, may do part of the step, a forward, or arithmetic under autocast.

        In the caller's own file any part of training counts; in another only what touches gradients, saves, or shards.
        """
        caller = context.frame.outline
        if self._says(function, TAKES_PART if function.outline is caller else WORTH_FOLLOWING):
            return True
        if context.in_autocast and self._says(function, COMPUTES):
            return True
        if function.outline is caller and context.loops and self._says(function, caller.model_calls):
            return True  # a forward pass, which an evaluation may share with the training
        if has_any(caller.script.text, ("autocast", "MixedPrecision")) and self._says(function, LOSSES):
            return True  # it may get scores in half
        if not any(dotted_text(given) in caller.models for given in arguments_given(call)):
            return False
        # In a loop over epochs, or once after it: evaluate(model).
        return bool(context.loops) or any(
            EVALUATES.search(one.name) for one in (function, *[each.function for each in context.frame.callers()])
        )

    def _says(self, function: FunctionOutline, words: Words) -> bool:
        """Whether a function, or one that it calls, directly or not, contains one of the words."""
        known = self._known
        if (words, function) in known:
            return known[words, function]
        callers: dict[FunctionOutline, list[FunctionOutline]] = {function: []}
        saying = []
        pending = [function]
        while pending:  # each function once
            one = pending.pop()
            if says(one, words):
                saying.append(one)
                continue
            for callee in self._callees(one):
                if known.get((words, callee)):
                    saying.append(one)
                elif (words, callee) not in known:
                    if callee not in callers:
                        callers[callee] = []
                        pending.append(callee)
                    callers[callee].append(one)
        known.update({(words, one): False for one in callers})
        while saying:
            one = saying.pop()
            if not known[words, one]:
                known[words, one] = True
                saying += callers[one]
        return known[words, function]

    def _callees(self, function: FunctionOutline) -> list[FunctionOutline]:
        """Return the functions of the same file that a function calls."""
        if function not in self._called:
            frame = self.frame(function)
            imported = function.outline.imports.names
            found: dict[FunctionOutline, None] = {}
            for node in walk(function.node):
                if not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in imported):
                    continue
                target = frame.callee(node)
                if target is not None:
                    found[target[0]] = None
            self._called[function] = list(found)
        return self._called[function]

    # Reading files.

    def code(self, path: str) -> SourceFile:
        """Return the analysis of the file at ``path``; raises UnreadableFile."""
        if path not in self._codes:
            try:
                script = script_from_text(self.texts[path], path) if path in self.texts else read_script(path)
                folders = os.path.dirname(path).replace(os.sep, "/").split("/")
                package = ".".join([part for part in folders if part not in ("", ".")])
                self._codes[path] = SourceFile(self, script, FileOutline(script, package))
            except UnreadableFile as error:
                self._codes[path] = error
            except RecursionError:
                self._codes[path] = UnreadableFile(path, "nested too deeply to follow")
        found = self._codes[path]
        if isinstance(found, UnreadableFile):
            raise found
        return found

    def find(self, qualified: str, importer: FileOutline, depth: int = 0) -> FunctionOutline | ClassOutline | None:
        """Return the function or class of this full name, if a checked file defines it."""
        module, _, name = qualified.rpartition(".")
        path = self._path_of(module, importer.path) if module else None
        if path is None or (path not in self._codes and not self._may_import(path)):
            return None
        try:
            found = self.code(path).outline
        except UnreadableFile:
            return None
        defined = found.module.functions.get(name) or found.classes.get(name)
        if defined is None and name in found.imports.names and depth < FORWARDS_REEXPORTS:
            return self.find(found.imports.names[name], found, depth + 1)
        return defined

    def _may_import(self, path: str) -> bool:
        """Whether to parse a file because another imports it: if it has to do with training, up to a limit."""
        text = self.text(path) if self._worth.get(path, True) else None
        if path not in self._worth:
            self._worth[path] = text is not None and (path.endswith("__init__.py") or has_any(text, WORTH_READING))
        if not self._worth[path]:
            return False
        characters = self._imported_characters + len(text or "")
        if self._imported_files >= MOST_IMPORTED or characters > MOST_IMPORTED_CHARACTERS:
            read = "1 imported file was" if self._imported_files == 1 else f"{self._imported_files} imported files were"
            self.limits[f"{path}: import not followed: {read} already read, which is the limit"] = None
            return False
        self._imported_files += 1
        self._imported_characters = characters
        return True

    def text(self, path: str) -> str | None:
        """Return the text of a file; None if it cannot be read."""
        if path in self.texts:
            return self.texts[path]
        if not path.endswith(".py"):
            return None
        if path not in self._recent:
            if len(self._recent) >= RECENT_TEXTS:
                self._recent.pop(next(iter(self._recent)))
            try:
                self._recent[path] = normalised(read_bytes(path).decode("utf-8", "replace"))
            except UnreadableFile as error:
                self._recent[path] = None
                self.notes[f"{path}: not read for the files that import it: {error.reason}"] = None
        return self._recent[path]

    # Imports between files.

    def imported_by(self, path: str) -> list[str]:
        """Return the other checked files from which ``path`` imports something that has to do with training."""
        taken = self.taken_by(path).items()
        return [other for other, names in taken if is_worth_importing(self.text(other) or "", names)]

    def taken_by(self, path: str) -> dict[str, set[str]]:
        """Return the other checked files from which ``path`` imports, and the imported names ("*": the module)."""
        taken: dict[str, set[str]] = {}
        for module, names in imports_in(self.text(path) or ""):
            other = self._path_of(module.lstrip("."), path) if module.strip(".") else None
            if other is not None and other != path:
                taken.setdefault(other, set()).update(names)
        return taken

    def importers(self, path: str) -> dict[str, set[str]]:
        """Return the other checked files that import from ``path``, and the imported names ("*": the module itself)."""
        if len(self.paths) < 2:
            return {}
        parts = _module_parts(path)
        found = self._importers_by_stem.get(parts[-1] if parts else "", {})
        return {other: names for other, names in found.items() if other != path}

    @functools.cached_property
    def _importers_by_stem(self) -> dict[str, dict[str, set[str]]]:
        found: dict[str, dict[str, set[str]]] = {}
        for path in self.paths:
            if path not in self._imports:
                text = self.text(path) or ""  # without these words it calls no training step of another file
                self._imports[path] = list(imports_in(text)) if ".backward(" in text or "caler" in text else []
            for module, names in self._imports[path]:
                stem = module.rpartition(".")[2]
                found.setdefault(stem, {}).setdefault(path, set()).update(names)
        return found

    def _path_of(self, module: str, importer: str) -> str | None:
        fitting = self._by_module.get(module, [])
        if len(fitting) < 2:
            return fitting[0][0] if fitting else None
        # Choose the file with the longest common prefix, in characters, which is faster than comparing folders. In
        # alphabetical order it is next to the importer; among equally near ones, the one given first wins.
        index = bisect.bisect_left(fitting, (importer, 0))
        beside = [path for path, _ in fitting[max(0, index - 1) : index + 1]]
        shared = max((os.path.commonprefix([path, importer]) for path in beside), key=len)  # noqa: RUF071
        if (module, shared) not in self._nearest:
            near = (item for item in fitting if item[0].startswith(shared))
            self._nearest[module, shared] = min(near, key=lambda item: item[1])[0]
        return self._nearest[module, shared]

    @functools.cached_property
    def _by_module(self) -> dict[str, list[tuple[str, int]]]:
        """Checked files with their position in ``paths``, by every dotted name they may be imported under."""
        found: dict[str, list[tuple[str, int]]] = {}
        for number, path in enumerate(self.paths):
            parts = _module_parts(path)
            for first in range(len(parts)):
                found.setdefault(".".join(parts[first:]), []).append((path, number))
        for fitting in found.values():
            fitting.sort()
        return found


class SourceFile:
    """Analysis of one file: what the source rules check."""

    def __init__(self, project: Project, script: SourceScript, outline: FileOutline) -> None:
        self.project, self.script, self.outline, self.path = project, script, outline, script.path

    # The syntax tree, for rules that need no context.

    def nodes(self, kind: type[NodeType]) -> list[NodeType]:
        """Return every node of this type in the file."""
        return self._nodes_by_type.get(kind, [])  # type: ignore[return-value]

    @functools.cached_property
    def _nodes_by_type(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in self.script.nodes:
            found.setdefault(type(node), []).append(node)
        return found

    @property
    def tree_nodes(self) -> list[ast.AST]:
        """All nodes of the file."""
        return [node for nodes in self._nodes_by_type.values() for node in nodes]

    @property
    def assignments(self) -> list[tuple[ast.expr, ast.expr | None]]:
        """Each target of each assignment in the file with its value; None for a bare annotation."""
        plain = [(target, node.value) for node in self.nodes(ast.Assign) for target in node.targets]
        return [*plain, *[(node.target, node.value) for node in self.nodes(ast.AnnAssign)]]

    def function_at(self, node: ast.stmt | ast.expr) -> FunctionOutline:
        """Return the innermost function that contains a node."""
        index = bisect.bisect_right(self._functions_by_line, node.lineno, key=_first_line)
        function = self._functions_by_line[index - 1] if index else self.outline.module
        while not isinstance(function.node, ast.Module) and node.lineno > (function.node.end_lineno or 0):
            function = function.parent or self.outline.module
        return function

    @functools.cached_property
    def _functions_by_line(self) -> list[FunctionOutline]:
        return sorted(self.outline.functions[1:], key=_first_line)

    def frame(self, function: FunctionOutline) -> Frame:
        """Return the frame of a function without a caller."""
        return self.project.frame(function)

    def names(self, word: str) -> bool:
        """Whether the file, or one that it imports from, contains a word."""
        if word in self.script.text:
            return True
        return any(word in (self.project.text(path) or "") for path in self.project.imported_by(self.path))

    # Traces: the code as it runs.

    @functools.cached_property
    def own_traces(self) -> list[CodeTrace]:
        """Traces that start at each function that nothing in this file calls, the module itself first."""
        text = self.script.text
        if (
            not has_any(text, TRAINS)
            or (self.uses_framework and not self._scales_itself)
            or self._is_of_another_library
        ):
            return []
        budget = WorkBudget(MOST_FOLLOWED + FOLLOWED_PER_LINE * len(self.script.lines))
        found = [trace_function(self.frame(self.outline.module), budget)]
        functions = [function for function in self.outline.functions[1:] if not function.is_run_by_framework]
        words = TAKES_PART if ".backward(" in text and has_any(text, IN_HALF) else STEPS
        around = [function for function in functions if says(function, words)]
        found += [
            trace_function(self.project.frame(method, owner), budget) for method, owner in self._inherited(around)
        ]
        # Functions without a call first: the traces of these are likely to reach the others.
        pending = sorted(around + _callers_of(around, functions), key=self._is_called)
        followed = {function for one in found for function in one.followed}
        for function in dict.fromkeys(pending):
            if function not in followed:
                found.append(trace_function(self.frame(function), budget))
                followed |= found[-1].followed
        return [one for one in found if one.frame.function not in followed]

    @property
    def _is_of_another_library(self) -> bool:
        """Whether a file trains with a library whose calls look like those of torch, which it does not import."""
        tops = {module.partition(".")[0] for module in self.outline.imports.modules}
        return "torch" not in tops and not tops.isdisjoint(LIKE_TORCH)

    @property
    def _scales_itself(self) -> bool:
        """Whether a file that uses a framework has mixed precision or half weights of its own, or uses its scaler."""
        text = self.script.text
        if OWN_AMP.search(text) is not None or accelerates_in_fp16(self.frame(self.outline.module)):
            return True
        return self.is_accelerated_alone and "bfloat16" in text  # the weights may be

    def _inherited(self, methods: list[FunctionOutline]) -> Iterator[tuple[FunctionOutline, ClassOutline]]:
        """Yield base-class methods that call one of ``methods``, such as a trainer's loop that calls a subclass."""
        names: dict[ClassOutline, list[str]] = {}
        for method in methods:
            if method.owner is not None and method.owner.node.bases:
                names.setdefault(method.owner, []).append(method.name)
        frame = self.frame(self.outline.module)
        for owner, own in names.items():
            for base in frame.ancestry(owner)[1:]:
                for name, method in base.methods.items():
                    if frame.method(owner, name) is method and not names_called(method).isdisjoint(own):
                        yield method, owner

    def _is_called(self, function: FunctionOutline) -> bool:
        """Whether a function's name is followed by a bracket anywhere but in its definition."""
        return function.name in names_called(self.outline.module)

    @functools.cached_property
    def traces(self) -> list[CodeTrace]:
        """Traces through this file: its own, and those of the files that import it."""
        taken: set[FunctionOutline] = set()
        foreign: list[CodeTrace] = []
        importers = self.project.importers(self.path)
        helpers = self._helpers if importers else set()
        for path, names in importers.items():
            if not helpers or not names & {"*", *helpers}:
                continue
            try:
                other = self.project.code(path)
            except UnreadableFile:
                continue
            passing = [one for one in other.own_traces if any(f.outline is self.outline for f in one.followed)]
            foreign += passing
            taken |= {function for one in passing for function in one.followed}
        return [one for one in self.own_traces if one.frame.function not in taken] + foreign

    @property
    def _helpers(self) -> set[str]:
        """Names of functions and classes that a training script may import to step, for its loss, or to evaluate."""
        functions = self.outline.module.functions.values()
        found = {function.name for function in functions if says(function, STEPS_OR_EVALUATES)}
        for method in self.outline.functions:
            computes = method.name in ("forward", "__call__") and says(method, COMPUTES)
            if method.owner is not None and (computes or says(method, STEPS)):
                found.add(method.owner.name)
        return found

    def calls_leading_to(self, place: Place) -> list[ast.Call]:
        """Return the calls in this file by which the traces get to a place in another file, in their order."""
        found: dict[ast.Call, None] = {}
        for trace in self.traces:
            for site in (*trace.calls, *trace.statements):
                node, frame = site.node, site.context.frame
                if frame.outline.path != place.file or not node.lineno <= (place.line or 0) <= node.end_lineno:  # type: ignore[attr-defined]
                    continue
                for inner in frame.callers():
                    if inner.caller is not None and inner.caller.outline is self.outline and inner.call is not None:
                        found[inner.call] = None
                        break
        return list(found)

    @functools.cached_property
    def regions(self) -> list[Region]:
        """Training steps of this file."""
        budget = WorkBudget(MOST_ON_PATHS)
        return [region for one in self.traces for region in regions_of(one, budget)]

    @functools.cached_property
    def visible_regions(self) -> list[Region]:
        """Training steps, without their paths through a framework, or through a function that we cannot follow."""
        return [VisibleRegion(region) if region.hidden else region for region in self.regions]

    @functools.cached_property
    def events(self) -> list[SourceEvent]:
        """All events of all traces; the same call comes once per context."""
        return [event for one in self.traces for event in one.events()]

    @functools.cached_property
    def calls(self) -> list[CodeSite]:
        """All calls of this file, once per context."""
        return [site for one in self.traces for site in one.calls if site.context.frame.outline is self.outline]

    @functools.cached_property
    def statements(self) -> list[CodeSite]:
        """All simple statements of this file, once per context."""
        return [site for one in self.traces for site in one.statements if site.context.frame.outline is self.outline]

    @property
    def uses_framework(self) -> bool:
        """Whether the file uses a part of a library that does the mixed-precision step itself."""
        return bool(self.frameworks)

    @functools.cached_property
    def frameworks(self) -> set[str]:
        """Libraries that do the mixed-precision step themselves, if the file uses that part of them."""
        found = set()
        for module in self.outline.imports.modules:  # `import lightning.pytorch`, `from fastai.vision.all import *`
            package = module.partition(".")[0]
            names = FRAMEWORKS.get(package)
            if names is not None and (not names or not set(names).isdisjoint(module.split("."))):
                found.add(package)
        for local, full in self.outline.imports.names.items():
            package, _, rest = full.partition(".")
            names = FRAMEWORKS.get(package, ())
            used = rf"\b{local}\.(?:\w+\.)*(?:{'|'.join(names)})\b"  # `import deepspeed`, `deepspeed.initialize(...)`
            is_imported = not set(names).isdisjoint(rest.split("."))  # `from accelerate import Accelerator`
            if names and (is_imported or re.search(used, self.script.text)):
                found.add(package)
        return found

    @property
    def is_accelerated_alone(self) -> bool:
        """Whether Accelerate does the step, and no DeepSpeed, which keeps FP32 weights beside those of the model."""
        return self.frameworks == {"accelerate"} and "deepspeed" not in self.script.text.lower()

    @property
    def limits_met(self) -> list[str]:
        """Messages about the limits that were reached so far."""
        regions = self.__dict__.get("regions", [])  # only if a rule has used them
        lines = [
            f"{region.place}: more than {MOST_PATHS} paths through this step; a sample of them was checked, which "
            "takes each side of each `if`"
            for region in regions
            if region.is_sampled
        ]
        traces = self.__dict__.get("own_traces", [])
        cut = [one for one in traces if one.ended_at is not None]
        for one in cut[:MOST_LIMITS_NAMED]:
            end = one.ended_at.context.frame.outline.script.place(one.ended_at.node)
            function = one.frame.function
            start = f"{function.place}: too much code to follow from "
            start += f"`{function.name}`" if function.name else "the top of the file"
            lines.append(f"{start}; code after {end} was not checked together with it")
        more = len(cut) - MOST_LIMITS_NAMED
        if more > 0:
            lines.append(f"{self.path}: too much code to follow from {more} more function{'s' if more > 1 else ''}")
        return lines


def _callers_of(called: list[FunctionOutline], functions: list[FunctionOutline]) -> list[FunctionOutline]:
    """Return the direct and indirect callers of functions, by name: only a caller sees all steps of an iteration."""
    if not called:
        return []
    by_name: dict[str, list[int]] = {}
    for number, function in enumerate(functions):
        for name in names_called(function):
            by_name.setdefault(name, []).append(number)
    known = set(called)
    found: list[FunctionOutline] = []
    fresh = called
    while fresh:
        names = {function.name for function in fresh}
        numbers = sorted({number for name in names for number in by_name.pop(name, ())})
        fresh = [functions[number] for number in numbers if functions[number] not in known]
        known.update(fresh)
        found += fresh
    return found


def _first_line(function: FunctionOutline) -> int:
    return 0 if isinstance(function.node, ast.Module) else function.node.lineno


@functools.cache
def _module_parts(path: str) -> list[str]:
    """Return the dotted name of a file as parts, from the root of the path."""
    parts = [part for part in path.removesuffix(".py").replace(os.sep, "/").split("/") if part not in ("", ".")]
    return parts[:-1] if parts and parts[-1] == "__init__" else parts
