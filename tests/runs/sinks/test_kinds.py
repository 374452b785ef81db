"""Each kind of sink with the real package, offline: what was sent is read back by the package itself."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from ampwise.errors import MissingDependency
from ampwise.finding.strict_json import dumps
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import requested_sinks
from ampwise.runs.sinks.metrics import METRICS, PREFIX, dashboard
from ampwise.runs.sinks.sink_context import SinkContext

from ...night import by_night
from .sink_toys import LOSSES, all_sinks, steps

ROOT = Path(__file__).parents[3]
SENT = {"ampwise/loss": LOSSES, "ampwise/skipped": [0.0] * len(LOSSES), "ampwise/skip_rate": [0.0] * len(LOSSES)}

# In a process of its own: these packages change the process they are in.
BEFORE = """
import json, math, sys
from pathlib import Path
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import requested_sinks
from ampwise.runs.sinks.run_sinks import SinkThreads
from ampwise.finding.strict_json import dumps

found = []

def send(sink, losses, base="runs/first", first=1):
    sinks = begin(sink, base)
    for step, loss in enumerate(losses, first):
        sinks.send(StepRow(step=step, loss=loss))
    sinks.close(120)
    assert not found, found

def begin(sink, base="runs/first"):
    return SinkThreads(requested_sinks([sink], base=Path(base)), found.append)

def answer(value):
    print(dumps(value, indent=None), end="")

LOSSES = [0.5, math.nan, math.inf, -math.inf, 1e-30]
"""


def real_python(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


def run(package, code, folder, python=real_python, **environment):
    """What a script answers; nothing but that may be on stdout."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    home = folder / "home"
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))},
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(home),
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
        **environment,
    }
    done = python("-c", BEFORE + textwrap.dedent(code), cwd=folder, env=environment, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


def same(one, other):
    """The same numbers, a NaN being one; as JSON has them."""
    return repr([float(each) for each in one]) == repr([float(each) for each in other])


# JSON lines


def send(sink, told, base):
    sinks, found = all_sinks(*requested_sinks([sink], base=base))
    for each in told:
        sinks.send(each)
    sinks.close(60)
    assert not found


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_json_lines_are_strict(tmp_path):
    send("jsonl", steps(), tmp_path / "first")
    written = lines(tmp_path / "first.metrics.jsonl")
    assert [line["ampwise/loss"] for line in written] == [0.5, "NaN", "Infinity", "-Infinity", 1e-30]
    for name, values in SENT.items():
        assert same([line[name] for line in written], values)
    assert {line["run"] for line in written} == {"first"}
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5]
    assert all(abs(line["time"] - written[0]["time"]) < 60 for line in written)


def test_json_lines_of_a_run_are_written_anew_and_a_file_of_the_users_is_added_to(tmp_path):
    mine = tmp_path / "logs" / "all.jsonl"
    for base in ("first", "second"):
        send(f"jsonl:{mine}", steps([1.0]), tmp_path / base)
        send("jsonl", steps([1.0]), tmp_path / "again")
    assert [line["run"] for line in lines(mine)] == ["first", "second"]
    assert len(lines(tmp_path / "again.metrics.jsonl")) == 1


def test_a_file_that_cannot_be_written_any_more(tmp_path):
    sinks, found = all_sinks(*requested_sinks([f"jsonl:{tmp_path}/m"], base=tmp_path / "first"))
    (tmp_path / "m").mkdir()
    sinks.send(StepRow(step=1))
    sinks.close(60)
    assert found[0].message.startswith("the sink `jsonl` could not be opened: IsADirectoryError")


# TensorBoard


