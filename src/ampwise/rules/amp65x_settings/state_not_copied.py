from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP654",
    name="state-not-copied",
    severity=Severity.WARNING,
    summary="The weights that are kept to be restored later are those of the model itself.",
    why=(
        "`state_dict()` returns the tensors of the model, not copies of them, and so do `dict(...)` and `.copy()` of "
        "it, `.detach()`, and `.cpu()` on a CPU. Each step changes them too. `load_state_dict` then copies every "
        "tensor to itself: what is evaluated as the best weights are the last ones."
    ),
    fix="Keep a copy, `copy.deepcopy(model.state_dict())`, or save it to a file.",
    bad="best = model.state_dict()\n...\nmodel.load_state_dict(best)",
    good="best = copy.deepcopy(model.state_dict())\n...\nmodel.load_state_dict(best)",
)


def check_learning(facts: Learning) -> Findings:
    for site, loaded in facts.followed_states.items():
        where = f" at {loaded.at.in_text}" if loaded.at is not None and loaded.at.file else ""
        yield RULE.at(
            site.place.but(step=loaded.step),
            f"the state of this {loaded.what} is no copy: the steps since have changed it too, and to load it{where} "
            "restores nothing",
            evidence={"times": loaded.times},
        )
