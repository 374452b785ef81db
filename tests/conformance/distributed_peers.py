"""Two ranks that must agree: ours and torch's, which for FSDP1 is ShardedGradScaler."""

from .distributed_pair import judge, the_ranks
from .registry import Case, Outcome


def trained(contender, **arguments):
    # Not the first step: there a skipped fused SGD leaves memory nobody has written, and what follows is chance.
    return the_ranks().ask("train", contender=contender, **{"at": [4, 5, 11], **arguments})


def trained_fsdp1(contender, **arguments):
    """FSDP1 hands out plain tensors, other ones on each rank: ours has to be told to agree."""
    told = {"contender": "ampwise", "agree": True} if contender == "ampwise" else {"contender": "sharded"}
    return trained(**told, **{"job": "fsdp1", "optimizer": "adamw-fused", **arguments})


FSDP2 = Case(
    "fsdp2-overflow-on-one-rank",
    title="FSDP2: one rank's shard overflows",
    why="Only that rank sees it; unless all ranks skip, each continues with different weights and a different scale.",
)


@FSDP2.by("ampwise", "torch")
def fsdp2(contender):
    return Outcome(*judge(trained(contender, job="fsdp2", optimizer="adamw-fused", overflow=[1])))


REPLICATED_FIRST = Case(
    "fsdp2-replicated-parameter-first",
    title="DTensors: the first parameter is replicated, a sharded one overflows",
    why="Tensor parallelism replicates norms and biases next to sharded matrices; whether the ranks have to "
    "communicate cannot be seen from the first gradient.",
)


@REPLICATED_FIRST.by("ampwise", "torch")
def replicated_first(contender):
    return Outcome(*judge(trained(contender, job="replicated+sharded", optimizer="adamw-fused", overflow=[1], hit=1)))


MIXED = Case(
    "dtensors-and-plain-parameters",
    title="DTensors and plain parameters in one optimizer",
    why="A head, an embedding or an adapter is often left out of fully_shard().",
)


@MIXED.by("ampwise", "torch")
def mixed(contender):
    return Outcome(*judge(trained(contender, job="plain+sharded", optimizer="adamw-fused", overflow=[1], hit=1)))


ONE_COLLECTIVE = Case(
    "fsdp2-clip-with-one-collective",
    title="FSDP2: check for overflow and clip by the norm, with one small reduction",
    why="Each reduction waits for the slowest rank; the norm and the overflow flag can share one.",
)


@ONE_COLLECTIVE.by("ampwise", "torch")
def one_collective(contender):
    path = "clip" if contender == "ampwise" else "unscale, torch's clip"
    answers = trained(contender, job="fsdp2", optimizer="adamw-fused", overflow=[1], path=path)
    right, seen = judge(answers)
    most = max(count for answer in answers for count in answer.get("collectives", [0]))
    return Outcome(right and most == 1, f"{most} collective{'s' * (most != 1)} a step" if right else seen)


FSDP1_FUSED = Case(
    "fsdp1-fused",
    title="FSDP1 with a fused optimizer: one rank's shard overflows",
    why="With a fused optimizer the check happens inside step(), and there too the ranks must agree.",
)


@FSDP1_FUSED.by("ampwise", "torch")
def fsdp1_fused(contender):
    return Outcome(*judge(trained_fsdp1(contender, overflow=[1])))


FSDP1_UNSCALE = Case(
    "fsdp1-fused-after-unscale",
    title="FSDP1 with fused AdamW after unscale_()",
    why="unscale_() comes first wherever gradients are clipped or logged.",
)


@FSDP1_UNSCALE.by("ampwise", "torch")
def fsdp1_unscale(contender):
    return Outcome(*judge(trained_fsdp1(contender, overflow=[1], path="unscale")))


ALL_OVERFLOW = Case(
    "fsdp1-all-ranks-overflow",
    title="Sharding over processes, fused SGD after unscale_(): all ranks overflow at once",
    why="Fused kernels compare found_inf with 1: two ranks that add theirs up get 2, which no kernel skips for.",
)


@ALL_OVERFLOW.by("ampwise", "torch")
def all_overflow(contender):
    case = {"job": "half+half", "optimizer": "sgd-fused", "overflow": [0, 1], "path": "unscale"}
    return Outcome(*judge(trained_fsdp1(contender, **case)))
