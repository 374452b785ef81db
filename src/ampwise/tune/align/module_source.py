"""Source code of module classes as syntax trees: what their methods do with attributes of ``self``.

Weights that a model's code reads directly, instead of calling the layers that hold them, must not be padded, since
padding changes what such code sees. A read is certain if the code names the path (``self.wte.weight``), and possible if
it reads the weight of something else (``layer.weight`` in a loop), reads all parameters at once, or cannot be parsed.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

LAYER_NAMES = {"weight", "bias"}
ALL_NAMES = {"parameters", "named_parameters", "state_dict", "_parameters", "get_parameter", "vars", "__dict__"}
UNKNOWN = object()  # result for a path that cannot be followed
# Methods that are not part of a forward pass, unless another one calls them.
NOT_RUNNING = {"__init__", "reset_parameters", "extra_repr", "_init_weights"}
# Ways to access a child without naming it.
UNNAMED = {"getattr", "vars", "_modules", "__dict__", "children", "modules", "named_children", "named_modules"}


class MethodSource(NamedTuple):
    """A method of a class, and the name of its first parameter."""

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    receiver: str | None  # None for a static method
    owner: Any  # the class that defines it

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    @property
    def of_torch(self) -> bool:
        """Whether torch defines it; torch's methods take apart only what they name."""
        return bool(self.owner.__module__.partition(".")[0] == "torch")


class ForwardSource(NamedTuple):
    """The forward of a class."""

    tree: ast.FunctionDef
    receiver: str  # the name of its first parameter, usually ``self``
    names: Mapping[str, Any]  # global names of its file, without those shadowed by locals
    named: Counter[str]  # how often the class's methods mention each attribute of the module


class _Text(NamedTuple):
    tree: ast.ClassDef
    first_line: int
    file: str


