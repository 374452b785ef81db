"""The laws of what ampwise exchanges and writes are what ranks are seen to do, to the last byte."""

import json
import math
import pickle
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from benchmarks.scale import counts, here
from benchmarks.scale.__main__ import FIGURE
from benchmarks.scale.check import checked
from benchmarks.scale.costs import costs
from benchmarks.scale.machine import CLUSTER, Machine, hops
from benchmarks.scale.measured import be_the_first, pieces
from benchmarks.scale.models import MODELS, Model, model_of, piece_rows
from benchmarks.scale.picture import picture
from benchmarks.scale.simulation import MOST_RANKS, Setting, fewest, limits
from benchmarks.scale.tables import checkpoint, limit, step
from benchmarks.scale.words import byte_words, number_words, time_words
from hypothesis import given
from hypothesis import strategies as st

from ampwise.guard.disk.manifest import LARGEST_MANIFEST
from ampwise.tune.advise.model import parse_count
from ampwise.tune.memory.decoder import Decoder, decoder_shape

from ..for_each import for_each
from ..night import by_night

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LOADED = [
    *("ampwise.guard.guard", "ampwise.guard.disk.writing", "ampwise.trace.diagnosis", "ampwise.watch.watch"),
    *("torch.distributed.fsdp", "torch.nn.parallel"),
]


# --- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.skipif(not dist.is_available() or not Path("/proc/self/fd").exists(), reason="needs gloo, fork and /proc")
@pytest.mark.parametrize("ranks", [2, *by_night(3)])
def test_ranks_exchange_and_write_what_the_laws_say(warm, tmp_path, ranks):
    words = ("-m", "benchmarks.scale.ranks", str(ranks), str(tmp_path / "ranks"))
    done = warm.run(*words, cwd=ROOT, timeout=200, loaded=LOADED)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    held = {what: each for what, each in checked(said) if _is_ours(what)}
    assert {what: each.seen for what, each in held.items()} == {what: each.by_law for what, each in held.items()}
    assert len(said) == ranks
    assert held["a checkpoint: files"].seen == 2 * ranks + 2  # and no law is empty
    assert held["a step, FSDP2"].shown == "24 bytes"


def _is_ours(what):
    """How a gloo group is made is torch's own, and known of the version that was seen."""
    return not what.startswith("a gloo group") or torch.__version__ == result("scale_counts")["versions"]["torch"]


def test_a_law_that_is_broken_is_seen():
    said = [_seen(0), _seen(1)]
    assert all(each.seen == each.by_law for _, each in checked(said))
    said[1]["sharded"] = [["all_reduce", 24, "model"], ["all_reduce", 8, "model"]]
    said[0]["guarded"]["save_operations"]["fsync"] += 1
    broken = {what: each for what, each in checked(said) if each.seen != each.by_law}
    assert set(broken) == {"a step, FSDP2", "a checkpoint: fsyncs", "a checkpoint: names made, renamed, opened"}
    assert broken["a step, FSDP2"].shown == "24 and 8 bytes"
    assert broken["a checkpoint: fsyncs"].shown == "11"


def _seen(rank):
    """What one of two ranks says where all is as the laws have it."""
    ours = Model((("0.weight", (12, 8)), ("0.bias", (12,)), ("2.weight", (5, 12)), ("2.bias", (5,))))
    sizes = {0: (2300, 23951), 1: (2528, 23956)}
    files = dict.fromkeys(("checkpoint.json", "checkpoint.sha256"), 1)
    for number, (tensors, plain) in sizes.items():
        files |= {f"tensors-{number:05d}.safetensors": tensors, f"plain-{number:05d}.json": plain}
    return {
        "copied": [],
        "sharded": _told(counts.step(sharded=True)),
        "weighed": _told(counts.step(sharded=True, weighed=True)),
        "scales": _told(counts.step(fp8_layers=5)),
        "explained": _told(counts.explained()),
        "guarded": {
            "groups": 3,
            "begin": _told(counts.begin_of_guard()),
            "step": _told(counts.step(sharded=True, guarded=True)),
            "save": _told(counts.save()),
            "save_by_gloo": 12,
            "save_operations": counts.operations(first=rank == 0),
            "files": files,
            "manifest": {"files": counts.files_bytes(sizes), "tensors": ours.manifest_bytes(2)},
            "pieces": ours.pieces(2),
            "tensor_bytes": ours.bytes(),
        },
        "resumed": {"read": 2, "again": 0},
        "group": {"descriptors": 5, "calls": {"set": 1, "get": 2}, "bytes": {"set": 170, "get": 340}},
        "watched": {"exchanges": [], "files": dict.fromkeys("abcd", 1), "create_operations": {"fsync": 2}},
    }