def test_tensorboard_reads_back_what_was_sent(tmp_path):
    code = """
    send("tensorboard", [9.0])  # an earlier run of this name
    send("tensorboard", LOSSES)
    send("tensorboard:logs/mine", LOSSES)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    read = {}
    for folder in ("runs/first.tensorboard", "logs/mine"):
        events = EventAccumulator(folder).Reload()
        read[folder] = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    (config,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(config.tensor_proto.string_val[0])
    read["charts"] = [[chart.title, list(chart.multiline.tag)] for each in layout.category for chart in each.chart]
    answer(read)
    """
    read = run("tensorboard", code, tmp_path)
    drawn = [pattern for _, patterns in read.pop("charts") for pattern in patterns]
    names = [PREFIX + metric.name for metric in METRICS]
    found = [[name for name in names if re.search(pattern, name)] for pattern in drawn]
    assert found == [[name] for name in dashboard_names()]
    assert sorted(dashboard_names()) == sorted(names)
    for scalars in read.values():
        assert set(scalars) == set(SENT)
        for name, values in SENT.items():
            assert [step for step, _ in scalars[name]] == [1, 2, 3, 4, 5]
            got = [float(value) for _, value in scalars[name]]
            assert same(got[:-1], values[:-1])
            assert got[-1] == pytest.approx(values[-1], rel=1e-6)  # single precision


def dashboard_names():
    return [name for charts in dashboard().values() for names in charts.values() for name in names]


# Weights & Biases


def test_the_workspace_has_every_metric(monkeypatch):
    from ampwise.runs.sinks.kinds.wandb import workspace

    if importlib.util.find_spec("wandb_workspaces") is None:
        with pytest.raises(MissingDependency, match="pip install wandb-workspaces"):
            workspace("team", "project")
    stand_in = SimpleNamespace(Section=dict, LinePlot=dict, Workspace=dict)  # as its documentation says
    package = SimpleNamespace(workspaces=stand_in, reports=SimpleNamespace(v2=stand_in))
    modules = {"": package, ".workspaces": stand_in, ".reports": package.reports, ".reports.v2": stand_in}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"wandb_workspaces{name}", module)
    made = workspace("team", "project")
    panels = [panel for section in made["sections"] for panel in section["panels"]]
    assert [name for panel in panels for name in panel["y"]] == dashboard_names()
    assert {panel["x"] for panel in panels} == {"ampwise/step"}
    assert (made["entity"], made["project"]) == ("team", "project")


# A file of W&B's is seven bytes and then a log as LevelDB has it: blocks of 32 KiB, each of parts that begin with a
# checksum, a length and a kind (1 whole, 2 first, 3 middle, 4 last).
READ_WANDB = """
import struct

def records(data):
    at, begun = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if left < 7 or kind == 0:
            at += left
            continue
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield begun
            begun = b""

def read_wandb():
    import wandb
    from wandb.proto import wandb_internal_pb2
    wandb.teardown()  # until all is on the disk
    runs = {}
    for path in sorted(Path(".").glob("**/*.wandb")):
        rows, about = [], {}
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                about = {"project": record.run.project, "name": record.run.display_name}
            if record.HasField("metric"):
                about.setdefault("axes", {})[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            if record.HasField("exit"):
                about["ended"] = True
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        runs[about["project"]] = {**about, "rows": rows}
    return runs
"""


def rows_with(read, name):
    return [row for row in read["rows"] if name in row]


def test_wandb_alone(tmp_path):
    code = """
    import threading
    send("wandb", LOSSES)
    send("wandb:mine", LOSSES)
    import wandb
    from ampwise.runs.sinks.kinds.wandb import _mode
    left = wandb.run is None and sys.stdout is sys.__stdout__
    answer({"mode": _mode(), "runs": read_wandb(), "left": left})
    """
    (tmp_path / "netrc").touch()
    read = run("wandb", READ_WANDB + textwrap.dedent(code), tmp_path, NETRC=str(tmp_path / "netrc"))
    assert read["mode"] == "offline"  # nobody has logged in
    assert read["left"]
    assert set(read["runs"]) == {"ampwise", "mine"}
    for one in read["runs"].values():
        assert one["name"] == "first"
        assert one["axes"] == {"ampwise/step": "", "ampwise/*": "ampwise/step"}
        assert one["ended"]
        for name, values in SENT.items():
            assert same([row[name] for row in one["rows"]], values)
        assert [row["ampwise/step"] for row in one["rows"]] == [1, 2, 3, 4, 5]


