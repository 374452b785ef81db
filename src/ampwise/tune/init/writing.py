"""The text of a file with ``make``, from a script that was read."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampwise.finding.terminal import printable
from ampwise.trace.names_in_code import (
    BUILTINS,
    DEFINITIONS,
    bound_names,
    call_name,
    changed_names,
    free_names,
    root_name,
)
from ampwise.tune.init.reading import Part, Script
from ampwise.tune.init.rewriting import rewritten
from ampwise.tune.init.slicing import Slicer, unwrapped_loop

IMPORTS = (ast.Import, ast.ImportFrom)
DEFAULT_BATCH = 8
NO_BATCH = "set the batch"
NO_LOSS = "return the loss of the batch: the script has no backward()"


@dataclass(slots=True)
class Slot:
    """A tensor of the batch: a variable, or an item of one; and whether the model gets it."""

    name: str
    key: str | int | None  # "**" for a whole mapping that the model is called with
    is_input: bool

    @property
    def code(self) -> str:
        """How the script refers to it."""
        return self.name if self.key in (None, "**") else f"{self.name}[{self.key!r}]"


@dataclass(slots=True)
class Draft:
    """A file to be written: its parts, in order, and what could not be found."""

    script: Script
    copied: bool = False  # code is copied from the script, not imported
    head: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # lines of make() before the batch
    loss: list[str] = field(default_factory=list)  # lines of the loss function
    model: str = "model"
    optimizer: str | None = None
    batch_names: list[str] = field(default_factory=list)
    batch_lines: list[str] | None = None  # None: to be found by trying
    slots: list[Slot] = field(default_factory=list)
    by_keywords: bool = False  # the loss function takes the batch by keywords
    size_name: str = ""  # parameter of make() that sets the batch size
    rows: str = ""  # the same, as the code of the batch names it
    todo: list[str] = field(default_factory=list)
    found: list[Part] = field(default_factory=list)

    def text(self, *, without_batch: bool = False) -> str:
        """The whole file; or one that returns None for the batch, to look for a batch with."""
        name, names = printable(self.script.path.name).replace("\\", "/").replace('"', "'"), ", ".join(self.batch_names)
        batch = names if self.by_keywords else f"({names},)" if len(self.batch_names) == 1 else f"({names})"
        returned = [self.model, "None" if without_batch else batch, "loss_fn"]
        returned += [self.optimizer] if self.optimizer else []
        lines = ["# the batch"] if without_batch else self.batch_lines  # one line, as that of a batch to fill in
        body = [*self.setup, *(lines if lines is not None else [todo_line(f"set the batch: {names}")]), ""]
        body += [f"def loss_fn({'**' if self.by_keywords else ''}{names}):", *_indented(self.loss), ""]
        body.append(f"return {', '.join(returned)}")
        size = f"{self.size_name}={self.script.batch_size or DEFAULT_BATCH}" if self.size_name else ""
        parts = [
            f'"""make() of {name}, for `ampwise bench`, `memory`, `align`, `diff`, `search` and `replay`.',
            "",
            f"Written by `ampwise init {name}`: yours to edit. {'Copied' if self.copied else 'Taken'} from {name}, "
            "whose lines the comments give.",
            '"""',
            "",
            *"\n".join(self.head).rstrip().split("\n"),
            "",
            "",
            f"def make({size}):",
            '    """Return the model, a batch, and a function that computes the loss of that batch."""',
            *_indented(body),
        ]
        return "\n".join(parts) + "\n"

    def set_batch(self, codes: dict[str, str], comment: str) -> None:
        """Set the batch: code for each slot, in which ``batch`` is the number of rows."""
        self.batch_lines, items = [f"# {comment}"], dict[str, list[tuple[str | int | None, str]]]()
        for slot in self.slots:
            tree = ast.parse(codes[slot.code], mode="eval")
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and node.id == "batch":
                    node.id = self.rows
            items.setdefault(slot.name, []).append((slot.key, ast.unparse(tree)))
        for name, parts in items.items():
            if parts[0][0] in (None, "**"):
                self.batch_lines.append(f"{name} = {parts[0][1]}")
            elif isinstance(parts[0][0], str):
                self.batch_lines.append(f"{name} = {{{', '.join(f'{key!r}: {code}' for key, code in parts)}}}")
            else:
                self.batch_lines.append(f"{name} = ({', '.join(code for _, code in sorted(parts))},)")


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {part}" if part else "" for line in lines for part in line.split("\n")]