def _told(collectives):
    return [[kind, 77 if size is None else size, group] for kind, size, group in collectives]


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["124M", "70B"])
def test_a_model_is_the_one_that_ampwise_memory_takes(size):
    shape = decoder_shape(parse_count(size), {})
    with torch.device("meta"):
        built = Decoder(shape)
    assert dict(model_of(shape).tensors) == {name: tuple(each.shape) for name, each in built.named_parameters()}
    assert MODELS[size].parameters == shape.parameters
    assert MODELS[size].linear == sum(isinstance(each, torch.nn.Linear) for each in built.modules())
    assert MODELS[size].bytes() == 12 * shape.parameters + 4 * len(MODELS[size].tensors)


@given(st.integers(1, 300), st.integers(1, 40))
def test_rows_are_cut_as_torch_cuts_them(rows, ranks):
    parts = torch.arange(rows).chunk(ranks)
    assert list(piece_rows(rows, ranks)) == [(int(part[0]), len(part)) for part in parts]


@pytest.mark.nightly
@given(
    st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3),
    st.integers(1, 130),
)
def test_a_manifest_has_the_length_and_the_pieces_of_the_law(shapes, ranks):
    model = Model(tuple((f"blocks.{place}.weight", shape) for place, shape in enumerate(shapes)))
    made = pieces(model, ranks)
    manifest = json.loads(be_the_first([pickle.dumps(each) for each in made]).text())
    assert len(json.dumps(manifest["tensors"])) == model.manifest_bytes(ranks)
    assert sum(len(tensor["pieces"]) for tensor in manifest["tensors"].values()) == model.pieces(ranks)
    assert sum(map(len, made)) == model.items(ranks, ranks)
    assert len(json.dumps(manifest["files"])) == counts.files_bytes(dict.fromkeys(range(ranks), (1, 1)))


def test_copies_bring_their_plans_too_and_are_written_once():
    model = MODELS["124M"]
    assert model.items(8, 64) == 8 * (model.pieces(8) - len(model.tensors)) + 64 * len(model.tensors)
    assert Setting(model=model, ranks=64, shards=8).pieces == model.pieces(8)


# --- exchanges -----------------------------------------------------------------------------------------------------


def test_exchanges_take_the_steps_of_their_algorithms():
    class Plain(Machine):
        tcp_s, message_s, tcp = 1.0, 0.5, 10.0  # of which every step shows

    machine = Plain()
    assert machine.all_reduce_s(4, 40) == 6 * (1 + 1)  # twice around, a fourth of the bytes at a time
    assert machine.all_gather_s(4, 40) == 3 * (1 + 4)
    assert machine.gather_s(4, 40) == 1 + 3 * (0.5 + 4)
    assert machine.broadcast_s(5, 40) == 3 * (1 + 4)
    assert {machine.exchange_s(kind, 1, 40) for kind in ("all_reduce", "all_gather", "gather", "broadcast")} == {0.0}
    assert CLUSTER.device_all_reduce_s(1, 24) == 0.0
    assert [hops(count) for count in (1, 2, 3, 8, 9)] == [0, 1, 2, 3, 4]


def test_a_device_goes_through_its_node_and_then_through_the_network():
    inside, outside = (CLUSTER.device_all_reduce_s(ranks, 0) for ranks in (8, 16))
    assert inside == pytest.approx(CLUSTER.launch_s + 6 * CLUSTER.nvlink_s)
    assert outside == pytest.approx(inside + 2 * CLUSTER.network_s)


