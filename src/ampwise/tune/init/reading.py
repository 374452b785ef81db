"""What a training script contains, found by reading it: model, loss, data, optimizer, options. It is not run."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ampwise.check.source.script import SourceScript, UnreadableFile, read_script
from ampwise.errors import BadInput
from ampwise.trace.names_in_code import (
    DEFINITIONS,
    FUNCTIONS,
    Scope,
    bound_names,
    call_name,
    calls_in,
    root_name,
    scopes_of,
)

# Calls that make importing a script start its work: data, models, training, processes.
WORK = {
    *("DataLoader", "backward", "from_pretrained", "load_dataset", "init_process_group", "download", "fit", "spawn"),
    *("parameters", "exec", "exit", "input", "create_model", "Accelerator", "launch", "run", "system"),
}
BACKENDS = ("accelerator", "fabric", "engine", "strategy", "booster")  # of backward(loss)
MODEL_BASES = {"Module", "LightningModule", "PreTrainedModel", "Sequential"}
PRECISION = {"autocast": "autocast", "GradScaler": "GradScaler", "half": ".half()", "bfloat16": ".bfloat16()"}
# The shape of an image of well-known datasets.
DATASETS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "QMNIST"), (1, 28, 28)),
    **dict.fromkeys(("CIFAR10", "CIFAR100", "SVHN"), (3, 32, 32)),
    "STL10": (3, 96, 96),
}
Node = TypeVar("Node", ast.Call, ast.Assign)
CROPS = ["RandomResizedCrop", "RandomCrop", "CenterCrop", "Resize"]  # the last to be applied first


class Part(NamedTuple):
    """Something found in the script, as it is shown."""

    what: str
    text: str
    line: int


class Start(NamedTuple):
    """Where a slice begins: the line of ``backward`` with its loss, or else where a model is made or passed on."""

    scope: Scope
    line: int
    loss: ast.expr | None
    model: ast.expr | None = None
    trainer: str = ""  # "transformers", "lightning": the library's loop takes the loss from the model


class Script:
    """A training script and what reading it shows."""

    def __init__(self, source: SourceScript) -> None:
        self.source, self.tree = source, source.tree
        self.path = Path(source.path)
        self.scopes = scopes_of(self.tree)

    def text_of(self, node: ast.AST) -> str:
        """The code of a node in one line."""
        return " ".join(ast.unparse(node).split())

    @functools.cached_property
    def calls(self) -> list[tuple[Scope, ast.Call]]:
        """All calls with the scope that each is in, in the order of the file."""
        return self._find(ast.Call)

    @functools.cached_property
    def assignments(self) -> list[tuple[Scope, ast.Assign]]:
        """All assignments with the scope that each is in, in the order of the file."""
        return self._find(ast.Assign)

    def _find(self, kind: type[Node]) -> list[tuple[Scope, Node]]:
        scope_of = {id(scope.node): scope for scope in self.scopes}
        found: list[tuple[Scope, Node]] = []

        def visit(node: ast.AST, scope: Scope) -> None:
            scope = scope_of.get(id(node), scope)
            if isinstance(node, kind):
                found.append((scope, node))
            for child in ast.iter_child_nodes(node):
                visit(child, scope)

        visit(self.tree, self.scopes[0])
        return sorted(found, key=lambda pair: (pair[1].lineno, pair[1].col_offset))

    # Where the loss and the model are.

    @functools.cached_property
    def losses(self) -> list[Start]:
        """Each ``loss.backward()`` of the script; those of tests and attacks last."""
        found = []
        for scope, call in self.calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
                continue
            loss = call.func.value
            name = (call_name(loss) or root_name(loss) or "").lower()
            if name.endswith(BACKENDS):
                loss = call.args[0] if call.args else ast.Constant(None)
            elif isinstance(loss, ast.Call) and call_name(loss) == "scale" and loss.args:
                loss = loss.args[0]
            if name != "self" and isinstance(loss, ast.Name | ast.Attribute | ast.Call | ast.BinOp | ast.Subscript):
                found.append(Start(scope, call.lineno, loss))
        not_training = ("eval", "test", "valid", "attack")
        return sorted(found, key=lambda each: any(word in each.scope.name.lower() for word in not_training))

    @functools.cached_property
    def start(self) -> Start | None:
        """Where to begin: the first loss; for loops in a library the model that it gets; else the first model."""
        if self.losses:
            return self.losses[0]
        step = self.training_step
        for scope, call in self.calls:
            if step is not None and call_name(call) == step[0].name:
                return Start(scope, call.lineno, None, call, "lightning")
        own = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        for scope, call in self.calls:
            if call_name(call).endswith("Trainer") and call_name(call) not in own:
                given = next((word.value for word in call.keywords if word.arg == "model"), None)
                named = [each for each in call.args if isinstance(each, ast.Name) and each.id in ("model", "net")]
                model = given or next(iter(named), None)
                if model is not None:
                    library = "transformers" if "transformers" in self.source.text else ""
                    return Start(scope, call.lineno, None, model, library)
        for scope, stmt in self.new_models:
            return Start(scope, (stmt.end_lineno or stmt.lineno) + 1, None, stmt.targets[0])
        return None

    @functools.cached_property
    def training_step(self) -> tuple[ast.ClassDef, ast.FunctionDef] | None:
        """The method ``training_step`` of Lightning, and its class."""
        for scope in self.scopes:
            if scope.name == "training_step" and scope.cls is not None and isinstance(scope.node, ast.FunctionDef):
                return scope.cls, scope.node
        return None

    @functools.cached_property
    def module_classes(self) -> set[str]:
        """Classes of the script that are modules of torch, by their base classes."""
        found: set[str] = set()
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        for _ in classes:
            found |= {each.name for each in classes if {*map(call_name, each.bases)} & (MODEL_BASES | found)}
        return found

    @functools.cached_property
    def new_models(self) -> list[tuple[Scope, ast.Assign]]:
        """Statements that assign a new model: a class of the script, ``from_pretrained``, timm, torchvision."""
        found = []
        for scope, stmt in self.assignments:
            is_named = self.text_of(stmt.targets[0]) in ("model", "net")
            for call in calls_in(stmt.value):
                name, text = call_name(call), self.text_of(call.func)
                pretrained = name in ("from_pretrained", "from_config") and "Model" in text
                library = name == "create_model" or "models" in text.split(".")[:-1]
                if name in self.module_classes or pretrained or library or (is_named and name[:1].isupper()):
                    found.append((scope, stmt))
                    break
        return found

    @functools.cached_property
    def model_names(self) -> list[str]:
        """Names of models: those whose ``parameters()`` are read, such as by an optimizer, and those made here."""
        found: dict[str, None] = {}
        for method in ("parameters", "named_parameters", "configure_optimizers", "state_dict", "train"):
            for _, call in self.calls:
                owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == method else None
                name = self.text_of(owner) if isinstance(owner, ast.Name | ast.Attribute) else ""
                if name and not any(word in name for word in ("optim", "sched", "scaler")):
                    found.setdefault(name.removesuffix(".module"))
            if found:
                break
        found |= dict.fromkeys(self.text_of(stmt.targets[0]) for _, stmt in self.new_models)
        return list(dict.fromkeys(name.removeprefix("self.") for name in found))

    @functools.cached_property
    def optimizers(self) -> dict[str, ast.Call]:
        """Optimizers that are made, by the name each gets."""
        found: dict[str, ast.Call] = {}
        for _, stmt in self.assignments:
            target, text = self.text_of(stmt.targets[0]), self.text_of(stmt.value)
            named = "optim" in target.lower() or target == "opt" or "optim." in text
            makes = "parameters" in text or "optim" in text.partition("(")[0].lower()
            if isinstance(stmt.value, ast.Call) and named and makes and "sched" not in text:
                found.setdefault(target, stmt.value)
        return found

    def optimizer_of(self, scope: Scope) -> str | None:
        """The optimizer that is stepped in a scope: ``optimizer.step()``, ``scaler.step(optimizer)``."""
        for inside, call in self.calls:
            if inside is scope and isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                name = self.text_of(call.args[0] if call.args else call.func.value)
                if name in self.optimizers and name.removeprefix("self.").isidentifier():
                    return name
        return None

    # What importing it does.

    @functools.cached_property
    def work_on_import(self) -> tuple[int, str] | None:
        """The first thing besides definitions that importing the script would do, with its line."""
        functions = {each.name for each in self.tree.body if isinstance(each, FUNCTIONS)}
        for stmt in self.scopes[0].body:
            if isinstance(stmt, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
                continue
            starts = WORK | self.module_classes | (set() if isinstance(stmt, ast.Assign) else functions)
            for call in sorted(calls_in(stmt), key=lambda each: (each.lineno, each.col_offset)):
                text = self.text_of(call.func)
                makes_data = "dataset" in text.lower() and text.replace(".", "_").isidentifier()
                if (call_name(call) in starts or makes_data) and text != "subprocess.run":
                    return call.lineno, f"{text}()"
            if isinstance(stmt, ast.For | ast.While | ast.AsyncFor):
                return stmt.lineno, "a loop"
        return None

    @functools.cached_property
    def training_on_import(self) -> tuple[int, str] | None:
        """The line at the top level that trains, without ``if __name__ == "__main__"``, and what it says."""
        inside: dict[str, set[str]] = {}
        for scope, call in self.calls:
            if not scope.is_module:
                inside.setdefault(scope.name, set()).add(call_name(call))
        trains = {"backward"}
        for _ in inside:
            trains |= {name for name, called in inside.items() if called & trains}
        for stmt in self.scopes[0].body:
            for call in sorted(calls_in(stmt), key=lambda each: each.lineno):
                plain = isinstance(call.func, ast.Name) or call_name(call) == "backward"
                if plain and call_name(call) in trains:
                    return call.lineno, f"{self.text_of(call.func)}()"
        return None

    # Options and sizes.

    @property
    def reads_options(self) -> bool:
        """Whether it reads its command line."""
        return any(word in self.source.text for word in ("parse_args", "parse_known_args", "sys.argv"))

    @functools.cached_property
    def batch_size(self) -> int | None:
        """The batch size, where the script has it as a number."""
        found: list[Any] = []
        for _, call in self.calls:
            words = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
            names = [str(getattr(each, "value", "")).strip("-").replace("-", "_") for each in call.args]
            if call_name(call) == "DataLoader" or (call_name(call) == "add_argument" and "batch_size" in names):
                found.append(words.get("batch_size" if call_name(call) == "DataLoader" else "default"))
        named = [stmt for _, stmt in self.assignments if "batch_size" in map(str.lower, bound_names(stmt))]
        found += [getattr(stmt.value, "value", None) for stmt in named]
        return next((value for value in found if type(value) is int and value > 0), None)

    @functools.cached_property
    def image_size(self) -> tuple[tuple[int, int, int] | None, int | None, str]:
        """Shape of an image, for a well-known dataset; its height, for a crop in the script; and where that is."""
        crops = []
        for _, call in self.calls:
            if call_name(call) in CROPS and call.args:
                size = next(iter(getattr(call.args[0], "elts", [])), call.args[0])  # (height, width)
                if isinstance(size, ast.Constant) and type(size.value) is int:
                    crops.append((CROPS.index(call_name(call)), size.value, call.lineno))
        height, where = (min(crops)[1], f"size: line {min(crops)[2]}") if crops else (None, "")
        for _, call in self.calls:
            if call_name(call) in DATASETS:
                shape = DATASETS[call_name(call)]
                if height is None or height == shape[1]:
                    return shape, None, f"{call_name(call)}, line {call.lineno}"
                return (shape[0], height, height), None, where
        return None, height, where

    @functools.cached_property
    def precision(self) -> Part | None:
        """Where the script chooses a precision itself: autocast, a scaler, half models."""
        found = [(PRECISION[call_name(call)], call.lineno) for _, call in self.calls if call_name(call) in PRECISION]
        names = ", ".join(dict.fromkeys(name for name, _ in found))
        return Part("precision", f"{names}: left out, ampwise chooses", found[0][1]) if found else None


def read_training_script(name: str) -> Script:
    """Read a script; BadInput, in one line, if that cannot be done."""
    if not name.endswith(".py"):
        raise BadInput(f"{name}: expected a Python script, such as train.py.")
    if not os.path.exists(name):  # noqa: PTH110 (a name may be invalid as a path)
        raise BadInput(f"{name}: there is no such file. Give the script that trains: ampwise init train.py")
    try:
        return Script(read_script(name))
    except UnreadableFile as error:
        line = f":{error.line}" if error.line else ""
        raise BadInput(f"{error.path}{line}: {error.reason}.") from error
