"""Ranks to ask, and what to say of their answers."""

import atexit
import contextlib
import functools
import json
import re
import tempfile
from pathlib import Path

WORKER = Path(__file__).with_name("distributed_worker.py")
LOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.nn.parallel"]


class Ranks:
    """``ask`` runs a case of distributed_cases.py on two ranks, or four, and returns the facts of each."""

    def __init__(self, pythons):
        self.open = contextlib.ExitStack()
        self.log = self.open.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.answer = self.open.enter_context(pythons.asked_by_lines(WORKER, said=self.log, loaded=LOADED))

    def ask(self, case, *, ranks=2, **arguments):
        answer = self.answer(json.dumps({"case": case, "ranks": ranks, "arguments": arguments}))
        assert answer, f"the ranks are gone:\n{self.last_words()}"
        return json.loads(answer)

    def last_words(self):
        self.log.seek(0)
        return self.log.read()[-4000:]


def pythons():
    """For `make peers`; tests have forks instead, by conftest.py."""
    from warm import Cold

    return Cold()


@functools.cache
def the_ranks():
    """Started when first asked for, since that takes seconds, and then kept."""
    ranks = Ranks(pythons())
    atexit.register(ranks.open.close)
    return ranks


def skips(answer):
    """The steps a rank skipped, by its weights; a rank that holds none has only the scaler's word."""
    return answer["skipped"] if answer["holds"] else answer["said"]


def complaints(answers):
    """What is wrong with the answers of ``train``, as sentences; nothing if the ranks did as they should."""
    errors = {answer.get("error") for answer in answers} - {None}
    if errors:
        return [f"raises {re.split('[.!] ', error)[0].rstrip('.')}" for error in sorted(errors)]
    found = []
    for rank, answer in enumerate(answers):
        found += [*wrong_skips(f"rank {rank}", answer), *wrong_norms(f"rank {rank}", answer)]
    found += wrong_scales(answers)
    return found + list(wrong_weights(answers, explained=bool(found)))


def wrong_scales(answers):
    due = answers[0]["scales_due"]
    if any(answer["scales"] != due for answer in answers):
        ends = " and ".join(f"{answer['scales'][-1]:g}" for answer in answers)
        yield f"the ranks end at scales {ends} instead of {due[-1]:g}"
    elif any(answer["state"] != answers[0]["state"] for answer in answers):
        yield "the ranks would save different scaler states"


def wrong_skips(rank, answer):
    due, skipped = answer["due"], skips(answer)
    if skipped is not None and (missed := [step for step in due if step not in skipped]):
        yield f"{rank} applies {len(missed)} of {len(due)} overflowed steps"
    elif answer["harmed"]:
        yield f"{rank}: the skipped steps {answer['harmed']} left something else in the optimizer's state"
    if skipped is not None and (lost := [step for step in skipped if step not in due]):
        yield f"{rank} leaves its weights alone in {len(lost)} good steps"
    if answer["said"] not in (due, None) or answer["counted"] not in (len(due), None):
        yield f"{rank} says it skipped {answer['said']}, {answer['counted']} in all, and should {due}"


def wrong_weights(answers, explained):
    if not all(answer["finite"] for answer in answers):
        yield "weights are inf or NaN"
    elif len({answer["weights"] for answer in answers}) > 1:
        yield "the ranks hold different weights"
    elif not explained and answers[0]["away"] > answers[0]["tolerance"]:
        yield f"weights are {answers[0]['away']:.1g} away from those of one process"


def wrong_norms(rank, answer):
    pairs = list(zip(answer["norms"], answer["norms_due"], strict=True)) if answer["norms"] else []
    away = max((abs(norm - due) / due for norm, due in pairs), default=0.0)
    if not away < 1e-6:
        yield f"{rank}: gradient norms are off by up to {away:.2g} of the true ones"


def judge(answers):
    """(right, seen): whether the ranks did as they should, and a sentence on what they did."""
    seen = "; ".join(complaints(answers))
    return not seen, seen or "all ranks skip the same steps, at the same scale, with the weights of one process"