def todo_line(text: str) -> str:
    """A line that stands for what is to be filled in."""
    return f"raise NotImplementedError({f'TODO: {printable(text)}'!r})"


def drafts_of(script: Script, output: Path, options: Sequence[str]) -> list[Draft]:
    """Drafts of the file, from the most to the least faithful: with the script's own data and optimizer first."""
    drafts = []
    for with_data in (True, False):
        for with_optimizer in (True, False):
            made = _Writer(script, options, with_data, with_optimizer).write(output.parent)
            if (made.batch_lines is not None) == with_data and (made.optimizer is not None) == with_optimizer:
                drafts.append(made)
    return [each for each in drafts if not each.todo] or drafts[-1:] or [made]


class Placed:
    """A statement of the slice: where it is in the script, its names, and whether each batch needs it anew."""

    def __init__(self, stmt: ast.stmt, at_top: bool) -> None:
        self.stmt, self.at_top, self.line = rewritten(stmt), at_top, stmt.lineno
        self.is_definition = isinstance(stmt, (*DEFINITIONS, *IMPORTS))
        self.binds, self.reads, self.changes = (f(self.stmt) for f in (bound_names, free_names, changed_names))
        self.per_batch = False


def _bound(statements: Iterable[Placed]) -> set[str]:
    return set().union(*(each.binds for each in statements))


def _read(statements: Iterable[Placed]) -> set[str]:
    return set().union(*(each.reads for each in statements))


