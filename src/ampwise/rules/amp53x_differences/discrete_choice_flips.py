from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.diff.wording import first_spots, keep_fix, side_title, spot_text

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP536",
    name="discrete-choice-flips",
    severity=Severity.WARNING,
    summary="A discrete choice differs between the two sides: an index, a mask, a split size, or which module runs.",
    why=(
        "A router that picks an expert, a top-k, an argmax or a threshold decides by comparing. When two candidates "
        "are closer than the rounding error, the choice flips, and everything after it is not slightly but completely "
        "different: another expert, another token. Errors after that point do not measure precision."
    ),
    fix=(
        "Compute the compared values in FP32, starting from their inputs. A router is small, and mixture-of-experts "
        "models keep it in FP32."
    ),
    bad="chosen = self.router(x).topk(2).indices  # under autocast",
    good="""policy = ampwise.Policy("bf16").keep("fp32", "*.router")""",
)


def check_difference(differing: StepDifference) -> Findings:
    spots = list(first_spots(differing, "choice"))
    for spot in spots:
        yield RULE.at(
            spot.place,
            f"{spot.where} {spot_text(spot)}: {side_title(differing.b)} chooses differently from "
            f"{side_title(differing.a)}",
            evidence={"phase": spot.phase},
            fix=keep_fix(differing, spot, "the code that computes the compared values"),
        )
    once = [row for row in differing.rows if row.only]
    if once and not spots:
        more = f" (and {len(once) - 1} more such calls)" if len(once) > 1 else ""
        message = f"`{once[0].label}` runs only in {once[0].only}{more}"
        yield RULE.at(Place(module=once[0].label), message, evidence={"calls": len(once)})
