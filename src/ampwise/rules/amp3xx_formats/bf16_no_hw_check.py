from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.check.source.cases import ALWAYS, FALSE, Limit, conditions_at, joined
from ampwise.check.source.defaults import defaults_of, last_word, option_defaults
from ampwise.check.source.half_models import half_models_in, half_optimizers, sharded_in
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.modes import Autocast, entered_by, is_off_gpu
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.precision import AutocastContext, argument_of
from ampwise.check.source.torch_names import BF16, DTYPES, SPELLINGS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.cases import Conditions
    from ampwise.check.source.half_models import HalfModel
    from ampwise.check.source.types import Frame, SourceFile
    from ampwise.check.source.walk import CodeSite

RULE = Rule(
    code="AMP303",
    name="bf16-no-hw-check",
    severity=Severity.INFO,
    summary="BF16 autocast or weights run on CUDA without a check, or with a wrong check, that the GPU supports it.",
    why=(
        "BF16 tensor cores came with compute capability 8.0. On a V100 (7.0) or T4 (7.5) torch silently emulates "
        "BF16, several times slower than FP16 or even FP32."
    ),
    fix=(
        "Choose by hardware: BF16 if `torch.cuda.get_device_capability() >= (8, 0)`, else FP16 with a GradScaler. "
        "`is_bf16_supported()` alone includes emulation."
    ),
    bad='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
    good=(
        "has_bf16 = torch.cuda.get_device_capability() >= (8, 0)\n"
        "dtype = torch.bfloat16 if has_bf16 else torch.float16\n"
        'with torch.autocast("cuda", dtype=dtype):\n    loss = loss_fn(model(x), y)'
    ),
)
NEEDS = (
    ("bfloat16", "bf16"),
    ("autocast", "capability", "get_device_properties", "cuda"),
    (".backward(", "caler(", "capability", "get_device_properties"),
)

# Names of functions and attributes that ask the GPU.
CHECKS_HARDWARE = LazyPattern(
    r"bf(loat)?16_(gpu_)?(is_)?(support|avail|ready|capable|ok)|supports?_bf|(has|can|can_use)_bf|capability|"
    r"^major$|get_arch_list|ampere",
    re.IGNORECASE,
)
NOT_CUDA = ("cpu", "mps", "xla", "hpu")  # not CUDA devices
CALLED = LazyPattern(r"\(")
ABOUT_DTYPE = LazyPattern(r"dtype|precision|bf16|bfloat16|amp|half", re.IGNORECASE)
ABOUT_BF16 = LazyPattern(r"bf16|bfloat16", re.IGNORECASE)
OTHER_DTYPE = LazyPattern(r"(?<!b)float16|fp16|float32|fp32|half")
CHECKS_BF16 = LazyPattern(r"bf16_support|is_bf16|bfloat16_support")
# A branch with such a word may choose a dtype, or end where the hardware is too old, or tell the user.
DECIDES = LazyPattern(
    r"dtype|precision(?!\(['\"]high)|bf16|float16|fp16|amp|half|raise|exit|return|assert|warn|print|log", re.I
)
PRINTS = ("print", "info", "debug", "log", "write")
FOLLOW = 3  # names
# What FP16 tensor cores are not enough for: packages, and the option of transformers.
NEWER_GPUS = ("flash_attn", "flash_attn_interface", "transformer_engine")
FLASH_ATTENTION = {"flash_attention_2", "flash_attention_3"}


def check_source(code: SourceFile) -> Findings:
    if code.uses_framework and not code.is_accelerated_alone:
        return
    yield from _low_thresholds(code)
    if _asks_hardware(code) or _runs_on_newer_gpus_alone(code):
        return
    steps = any(region.has("optimizer step", "scaler step", "opaque") for region in code.regions)
    if not steps and not any(event.kind == "opaque" and event.context.loops for event in code.events):
        return  # inference and tests may be written for a known GPU
    # Beside Accelerate, which refuses BF16 where there is none, only an autocast of the script's own counts.
    has_weights = "cuda" in code.script.text and not code.uses_framework
    for model in _models_trained(code) if has_weights else ():
        if model.context.frame.outline is code.outline and _is_default(model.given, code):
            place = code.script.place(_names_bf16(model.node))
            yield RULE.at(place, "this file does not check that the GPU has BF16, the dtype of these weights")
            return
    judged: dict[tuple[ast.expr, Frame | None], bool] = {}
    found: list[CodeSite] = []
    for site in code.statements:
        autocast = site.context.autocast
        if autocast is None or autocast.frame.outline is not code.outline:
            continue  # another file's autocast, which is checked there
        if site.context.no_grad and code.uses_framework:
            continue
        region = (autocast.node, autocast.entered_in)
        if region not in judged:
            judged[region] = autocast.known and autocast.may_be_on and _may_be_bf16(autocast, code)
            found += [site] if judged[region] else []
    # One check fixes them all: the training's autocast is the one to name.
    chosen = min(found, key=lambda site: site.context.no_grad, default=None)
    if chosen is not None and chosen.context.autocast is not None:
        node = chosen.context.autocast.node
        named = [] if ABOUT_BF16.search(ast.unparse(node)) else _literals(code)
        place = code.script.place(named[0] if len(named) == 1 else node)  # where the choice is made
        yield RULE.at(
            place, "this file does not check that the GPU has BF16: before compute capability 8.0 it is emulated"
        )
        return
    for node, given, _ in sharded_in(code, BF16) if has_weights else ():
        if _is_default(given, code) and not any(map(ABOUT_DTYPE.search, given)):  # else someone asks for it
            place = code.script.place(node)
            yield RULE.at(place, "this file does not check that the GPU has BF16, in which FSDP gathers these weights")
            return