class _Writer:
    def __init__(self, script: Script, options: Sequence[str], with_data: bool, with_optimizer: bool) -> None:
        self.script, self.options = script, list(options)
        self.with_data, self.with_optimizer = with_data, with_optimizer
        self.start = script.start
        importable = script.path.stem.isidentifier() and not script.source.cells
        self.copied = script.work_on_import is not None or not importable
        self.made = Draft(script, self.copied)
        self.slicer = Slicer(script.scopes, copied=self.copied, with_data=with_data)
        self.loss = rewritten(self.start.loss) if self.start and self.start.loss else None
        self.model = rewritten(self.start.model) if self.start and self.start.model else None

    def write(self, folder: Path) -> Draft:
        """Write the draft, for a file in that folder."""
        made = self.made
        if self.start is None:
            made.todo.append(
                "set model: the script makes none that can be recognized, and has no backward(); does it train?"
            )
        statements = self._slice()
        models = self._models(statements)
        batch = self.slicer.batch
        made.batch_names = list(batch.names) if batch else []
        if batch is None and self.loss is not None:
            made.batch_names = self._full_batch(statements, models)
        self._mark_per_batch(statements, models)

        # After devices and the like were left out, some statements serve no purpose.
        roots = {*models, *([made.optimizer] if made.optimizer else []), *([] if batch else made.batch_names)}
        roots |= free_names(self.loss) if self.loss else set()
        roots |= free_names(self.model) if self.model else set()
        roots |= free_names(rewritten(batch.value)) if batch and self.with_data else set()
        statements = _live(statements, roots)
        used = roots | _read(statements)
        top, setup, loss = self._split(statements, models)
        if made.optimizer not in _bound(setup):
            made.optimizer = None

        self._write_head(used, top, folder)
        for name, why in self.slicer.missing.items():
            if name.removeprefix("self.") in used or name == "self":
                made.todo.append(f"set {name.removeprefix('self.')} ({why})")
        self._write_loss(loss, models)
        self._write_batch(setup, loss, models)
        self._write_setup(top, setup, models)
        made.todo += [NO_BATCH, NO_LOSS] if made.loss == [todo_line(NO_LOSS)] else []
        self._describe(models, statements)
        return made

    # Which statements, and where each goes.

    def _slice(self) -> list[Placed]:
        if self.start is None:
            return []
        scope = self.start.scope
        names = set().union(*(free_names(each, scope.own) for each in (self.start.loss, self.start.model) if each))
        names |= bound_names(self.start.model, scope.own) if self.start.model else set()
        if self.with_optimizer and self.start.loss is not None:
            optimizer = self.script.optimizer_of(scope)
            names |= {optimizer} if optimizer else set()
            self.made.optimizer = optimizer.removeprefix("self.") if optimizer else None
        sliced = self.slicer.slice(scope, names, self.start.line)
        return [Placed(stmt, at_top) for stmt, at_top in sliced]

    def _models(self, statements: list[Placed]) -> list[str]:
        """Names of the models that the loss depends on."""
        if self.loss is None:
            return [self.model.id] if isinstance(self.model, ast.Name) else []
        names = _bound(statements) | _read(statements) | free_names(self.loss)
        calls = [call for node in (*(each.stmt for each in statements), self.loss) for call in _calls(node)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        found = [name for name in self.script.model_names if name in names and name.isidentifier()]
        return [name for name in found or ("model", "net") if name in called] or found[:1]

    def _full_batch(self, statements: list[Placed], models: list[str]) -> list[str]:
        """Names that the model is called with, in a script that trains on all data at once."""
        for node in (*(each.stmt for each in statements), self.loss):
            for call in _calls(node):
                if call_name(call) in models:
                    given = set().union(*(free_names(each) for each in (*call.args, *call.keywords)))
                    return sorted(given & _bound(statements))
        return []

    def _mark_per_batch(self, statements: list[Placed], models: list[str]) -> None:
        """Mark statements that depend on the batch, or call the model if the script has no batches."""
        in_module = self.start is not None and self.start.scope.is_module
        movable = [each for each in statements if not each.is_definition and (in_module or not each.at_top)]
        by_model = self.slicer.batch is None
        depends = set() if by_model else set(self.made.batch_names)
        for each in movable:
            calls_model = by_model and any(call_name(call) in models for call in _calls(each.stmt))
            if calls_model or each.reads & depends:
                each.per_batch = True
                depends |= each.binds | (each.changes - set(models))
        rebound = _bound(each for each in movable if each.per_batch) - set(models)
        for each in movable:  # `total = 0` before `total += ...`
            each.per_batch |= bool(each.binds & rebound)

    def _split(self, statements: list[Placed], models: list[str]) -> tuple[list[Placed], list[Placed], list[Placed]]:
        """Statements for the top of the file, for make(), and for the loss function."""
        top, setup, loss = [], [], []
        inside: set[str] = set(models)
        for each in statements:
            if isinstance(each.stmt, ast.Assign) and len(each.stmt.targets) == 1:
                target, value = (ast.unparse(part).strip("()") for part in (each.stmt.targets[0], each.stmt.value))
                if target == value:
                    continue  # `x = x`, which is left of x = x.to(device)
            if each.per_batch:
                loss.append(each)
            elif each.at_top and (each.is_definition or not (each.binds | each.changes | each.reads) & inside):
                top.append(each)
            else:
                setup.append(each)
                inside |= each.binds if each.at_top else set()
        return top, setup, loss

    # The text of each part.

    def _write_head(self, used: set[str], top: list[Placed], folder: Path) -> None:
        """Write imports, options, and what is taken or copied from the top level of the script."""
        script, package = self.script, self._package()
        names = {name for name in self.slicer.module_names & used if name not in BUILTINS}
        used = names | _read(top)
        imports, stars = self._imports(package)
        lines = {line for name in imports if name in used for line in imports[name]}
        if self.copied:
            defined = set().union(*(bound_names(stmt) for stmt in script.tree.body))
            unknown = sorted(name for name in used - defined - BUILTINS if not name.startswith("self."))
            lines |= set(stars) if unknown else set()
            self.made.todo += [] if stars else [f"set {name} (the script does not define it)" for name in unknown]

        here = script.path.resolve().parent
        root = here.parents[package.count(".")] if package else here
        head = [f"sys.path.insert(0, {str(root)!r})"] if package or folder.resolve() != here else []
        head += _merged(lines - {"import sys"})
        if script.reads_options or self.options:
            head += ["", f"sys.argv = {[script.path.name, *self.options]!r}  # the options you train with"]
        if "import sys" in lines or any(line.startswith("sys.") for line in head):
            head.insert(0, "import sys")
        own = sorted(name for name in names if name not in imports) if not self.copied else []
        if own:
            module = f"{package}.{script.path.stem}" if package else script.path.stem
            head += ["", f"from {module} import {', '.join(own)}"]
        kept = [each for each in top if not isinstance(each.stmt, IMPORTS)]
        self.made.head = [*head, *([""] if kept else []), *self._texts(kept)]

    def _imports(self, package: str) -> tuple[dict[str, list[str]], list[str]]:
        """Imports at the top level of the script: lines by name, and those of all names of a module."""
        imports, stars = dict[str, list[str]](), list[str]()
        for stmt in self.script.tree.body:
            for alias in stmt.names if isinstance(stmt, IMPORTS) else []:
                text = f"import {ast.unparse(alias)}"
                if isinstance(stmt, ast.ImportFrom):
                    module = "." * stmt.level + (stmt.module or "")
                    if stmt.level and package:
                        parents = package.split(".")[: package.count(".") + 2 - stmt.level]
                        module = ".".join([*parents, *([stmt.module] if stmt.module else [])])
                    text = f"from {module} {text}"
                if alias.name == "*":
                    stars.append(text)
                else:  # several lines for `import torch.nn`, `import torch.optim`
                    imports.setdefault(alias.asname or alias.name.partition(".")[0], []).append(text)
        return imports, stars

    def _package(self) -> str:
        """The package that the script is part of, if it imports relative to it."""
        if not any(isinstance(stmt, ast.ImportFrom) and stmt.level for stmt in ast.walk(self.script.tree)):
            return ""
        folder = self.script.path.resolve().parent
        parts = [folder.name]
        while (folder / "__init__.py").exists() and (folder.parent / "__init__.py").exists():
            folder = folder.parent
            parts.insert(0, folder.name)
        return ".".join(parts)

    def _texts(self, statements: list[Placed]) -> list[str]:
        """Code of statements, with their lines in the script; functions and classes at its top level as they are."""
        texts = []
        for each in statements:
            if each.at_top and isinstance(each.stmt, DEFINITIONS):
                first = min([each.stmt.lineno, *(mark.lineno for mark in each.stmt.decorator_list)])
                code = "\n".join(self.script.source.lines[first - 1 : each.stmt.end_lineno])
                texts.append(f"\n# lines {first} to {each.stmt.end_lineno}\n{code}\n")
            else:
                head, *rest = ast.unparse(each.stmt).split("\n")
                texts.append("\n".join([f"{head}  # line {each.line}", *rest]))
        return texts

    def _write_loss(self, loss: list[Placed], models: list[str]) -> None:
        """Write the loss function."""
        made, script, start = self.made, self.script, self.start
        made.loss = self._texts(loss)
        if self.loss is not None and start is not None:
            made.loss.append(f"return {ast.unparse(self.loss)}  # line {start.line}")
            used = (free_names(self.loss) | _read(loss)) - _bound(loss)
            devices = sorted(name for name in used if name.endswith("device"))
            made.loss[:0] = [f"{name} = next({models[0]}.parameters()).device" for name in devices if models]
            return
        made.batch_names = ["batch"]
        if start is not None and start.trainer == "lightning" and script.training_step is not None:
            index = ", 0" if len(script.training_step[1].args.args) > 2 else ""
            made.loss = [f"return model.training_step(batch{index})"]
        elif start is not None and start.trainer == "transformers":
            made.by_keywords = True
            made.loss = [f"return {models[0] if models else 'model'}(**batch)  # its .loss"]
        else:
            made.loss = [todo_line(NO_LOSS)]

    def _write_batch(self, setup: list[Placed], loss: list[Placed], models: list[str]) -> None:
        """Write the batch, from the script's own data, or list its slots to look for one."""
        made, batch = self.made, self.slicer.batch
        if batch is not None and self.with_data:
            taken_from = ast.Assign([batch.target], rewritten(batch.value), lineno=batch.line)
            made.batch_lines = [f"{ast.unparse(taken_from)}  # line {batch.line}"]
            return
        if batch is None and self.loss is not None:
            made.batch_lines = []  # it is in the setup
            return
        if self.start is None or (self.loss is None and not self.start.trainer):
            made.batch_lines = [todo_line(NO_BATCH)]
            return
        taken = {*made.batch_names, *_bound(setup), *_read(setup), *_bound(loss), *_read(loss)}
        made.size_name = next((name for name in ("batch", "batch_size") if name not in taken), "batch")
        made.rows = "rows" if made.size_name in taken else made.size_name
        made.head = ["import torch", *(line for line in made.head if line != "import torch")]
        if self.loss is not None:
            made.slots = _slots([*(each.stmt for each in loss), self.loss], made.batch_names, models)
        elif made.by_keywords or self.script.training_step is None:
            made.slots = [Slot("batch", "**" if made.by_keywords else None, is_input=True)]
        else:
            step = self.script.training_step[1]
            made.slots = _slots(step.body, [each.arg for each in step.args.args[1:2]], [])
            for slot in made.slots:
                slot.name = "batch"

    def _write_setup(self, top: list[Placed], setup: list[Placed], models: list[str]) -> None:
        """Write what make() does before the loss function."""
        made = self.made
        if made.rows == "rows":
            made.setup.append(f"rows = {made.size_name}")
        outside = _bound(top) | _read(each for each in top if isinstance(each.stmt, DEFINITIONS))
        shared = sorted(outside & _bound(setup))
        made.setup += [f"global {', '.join(shared)}  # also used above"] if shared else []
        if not models and self.model is None and not made.todo:
            made.todo.append("set model: which name of the script is it?")
        made.setup += [todo_line(text) for text in made.todo] + self._texts(setup)
        if self.model is not None and not models:
            made.setup.append(f"model = {ast.unparse(self.model)}")
        made.model = models[0] if models else "model"
        if len(models) > 1:
            made.model = f"torch.nn.ModuleList([{', '.join(models)}])"
            made.head = made.head if "import torch" in made.head else ["import torch", *made.head]

    def _describe(self, models: list[str], statements: list[Placed]) -> None:
        """List what was found, with its lines."""
        script, found, start = self.script, self.made.found, self.start
        parts = [part for each in statements if not each.is_definition for part in ast.walk(each.stmt)]
        assigned = [part for part in parts if isinstance(part, ast.Assign)]
        for name in models:
            made = [part for part in assigned if name in bound_names(part) and isinstance(part.value, ast.Call)]
            found += [Part("model", script.text_of(part), part.lineno) for part in made[:1]]
        if start is not None and start.model is not None and not models:
            found.append(Part("model", script.text_of(start.model), start.model.lineno))
        if start is not None and self.loss is not None:
            names = {self.loss.id} if isinstance(self.loss, ast.Name) else set()
            computed = [p for p in assigned if names & bound_names(p) and not isinstance(p.value, ast.Constant)]
            place: ast.stmt | ast.expr = computed[0] if computed else self.loss
            found.append(Part("loss", script.text_of(place), place.lineno))
            others = sorted({each.line for each in script.losses} - {start.line})
            if len({script.text_of(each.loss) for each in script.losses if each.loss is not None}) > 1:
                found.append(Part("others", f"{len(others)} more backward(), not used", others[0]))
        batch = self.slicer.batch
        if batch is not None:
            value = batch.value
            if isinstance(value, ast.Call) and call_name(value) == "next" and value.args:
                value = unwrapped_loop(value.args[0])
            found.append(Part("data", script.text_of(value), batch.line))
        for name, call in list(script.optimizers.items())[:1]:
            found.append(Part("optimizer", f"{name} = {script.text_of(call)}", call.lineno))
        found += [script.precision] if script.precision else []


def _calls(node: ast.AST | None) -> list[ast.Call]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)] if node is not None else []