@lru_cache(maxsize=1024)
def read_forward(kind: Any) -> ForwardSource | None:
    """Return the forward that modules of this class run; None if it cannot be read, or may access children unnamed."""
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), nn.Module)
    function, text, methods = vars(owner)["forward"], _text_of(owner), _read_methods(kind)
    if not inspect.isfunction(function) or text is None or methods is None:
        return None
    tree = next((node for node in text.tree.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    if tree is None or function.__code__.co_firstlineno != text.first_line + tree.lineno - 1:
        return None  # decorated, or replaced
    receiver = _receiver(tree)
    if receiver is None or any(_word(node) in UNNAMED for method in methods for node in method.nodes):
        return None
    own = [node for method in methods for node in method.nodes if is_self_attribute(node, method.receiver)]
    named = Counter(node.attr for node in own if isinstance(node, ast.Attribute))
    code = function.__code__
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    names = {name: value for name, value in function.__globals__.items() if name not in local}
    return ForwardSource(tree, receiver, names, named)


@lru_cache(maxsize=1024)
def paths_not_only_called(kind: Any) -> tuple[tuple[str, ...], ...]:
    """Return the paths from a module to what its code loops over, indexes or passes on, rather than calls."""
    found: list[tuple[str, ...]] = []
    for method in _read_methods(kind) or ():
        called = {id(node.func) for node in method.nodes if isinstance(node, ast.Call)}
        rest = (node for node in method.nodes if isinstance(node, ast.Attribute) and id(node) not in called)
        found += filter(None, (_attribute_path(node, method.receiver) for node in rest))
        found += [()] * (not method.of_torch and any(_word(node) in UNNAMED for node in method.nodes))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def words_on_unknown_objects(kind: Any) -> frozenset[str]:
    """Return attribute names used on unknown objects, such as ``up`` in ``block.up``; "[" for an index or a loop."""
    found: set[str] = set()
    for method in _read_methods(kind) or ():
        for node in method.nodes if not method.of_torch else ():
            if isinstance(node, ast.Attribute) and _attribute_path(node, method.receiver) is None:
                found.add(node.attr)
            inner = node.iter if isinstance(node, ast.For | ast.comprehension) else None
            if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple):  # not of a tensor
                inner = node.value
            if inner is not None and _attribute_path(inner, method.receiver) is None:
                found.add("[")
    return frozenset(found)


def _attribute_path(node: ast.expr, receiver: str | None) -> tuple[str, ...] | None:
    """Return ``("transformer", "wte")`` for ``self.transformer.wte``; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == receiver else None


def is_self_attribute(node: ast.AST, receiver: str | None) -> bool:
    """Whether it is ``self.something``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver


def _word(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@lru_cache(maxsize=1024)
def _read_methods(kind: Any) -> tuple[MethodSource, ...] | None:
    """Return the methods of a class and its bases that may run in a forward pass; None if some cannot be read."""
    found: list[MethodSource] = []
    for base in kind.__mro__:
        module = base.__module__
        is_library = module.partition(".")[0] in sys.stdlib_module_names  # the standard library has no layers
        if base is nn.Module or (is_library and getattr(sys.modules.get(module), base.__name__, None) is base):
            continue
        text = _text_of(base)
        if text is None or not _has_own_forward(base, text):
            return None
        found += [MethodSource(tree, _receiver(tree), base) for tree in _functions(text.tree)]
    running = [method for method in found if method.tree.name not in NOT_RUNNING]
    named = {_word(node) for method in running for node in method.nodes}
    return tuple(method for method in found if method.tree.name not in NOT_RUNNING - named)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _functions(node)


def _receiver(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    taken = [*tree.args.posonlyargs, *tree.args.args]
    static = any(_word(each) == "staticmethod" for each in tree.decorator_list)
    return taken[0].arg if taken and not static else None


def _has_own_forward(kind: Any, text: _Text) -> bool:
    """Whether the class's forward is the one in its source, and was not replaced."""
    function = vars(kind).get("forward")
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return function is None
    decorated = any(each.name == "forward" and each.decorator_list for each in _functions(text.tree))
    lines = range(text.first_line, text.first_line + (text.tree.end_lineno or 0))
    return decorated or (code.co_firstlineno in lines and code.co_filename == text.file)


@lru_cache(maxsize=1024)
def _text_of(kind: Any) -> _Text | None:
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):  # defined in a shell, in C, by exec
        return None
    file = inspect.getsourcefile(kind) or ""
    return _Text(tree, first, file) if isinstance(tree, ast.ClassDef) else None


# --- weights that are read directly ----------------------------------------------------------------------------------


class WeightReader(NamedTuple):
    """A module whose code reads a layer's weight; ``doubt`` says why that is only possible, and is empty if certain."""

    module: nn.Module
    doubt: str = ""


def find_weight_readers(modules: Iterable[nn.Module]) -> dict[int, WeightReader]:
    """Return the readers of weights, by the id of the layer; certain reads take precedence."""
    found: dict[int, WeightReader] = {}
    known = list(modules)
    reached = _reached({type(module) for module in known})
    for module in known:
        for layer, doubt in _weight_reads(module, reached):
            if not doubt or id(layer) not in found:
                found[id(layer)] = WeightReader(module, doubt)
    return found


def follow_path(module: nn.Module, path: Iterable[str]) -> Any:
    """Follow a path of attributes from a module, registered or not; UNKNOWN if it cannot be followed."""
    found: Any = module
    for part in path:
        if not isinstance(found, nn.Module):
            return None  # not a module: a configuration
        has = {**vars(found), **found._buffers, **found._parameters, **found._modules}
        found = has.get(part, UNKNOWN)
        if found is UNKNOWN:
            return UNKNOWN
    return found


def _weight_reads(module: nn.Module, reached: frozenset[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers whose weights the module's code reads or may read, and why that is in doubt."""
    kind: Any = type(module)
    methods = _read_methods(kind)
    if methods is None:
        yield from ((layer, "cannot be parsed, and may read") for layer in _layers_in(module))
        return
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    own = set(kind.__mro__[: kind.__mro__.index(owner) + 1]) - {nn.Module}
    for method in methods:
        is_reached = method.tree.name in reached
        for path, reads_all in _reads(method):
            found = UNKNOWN if path is None else follow_path(module, path)
            if found is UNKNOWN and (is_reached or (method.owner in own and not reads_all)):
                doubt = "reads weights of layers it does not name, and may read"
                yield from ((layer, doubt) for layer in _layers_in(module))
            elif isinstance(found, nn.Module) and reads_all and is_reached:
                yield from ((layer, "reads all parameters at once, and may read") for layer in _layers_in(found))
            elif isinstance(found, nn.Module) and found is not module and not reads_all:
                yield found, ""


def _layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules inside a module, registered or held in attributes."""
    kept = [value for value in vars(module).values() if isinstance(value, nn.Module)]
    for value in vars(module).values():
        values = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else ()
        kept += [each for each in values if isinstance(each, nn.Module)]
    yield from (inner for each in (module, *kept) for inner in each.modules())


@lru_cache(maxsize=4096)
def _reads(method: MethodSource) -> tuple[tuple[tuple[str, ...] | None, bool], ...]:
    """Return the paths of what a method reads parameters of, None if unknown, and whether it reads all below."""
    found = []
    for node in ast.walk(method.tree):
        read = _parameter_read(node)
        if read is None:
            continue
        word, of = read
        path = None if of is None else _attribute_path(_plain(of), method.receiver)
        reads_all = word not in LAYER_NAMES
        if not method.of_torch or (path is not None and not reads_all):
            found.append((path, reads_all))
    return tuple(found)


def _parameter_read(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """Return the word by which a node reads parameters, and the node it reads them of."""
    if isinstance(node, ast.Attribute) and node.attr in LAYER_NAMES | ALL_NAMES:
        return node.attr, node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return None
    if node.func.id == "vars":
        return "vars", node.args[0]
    if node.func.id != "getattr" or len(node.args) < 2:
        return None
    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    if name is None or name in LAYER_NAMES | ALL_NAMES:
        return name or "vars", node.args[0]
    return None


def _plain(node: ast.expr) -> ast.expr:
    """Convert ``getattr(self, "wte")`` to ``self.wte``."""
    is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    if isinstance(node, ast.Call) and is_getattr and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
        return ast.Attribute(_plain(node.args[0]), str(node.args[1].value))
    return node


def _reached(kinds: Iterable[Any]) -> frozenset[str]:
    """Return the names of methods that a forward pass may call, by the names in the model's code."""
    methods = [method for kind in kinds for method in _read_methods(kind) or ()]
    named: dict[str, set[str]] = {}
    for method in methods:
        words = {node.attr for node in method.nodes if isinstance(node, ast.Attribute)}
        named.setdefault(method.tree.name, set()).update(words)
    reached, new = set(), {name for name in named if name == "forward" or name.startswith("__")}
    while new:
        reached |= new
        new = {word for name in new for word in named[name] if word in named} - reached
    return frozenset(reached)