@pytest.mark.nightly
def test_wandb_in_a_script_with_a_run_of_its_own(tmp_path):
    """Its rows, steps and summary are those it would have without us, and ours are in them."""
    code = """
    import time
    import wandb
    theirs = wandb.init(project="theirs", mode="offline", settings=wandb.Settings(silent=True, console="off"))
    sinks = begin("wandb")
    for step in range(10):
        for part in range(3):  # three of ours for one of theirs, and each would count as a step
            sinks.send(StepRow(step=3 * step + part + 1, loss=float(step)))
        delivery = sinks._threads[0]
        while delivery.sent < 3 * (step + 1):
            time.sleep(0.002)
        wandb.log({"accuracy": step / 10}, step=step)
    sinks.close(60)
    assert not found, found
    open_still = wandb.run is theirs
    theirs.finish()
    answer({"runs": read_wandb(), "open": open_still})
    """
    read = run("wandb", READ_WANDB + textwrap.dedent(code), tmp_path, WANDB_MODE="offline")
    assert read["open"]
    assert set(read["runs"]) == {"theirs"}
    rows = read["runs"]["theirs"]["rows"]
    theirs = {row["_step"]: row["accuracy"] for row in rows if "accuracy" in row}
    assert theirs == {step: step / 10 for step in range(10)}
    ours = [(row["ampwise/step"], row["ampwise/loss"]) for row in rows if "ampwise/loss" in row]
    assert len(ours) >= 9
    assert set(ours) <= {(3 * step + 3, float(step)) for step in range(10)}  # always the last of the three
    assert read["runs"]["theirs"]["axes"]["ampwise/*"] == "ampwise/step"


@pytest.mark.nightly
def test_wandb_in_a_script_that_begins_its_run_later_or_ends_it_early(tmp_path):
    code = """
    import time
    import wandb
    quiet = wandb.Settings(silent=True, console="off")
    sinks = begin("wandb")
    sinks.send(StepRow(step=1, loss=1.0))
    while not sinks._threads[0].sent:
        time.sleep(0.01)
    theirs = wandb.init(project="theirs", mode="offline", settings=quiet)
    wandb.log({"accuracy": 0.5})
    sinks.send(StepRow(step=2, loss=2.0))
    sinks.close(60)
    wandb.finish()
    early = begin("wandb")
    theirs = wandb.init(project="early", mode="offline", settings=quiet)
    early.send(StepRow(step=1, loss=1.0))
    while not early._deliveries[0].sent:
        time.sleep(0.01)
    wandb.finish()
    early.send(StepRow(step=2, loss=2.0))
    early.close(60)
    assert not found, found
    answer(read_wandb())
    """
    runs = run("wandb", READ_WANDB + textwrap.dedent(code), tmp_path, WANDB_MODE="offline")
    assert set(runs) == {"ampwise", "theirs", "early"}
    assert [row["ampwise/loss"] for row in runs["ampwise"]["rows"]] == [1.0, 2.0]
    assert [row["accuracy"] for row in rows_with(runs["theirs"], "accuracy")] == [0.5]
    assert not rows_with(runs["theirs"], "ampwise/loss")
    assert [row["ampwise/loss"] for row in rows_with(runs["early"], "ampwise/loss")] == [1.0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({"WANDB_MODE": "disabled"}, "", None),
        # Not silent, it would ask its server for the user's name, to greet; where there is no network, for long.
        ({"WANDB_SILENT": "true"}, f"machine api.wandb.ai login user password {'a' * 40}", None),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, f"machine api.wandb.ai password {'a' * 40}", "offline"),
    ],
    ids=["nobody", "mode", "netrc", "another host"],
)
def test_wandb_is_offline_unless_someone_has_logged_in(environment, netrc, mode, tmp_path):
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    code = "from ampwise.runs.sinks.kinds.wandb import _mode\nanswer(_mode())"
    assert run("wandb", code, tmp_path, NETRC=str(tmp_path / "netrc"), **environment) == mode