def _models_trained(code: SourceFile) -> list[HalfModel]:
    """Return the BF16 models whose parameters an optimizer gets, and those that a training step runs.

    The latter may have FP32 master weights, or adapters: their matmuls are in BF16 all the same.
    """
    run = [model for region in code.regions if region.has("backward") for model in half_models_in(region, code, BF16)]
    return [*[pair.model for pair in half_optimizers(code, BF16)], *run]


def _literals(code: SourceFile) -> list[ast.Attribute]:
    """Return where a file assigns BF16 as a dtype, maybe as one of several; nothing if it also names it elsewhere."""
    named = [node for node in code.nodes(ast.Attribute) if node.attr == "bfloat16"]
    halves = [node for node in named if DTYPES.get(code.outline.imports.qualified(node) or "") == BF16]
    return halves if all(isinstance(code.script.statement(node), ast.Assign) for node in halves) else []


def _names_bf16(cast: ast.Call) -> ast.expr:
    """Return the argument that makes a cast BF16, on a line of its own in `from_pretrained(...)`; or the cast."""
    given = [part for part in arguments_given(cast) if ABOUT_BF16.search(ast.unparse(part))]
    return given[0] if len(given) == 1 else cast


def _asks_hardware(code: SourceFile) -> bool:
    """Whether the file asks anywhere what the GPU supports, and does something about it."""
    names = [function.name for function in code.outline.functions]
    names += [full.rpartition(".")[2] for full in code.outline.imports.names.values()]
    if any(CHECKS_HARDWARE.search(name) for name in names):
        return True
    asked: list[ast.expr] = [node for node in code.nodes(ast.Attribute) if CHECKS_HARDWARE.search(node.attr)]
    asked += [node for node in code.nodes(ast.Name) if CHECKS_HARDWARE.search(node.id)]
    return any(not _is_beside(node, code) for node in asked)


def _runs_on_newer_gpus_alone(code: SourceFile) -> bool:
    """Whether the file uses what raises an error on a GPU without BF16: FP8 matmuls, FlashAttention 2 or 3."""
    for statement in code.outline.script.tree.body:  # an import in a `try` may fail
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) and not statement.level else []
        if any(name.partition(".")[0] in NEWER_GPUS for name in names):
            return True
    if any(code.outline.imports.qualified(node) == "torch._scaled_mm" for node in code.nodes(ast.Attribute)):
        return True
    defaults = defaults_of(code).items() if "flash_attention_" in code.script.text else ()
    return any("attn" in name and values and values <= FLASH_ATTENTION for name, values in defaults)


def _is_beside(question: ast.expr, code: SourceFile, depth: int = 0) -> bool:
    """Whether a question to the hardware decides nothing about dtypes: it is only printed, or switches TF32 on."""
    node: ast.AST = question
    while not isinstance(node, ast.stmt | ast.IfExp):
        node = code.script.parents[node]
    if isinstance(node, ast.IfExp):  # of what is chosen, and for what
        return not DECIDES.search(ast.unparse(code.script.statement(node)).replace(ast.unparse(node.test), ""))
    if isinstance(node, ast.If) and question not in set(walk(node.test)):
        return False
    if isinstance(node, ast.If):
        return not any(DECIDES.search(ast.unparse(statement)) for statement in [*node.body, *node.orelse])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return last_name(node.value.func) in PRINTS
    if not isinstance(node, ast.Assign) or depth > FOLLOW:
        return False
    targets = [part for target in node.targets for part in walk(target)]
    names = {part.id for part in targets if isinstance(part, ast.Name)}
    if any(isinstance(part, ast.Attribute | ast.Subscript) for part in targets) or any(map(ABOUT_DTYPE.search, names)):
        return False
    home = code.function_at(node)
    uses = [use for use in code.nodes(ast.Name) if use.id in names and isinstance(use.ctx, ast.Load)]
    uses = [use for use in uses if home.parent is None or code.function_at(use) is home]
    return bool(uses) and all(_is_beside(use, code, depth + 1) for use in uses)