@given(st.floats(1, 1e4), st.floats(1e-5, 1))
def test_latency_and_bandwidth_are_found_again(latency, per_byte):
    bare = {
        ranks: {size: here.ring_us(ranks, size, latency, per_byte) for size in (here.SMALL, here.LARGE)}
        for ranks in here.FITTED
    }
    found = here.fitted(bare)
    assert found[1] == pytest.approx(per_byte)
    # What the small message itself takes is in the latency.
    assert found[0] == pytest.approx(latency + here.SMALL * per_byte)


def test_every_number_says_where_it_is_from():
    known = CLUSTER.every()
    assert len(known) > 30
    assert {each.basis for each in known.values()} == {"datasheet", "assumed", "measured here"}
    assert all(each > 0 and each.what for each in known.values())
    published = {row[0]: row for row in result("scale_machine")["rows"]}
    assert set(published) == set(known)
    for name, each in known.items():
        assert published[name][2:4] == [number_words(each, each.unit), each.basis]
        assert (published[name][4] != "–") == (each.basis == "measured here"), name


# --- where it ends -------------------------------------------------------------------------------------------------


def test_the_fewest_ranks_are_those_that_looking_at_all_finds():
    for model in (MODELS["7B"], MODELS["405B"]):
        breaks = limits()[0].breaks
        found = fewest(lambda ranks, model=model: Setting(model=model, ranks=ranks), breaks)
        every = [ranks for ranks in range(1, 600) if breaks(Setting(model=model, ranks=ranks))]
        assert every == list(range(found, 600))
    assert Setting(model=MODELS["7B"], ranks=512).manifest_bytes > LARGEST_MANIFEST
    assert fewest(lambda ranks: Setting(model=MODELS["124M"], ranks=ranks), lambda each: False) is None
    assert fewest(lambda ranks: Setting(model=MODELS["124M"], ranks=ranks), lambda each: True, 5) == 5


@for_each("name", MODELS)
def test_what_does_not_do_with_some_ranks_does_not_do_with_more(name):
    powers = [2**exponent for exponent in range(int(math.log2(MOST_RANKS)) + 1)]
    for each in limits():
        found = [each.breaks(Setting(model=MODELS[name], ranks=ranks)) for ranks in powers]
        assert found == sorted(found), each.what


def test_where_in_the_code_is_a_file_and_a_name_in_it():
    places = [row[-1] for row in costs().rows] + [each.where for each in limits()]
    for place in (part.strip() for whole in places for part in whole.split(";")):
        file, _, name = place.partition(", ")
        assert name.rpartition(".")[2] in (ROOT / "src" / "ampwise" / file).read_text(), place


# --- what is published ---------------------------------------------------------------------------------------------


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@for_each("part", [costs, step, checkpoint, limit])
def test_the_published_tables_are_those_of_the_simulation(part):
    made = part()
    found = result(made.name)
    assert (found["columns"], found["rows"]) == (made.columns, made.rows), "run: make bench NAME=scale"


def test_the_published_counts_are_as_the_laws_say():
    found = result("scale_counts")
    assert [row[-1] for row in found["rows"]] == ["yes"] * 25
    assert [row[1] for row in found["rows"]] == [each.law for _, each in checked([_seen(0), _seen(1)])]


def test_the_picture_is_drawn_and_current():
    text = FIGURE.read_text(encoding="utf-8")
    assert text == picture(), "run: make bench NAME=scale"
    drawn = ElementTree.fromstring(text)
    words = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"the engine's", "the guard's exchange", "first rank merges", "16,384", "10 µs"} <= set(words)
    assert not any(name in text for name in ("http://www.w3.org/1999/xlink", "<script", "url("))


def test_numbers_are_reported_in_their_units():
    assert [time_words(each) for each in (0.0, 2.4e-4, 0.983, 47.2, 8000)] == ["–", "240 µs", "983 ms", "47 s", "2.2 h"]
    assert [byte_words(each) for each in (71, 12.4e9, 1.5e12)] == ["71 B", "12 GB", "1.5 TB"]
    assert [number_words(each, unit) for each, unit in ((0.4, ""), (989.4e12, "FLOP/s"), (5e10, "bytes/s"))] == [
        "0.4",
        "989 TFLOP/s",
        "50 GB/s",
    ]