# MLflow


READ_MLFLOW = """
def history(client, run_id, *names):
    return {name: [[m.step, m.value] for m in client.get_metric_history(run_id, name)] for name in names}
"""


def test_mlflow_alone_and_in_a_run_of_the_scripts_own(tmp_path):
    names = sorted(SENT)
    code = f"""
    import mlflow
    from mlflow import MlflowClient
    client = MlflowClient(tracking_uri="file:store")
    send("mlflow:file:store", LOSSES)
    (alone,) = client.search_runs([client.get_experiment_by_name("ampwise").experiment_id])
    many = [float(each) for each in range(900)]  # more metrics than a request may have
    send("mlflow:file:store", many, base="runs/many")
    experiment = client.get_experiment_by_name("ampwise").experiment_id
    (long,) = client.search_runs([experiment], "tags.mlflow.runName = 'many'")

    mlflow.set_tracking_uri("file:theirs")
    with mlflow.start_run(run_name="theirs") as theirs:
        mlflow.log_metric("accuracy", 0.5, step=1000)
        send("mlflow", LOSSES)
        open_still = mlflow.active_run().info.run_id == theirs.info.run_id
    known = MlflowClient().search_runs(["0"])
    send("mlflow:mine", LOSSES)
    mine = MlflowClient().get_experiment_by_name("mine").experiment_id
    answer({{
        "alone": history(client, alone.info.run_id, *{names!r}),
        "name": alone.info.run_name,
        "status": alone.info.status,
        "many": history(client, long.info.run_id, "ampwise/loss")["ampwise/loss"],
        "theirs": history(MlflowClient(), theirs.info.run_id, "accuracy", *{names!r}),
        "open": open_still,
        "runs": [each.info.run_name for each in known],
        "mine": len(MlflowClient().search_runs([mine])),
    }})
    """
    read = run("mlflow", READ_MLFLOW + textwrap.dedent(code), tmp_path, MLFLOW_ALLOW_FILE_STORE="true")
    assert (read["name"], read["status"]) == ("first", "FINISHED")
    assert read["many"] == [[step, step - 1.0] for step in range(1, 901)]
    assert read["open"]
    assert read["runs"] == ["theirs"]
    assert read["mine"] == 1
    assert read["theirs"].pop("accuracy") == [[1000, 0.5]]
    for metrics in (read["alone"], read["theirs"]):
        for name, values in SENT.items():
            assert [step for step, _ in metrics[name]] == [1, 2, 3, 4, 5]
            assert same([value for _, value in metrics[name]], values)


@pytest.mark.parametrize(
    ("target", "place"),
    [
        (None, (None, "ampwise")),
        ("my experiment", (None, "my experiment")),
        ("http://localhost:5000", ("http://localhost:5000", "ampwise")),
        ("file:store", ("file:///home/me/store", "ampwise")),
        ("file:///store", ("file:///store", "ampwise")),
        ("./store", ("file:///home/me/store", "ampwise")),
        ("my/store", ("file:///home/me/my/store", "ampwise")),
        ("/store", ("file:///store", "ampwise")),
        ("sqlite:///my.db", ("sqlite:///my.db", "ampwise")),
        ("databricks", ("databricks", "ampwise")),
    ],
)
def test_what_the_target_of_mlflow_means(target, place, monkeypatch):
    from ampwise.runs.sinks.kinds.mlflow import _uri_and_experiment

    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    assert _uri_and_experiment(SinkContext(base=Path("/home/me/run"), target=target, folder=Path("/home/me"))) == place


# trackio


