"""Random texts that act on a terminal, at random places of what is read: none of them acts."""

import json
import random
import shutil

import pytest

from ampwise.guard.disk.manifest import MANIFEST

from ..hostile import TRAIN, acting, capsule, checkpoints, leaves, record, resealed, shown
from .effort import rounds

PARTS = [
    *(
        "\x1b[2J",
        "\x1b[4;35m",
        "\x1b[1;31m",
        "\x1b]0;t\x07",
        "\x1b]8;;file:///x\x1b\\",
        "\x1bP+q\x1b\\",
        "\x1bc",
        "\x1b",
    ),
    *map(chr, (*range(1, 32), *range(0x7F, 0xA0))),
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u200b\u200d\ufeff\u2028\u2029\xad",
    *(
        "\U000e0041",
        "\u3164",
        "\ue000",
        "[red]",
        "[link=file:///x]",
        ":bomb:",
        "{}",
        "%s",
        "\nampwise: forged",
        "a",
        "größe",
    ),
]


def text(chance):
    """In a name of a file as well: no slash, no NUL, not too long."""
    return "x" + "".join(chance.choices(PARTS, k=chance.randint(1, 8))).replace("/", "")


def put(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def changed(folder, file, number, chance):
    """A copy with such a text in the place of something in a file of JSON, or after it."""
    other = folder.with_name(f"{number}{text(chance)}")
    shutil.copytree(folder, other)
    data = json.loads((other / file).read_text())
    put(data, chance.choice(list(leaves(data))), chance.choice([text(chance), {text(chance): text(chance)}]))
    (other / file).write_text(json.dumps(data))
    return other


@pytest.mark.nightly
def test_whatever_is_read(warm, tmp_path):
    chance = random.Random()
    seed = chance.randrange(2**32)
    chance.seed(seed)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    kept = record(tmp_path / "record", text(chance))
    saved = capsule(tmp_path / "capsules", text(chance))
    guarded = checkpoints(tmp_path / "guarded", text(chance))
    for number in range(rounds(1, 15)):
        cases = []
        for each in range(5):
            file = chance.choice(["manifest.json", "findings.json"])
            other = str(changed(kept, file, f"r{number}-{each}", chance))
            cases += [{"words": ["report", other]}, {"words": ["watch", "--once", other]}]
            cases += [{"words": ["replay", str(resealed(changed(saved, "capsule.json", f"c{number}-{each}", chance)))]}]
            cases += [{"words": [chance.choice(["check", "explain", "gpu", "run", text(chance)]), text(chance)]}]
        home = tmp_path / f"g{number}{text(chance)}"
        shutil.copytree(guarded, home)
        changed(home / "step-00000100", MANIFEST, number, chance)
        cases += [{"words": ["checkpoints", str(home)]}, {"words": ["checkpoints", "-v", str(home)]}]
        told = shown(warm, cases, tmp_path)
        assert len(told) >= len(cases), seed
        assert not [(seed, words, act) for words, _, data in told if (act := acting(data))]