def _may_be_bf16(autocast: AutocastContext, code: SourceFile) -> bool:
    """Whether an autocast is BF16 on CUDA: always, by a flag, or by the default of a choice among dtypes."""
    ways = [ALWAYS]
    if autocast.manager is not None and autocast.entered_in is not None:
        ways = conditions_at(autocast.entered_in, autocast.manager)
    for one in entered_by(autocast):
        if one.dtype == BF16 and _may_be_on_cuda(one, code):
            together = [given for way in ways if (given := joined(one.given, way)) is not None]
            if any(_is_default(given, code) for given in together):
                return True
    return False


def _is_default(given: Conditions, code: SourceFile) -> bool:
    """Whether conditions hold on a GPU unless someone asks for another dtype than the script's default."""
    return not is_off_gpu(given) and all(_is_likely(name, limit, code) for name, limit in given.items())


def _may_be_on_cuda(autocast: Autocast, code: SourceFile) -> bool:
    """Whether an autocast's device may be a GPU; a variable that the file sets is what the file sets it to."""
    if autocast.device is not None:
        return autocast.device not in NOT_CUDA
    device = argument_of(autocast.node, "device_type", 0) if isinstance(autocast.node, ast.Call) else None
    name = (dotted_text(device) or "").rpartition(".")[2] if device is not None else ""
    values = defaults_of(code).get(name, set())
    return not values or not values <= set(NOT_CUDA)


def _is_likely(option: str, limit: Limit, code: SourceFile) -> bool:
    """Whether one condition holds by default."""
    among = limit.among or frozenset()
    if among and among <= set(NOT_CUDA):
        return False
    name = last_word(option)
    defaults = defaults_of(code).get(name) or _defaults_of_importers(name, code) or _defaults_of_imported(name, code)
    named = [value.lower() for value in among | limit.without if isinstance(value, str)]
    if not any(value in SPELLINGS or ABOUT_BF16.search(value) for value in named):
        # A flag, a phase, a device; one called `use_bf16` is the user's choice, if the script does not set it.
        is_asked = ABOUT_BF16.search(name) and not CALLED.search(option)
        return not is_asked or True in defaults or bool(among & FALSE)
    return any(value not in limit.without and (not among or value in among) for value in defaults)


def _defaults_of_importers(name: str, code: SourceFile) -> set[str | bool]:
    """Return what an option is by default in the scripts that import a file, unless they ask the hardware."""
    importers = [code.project.code(path) for path in sorted(code.project.importers(code.path))]
    if any(_asks_hardware(importer) for importer in importers):
        return set()
    return set().union(*[option_defaults(importer).get(name, set()) for importer in importers])


def _defaults_of_imported(name: str, code: SourceFile) -> set[str | bool]:
    """Return what an option is by default in the files of settings that a script imports."""
    texts = {path: code.project.text(path) or "" for path in code.project.taken_by(code.path)}
    named = [path for path, text in texts.items() if name in text and ABOUT_BF16.search(text)]
    return set().union(*[option_defaults(code.project.code(path)).get(name, set()) for path in named])


def _low_thresholds(code: SourceFile) -> Findings:
    """Yield a finding for checks like ``get_device_capability()[0] >= 7``, which a V100 passes."""
    text = code.script.text
    if not ("capability" in text or "get_device_properties" in text) or not ABOUT_BF16.search(text):
        return
    for node in code.nodes(ast.Compare):
        limit = _limit(node) if len(node.ops) == 1 else None
        if limit is None or limit[0] >= (8, 0):
            continue
        (major, minor), is_passed = limit
        frame = code.frame(code.function_at(node))
        if _is_capability(node.left, frame) and (_decides_bf16(node, code) if is_passed else _else_is_bf16(node, code)):
            message = f"BF16 needs compute capability 8.0, but this lets {major}.{minor} pass"
            yield RULE.at(code.script.place(node), message)