def test_trackio_alone_and_in_a_run_of_the_scripts_own(tmp_path):
    code = """
    import contextlib, io
    import trackio
    from trackio.sqlite_storage import SQLiteStorage
    send("trackio", LOSSES)
    send("trackio:mine", LOSSES)
    with contextlib.redirect_stdout(io.StringIO()):  # the script's own prints
        theirs = trackio.init(project="theirs", name="their-run", auto_log_cpu=False)
    trackio.log({"accuracy": 0.25})
    send("trackio", LOSSES, first=50)
    trackio.log({"accuracy": 0.5})
    counter, current = theirs._next_step, trackio.context_vars.current_run.get() is theirs
    with contextlib.redirect_stdout(io.StringIO()):
        trackio.finish()
    answer({
        "runs": {project: SQLiteStorage.get_runs(project) for project in ("ampwise", "mine", "theirs")},
        "ampwise": SQLiteStorage.get_logs("ampwise", "first"),
        "mine": SQLiteStorage.get_logs("mine", "first"),
        "theirs": SQLiteStorage.get_logs("theirs", "their-run"),
        "counter": counter,
        "current": current,
    })
    """
    read = run("trackio", code, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    assert read["runs"] == {"ampwise": ["first"], "mine": ["first"], "theirs": ["their-run"]}
    assert read["counter"] == 2
    assert read["current"]
    theirs = read["theirs"]
    assert [(row["step"], row["accuracy"]) for row in theirs if "accuracy" in row] == [(0, 0.25), (1, 0.5)]
    for rows, first in ((read["ampwise"], 1), (read["mine"], 1), (theirs, 50)):
        ours = [row for row in rows if "ampwise/loss" in row]
        assert [row["step"] for row in ours] == list(range(first, first + 5))
        for name, values in SENT.items():
            assert same([row[name] for row in ours], values)


# What a script draws by chance

DRAWN = """
import http.server, random, threading, time
import numpy, torch
from ampwise import Engine, Sinks

asked = []

class Away(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_POST = do_GET
    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Away)
threading.Thread(target=server.serve_forever, daemon=True).start()
random.seed(7); numpy.random.seed(7); torch.manual_seed(7)

def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

def same_after(sink):
    before = states()
    model = torch.nn.utils.skip_init(torch.nn.Linear, 4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32", callbacks=[Sinks(sink)])
    loaded = set(sys.modules)
    for _ in range(3):
        engine.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
    if "http" in sink:
        while len(asked) < 4:  # the first try, and three more with a little chance in between
            time.sleep(0.05)
    else:
        engine.close()
    return states() == before
"""


@pytest.mark.parametrize(
    ("kind", "target"),
    [("tensorboard", "tb"), ("mlflow", "http"), *by_night(("trackio", "p"), ("wandb", "p"), ("mlflow", "./store"))],
)
def test_a_sink_draws_nothing_from_the_scripts_generators(kind, target, warm, tmp_path):
    address = "http://127.0.0.1:{server.server_port}" if target == "http" else target
    code = f"""
    same = same_after(f"{kind}:{address}")
    print(json.dumps(same), flush=True)
    import os
    os._exit(0)  # what is tried again is not waited for
    """
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    retries = {"MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0", "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0.5"}
    assert run(kind, DRAWN + textwrap.dedent(code), tmp_path, warm.run, **places, **retries) is True


@pytest.mark.nightly
def test_a_folder_needs_no_leave_of_mlflow_and_gives_none_to_the_script(tmp_path):
    code = """
    import os
    send("mlflow:./store", [1.0, 2.0])
    left = os.environ.get("MLFLOW_ALLOW_FILE_STORE")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient
    client = MlflowClient(tracking_uri=Path("store").resolve().as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("ampwise").experiment_id])
    answer([left, found.data.metrics["ampwise/loss"]])
    """
    assert run("mlflow", code, tmp_path) == [None, 2.0]


def test_dumps_is_what_the_answers_are_read_by():
    assert json.loads(dumps([math.nan], indent=None)) == ["NaN"]