def _merged(lines: set[str]) -> list[str]:
    """Imports in order; names from one module in one line."""
    merged: dict[str, list[str]] = {}
    for line in sorted(lines, key=lambda text: (text.startswith("from"), text)):
        module, found, name = line.partition(" import ")
        merged.setdefault(module if found else line, []).extend([name] if found else [])
    return [f"{module} import {', '.join(names)}" if names else module for module, names in merged.items()]


def _live(statements: list[Placed], needed: set[str]) -> list[Placed]:
    """The statements that serve what is needed."""
    needed, kept, size = set(needed), set[int](), -1
    while size != len(kept):
        size = len(kept)
        for index, each in reversed(list(enumerate(statements))):
            affects = each.binds | each.changes
            if index not in kept and (not affects or affects & needed):
                kept.add(index)
                needed |= each.reads
    return [statements[index] for index in sorted(kept)]


def _slots(nodes: Sequence[ast.AST], names: list[str], models: list[str]) -> list[Slot]:
    """Slots of a batch that statements of a loss function use; the inputs are those that the models get."""
    keys: dict[str, dict[str | int, None]] = {name: {} for name in names}  # items that are taken of each variable
    made_from: dict[str, set[str]] = {name: {name} for name in names}  # slots that a name is made from
    inputs: set[str] = set()

    def slots_in(node: ast.AST) -> set[str]:
        found: set[str] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id in keys:
                key = getattr(part.slice, "value", None)
                if isinstance(key, str) or type(key) is int:
                    keys[part.value.id][key] = None
                    found.add(f"{part.value.id}[{key!r}]")
            elif isinstance(part, ast.Name):
                found |= made_from.get(part.id, set())
        return found

    for node in nodes:
        slots_in(node)  # for items that the model does not get
        for call in _calls(node):
            for given in (*call.args, *call.keywords) if call_name(call) in models else ():
                inputs |= slots_in(given)
                if isinstance(given, ast.keyword) and given.arg is None and root_name(given.value) in keys:
                    keys[root_name(given.value) or ""] = {"**": None}
        if isinstance(node, ast.Assign):
            for name, source in _sources(node, keys):
                made_from[name] = made_from.get(name, set()) | slots_in(source)
    found = [Slot(name, key, is_input=False) for name in names for key in (*keys[name],) or (None,)]
    for slot in found:
        slot.is_input = slot.code in inputs
    if found and not any(slot.is_input for slot in found):
        found[0].is_input = True
    return found


def _sources(stmt: ast.Assign, names: Container[str]) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns, each with the expression it gets; ``x, y = batch`` is ``batch[0]``, ..."""
    target, value = stmt.targets[0], stmt.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple):
        whole = value.generators[0].iter if isinstance(value, ast.ListComp | ast.GeneratorExp) else value
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        elif isinstance(whole, ast.Name) and whole.id in names:
            pairs = [
                (one, ast.Subscript(whole, ast.Constant(index), ast.Load())) for index, one in enumerate(target.elts)
            ]
    return ((name, source) for one, source in pairs for name in bound_names(one))