def _is_capability(node: ast.expr, frame: Frame, depth: int = 0) -> bool:
    """Whether an expression is a GPU's capability or its major part, under whatever name."""
    if isinstance(node, ast.Subscript):
        is_major = isinstance(node.slice, ast.Constant) and node.slice.value == 0
        return is_major and _is_capability(node.value, frame, depth)
    if isinstance(node, ast.Attribute) and node.attr == "major":
        return any(
            "get_device_properties" in ast.unparse(value.node) for value in frame.values(node.value) if value.node
        )
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        return _is_capability(node.elts[0], frame, depth)
    if isinstance(node, ast.BinOp):  # major * 10 + minor, or major + minor / 10
        left = node.left.left if isinstance(node.left, ast.BinOp) else node.left
        return isinstance(node.op, ast.Add) and _is_capability(left, frame, depth)
    if isinstance(node, ast.Call):
        return method_called(node) == "get_device_capability" or last_name(node.func) == "get_device_capability"
    if not isinstance(node, ast.Name | ast.Attribute) or depth > FOLLOW:
        return False
    name = dotted_text(node) or ""
    function = frame.function.home_of(name)
    for binding in function.bindings.get(name, ()) if function is not None else ():
        assigned = binding.node
        if binding.value is None and isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Tuple):
            first = assigned.targets[0].elts[0]  # major, minor = torch.cuda.get_device_capability()
            if dotted_text(first) == name and _is_capability(assigned.value, frame, depth + 1):
                return True
    return any(
        value is not node and value is not None and _is_capability(value, home, depth + 1)
        for value, home in frame.values(node)
    )


def _decides_bf16(node: ast.Compare, code: SourceFile) -> bool:
    """Whether a comparison chooses BF16: it is the test of it, or its result has a name that is."""
    chosen = _tests(code)
    if node in chosen:
        return chosen[node]
    statement = code.script.statement(node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {dotted_text(target) or "" for target in targets}
    if isinstance(statement, ast.Return):
        names = {code.function_at(node).name}
    if any(ABOUT_BF16.search(name) for name in names):
        return True
    return any(
        is_bf16 and (dotted_text(test) or ast.unparse(getattr(test, "func", test))) in names
        for test, is_bf16 in chosen.items()
    )


@functools.lru_cache(maxsize=2)
def _tests(code: SourceFile) -> dict[ast.expr, bool]:
    """Return the parts of all tests of ``if``s, and whether what they lead to is BF16."""
    found: dict[ast.expr, bool] = {}
    choices: list[ast.IfExp | ast.If] = [*code.nodes(ast.IfExp), *code.nodes(ast.If)]
    for choice in choices:
        body = [choice.body] if isinstance(choice, ast.IfExp) else choice.body[:3]
        text = " ".join([ast.unparse(part) for part in body if not isinstance(part, ast.If)])
        asks_more = CHECKS_BF16.search(ast.unparse(choice.test)) is not None
        is_bf16 = ABOUT_BF16.search(text) is not None and not asks_more
        for part in walk(choice.test):
            if isinstance(part, ast.expr):
                found[part] = is_bf16
    return found


def _else_is_bf16(node: ast.Compare, code: SourceFile) -> bool:
    """Whether a comparison such as ``major < 7`` chooses another dtype, and BF16 where it does not hold."""
    choice: ast.AST = node
    while isinstance(choice, ast.expr) and not isinstance(choice, ast.IfExp):
        choice = code.script.parents[choice]
    body: Sequence[ast.AST]
    other: Sequence[ast.AST]
    if isinstance(choice, ast.IfExp):
        body, other = [choice.body], [choice.orelse]
    elif isinstance(choice, ast.If) and len(choice.body) == 1:
        body, other = choice.body, choice.orelse or _next_to(choice, code)
    else:
        return False
    text = ast.unparse(other[0]) if other else ""
    return bool(OTHER_DTYPE.search(ast.unparse(body[0])) and ABOUT_BF16.search(text) and not OTHER_DTYPE.search(text))


def _next_to(statement: ast.If, code: SourceFile) -> list[ast.stmt]:
    """Return what follows an ``if`` that returns."""
    around = getattr(code.script.parents.get(statement), "body", [])
    leaves = statement in around and isinstance(statement.body[-1], ast.Return)
    return around[around.index(statement) + 1 :] if leaves else []


def _limit(node: ast.Compare) -> tuple[tuple[int, int], bool] | None:
    """Return the smallest capability on the upper side of a comparison, and whether the comparison holds there."""
    try:
        limit = ast.literal_eval(node.comparators[0])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    numbers = limit if isinstance(limit, tuple) else (limit,)
    if not 1 <= len(numbers) <= 2 or not all(isinstance(number, int | float) for number in numbers):
        return None
    if isinstance(node.left, ast.BinOp) or isinstance(numbers[0], float) or numbers[0] >= 30:  # 7.5 or 75
        tenths = numbers[0] if numbers[0] >= 30 else numbers[0] * 10
        numbers = divmod(round(tenths), 10)
    major, minor = (*map(int, numbers), 0)[:2]
    operator = node.ops[0]
    if isinstance(operator, ast.GtE | ast.Lt):
        return (major, minor), isinstance(operator, ast.GtE)
    if isinstance(operator, ast.Gt | ast.LtE):
        above = (major + 1, 0) if len(numbers) == 1 else (major, minor + 1)
        return above, isinstance(operator, ast.Gt)
    return None
