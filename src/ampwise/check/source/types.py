"""The types that rules about source work with, in one place for their annotations."""

from ampwise.check.source.accumulation import AccumulationWindow
from ampwise.check.source.events import BranchGuard, EventContext, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath
from ampwise.check.source.frame import Frame
from ampwise.check.source.outline import Binding, ClassOutline, FunctionOutline
from ampwise.check.source.precision import AutocastContext
from ampwise.check.source.project import SourceFile
from ampwise.check.source.scalers import ScalerCall
from ampwise.check.source.statement_order import StatementRange
from ampwise.check.source.steps import Moment, Region
from ampwise.check.source.walk import CodeSite, CodeTrace

__all__ = [
    "AccumulationWindow",
    "AutocastContext",
    "Binding",
    "BranchGuard",
    "ClassOutline",
    "CodeSite",
    "CodeTrace",
    "EventContext",
    "ExecutionPath",
    "Frame",
    "FunctionOutline",
    "Loop",
    "Moment",
    "Region",
    "ScalerCall",
    "SourceEvent",
    "SourceFile",
    "StatementRange",
]
