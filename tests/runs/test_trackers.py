"""Trackers: what each wrote, read back by its own means, is the run's history; and none ends a run."""

import csv
import io
import json
import struct
import time
from importlib import util
from pathlib import Path

import numpy as np
import pytest

import selffl
from selffl.errors import CheckpointError, ConfigError, DivergedError
from selffl.runs import trackers as tracking
from selffl.runs.trackers import TRACKERS, Tracker

OPTIONS = {"rounds": 6, "participation": 0.5, "evaluate_every": 2}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """In a folder of its own, whatever the environment says."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that what the trackers set is taken back
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def fed():
    rng = np.random.default_rng(0)
    client = np.repeat([f"ward {m}" for m in range(4)], 20)
    return selffl.Federation.from_arrays(rng.normal(size=(80, 3)), rng.integers(0, 2, 80), client, 0.25)


def curves(history):
    """Column: {round: value}, of what a round has."""
    names = [name for name in history[0] if name != "round"]
    found = {name: {row["round"]: row[name] for row in history if row[name] is not None} for name in names}
    return {name: points for name, points in found.items() if points}


class Note:
    """A tracker of the user's own."""

    def __init__(self):
        self.news = []

    def begin(self, config, folder):
        self.news.append(("begin", config["algorithm"], folder))

    def log(self, row):
        self.news.append(("log", row))

    def end(self, summary, clients):
        self.news.append(("end", summary, clients))


class Faulty(Note):
    """One that fails, in one place."""

    def __init__(self, where):
        super().__init__()
        setattr(self, where, self.fail)

    def fail(self, *news):
        self.news.append("failed")
        raise OSError("the disk is\nfull")


# --------------------------------------------------------------------------------------------------------- one's own


def test_an_object_is_told_of_everything(fed, tmp_path):
    note, other, rows = Note(), Note(), []
    run = selffl.train(
        "softmax", fed, "ditto", tracker=[note, other], out=tmp_path / "run", on_round=rows.append, **OPTIONS
    )
    assert isinstance(note, Tracker)
    assert note.news == other.news
    assert note.news[0] == ("begin", "ditto", tmp_path / "run")
    assert [news for kind, *news in note.news if kind == "log"] == [[row] for row in run.history]
    assert note.news[-1] == ("end", run.summary, run.clients)
    assert run.summary["status"] == "finished"
    assert rows == run.history
    assert not (tmp_path / "run" / tracking.FILE).exists()


@pytest.mark.parametrize("where", ["begin", "log", "end"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(where, fed):
    faulty, note = Faulty(where), Note()
    reason = rf"the tracker Faulty failed in {where} \(the disk is full\); the run continues without it"
    with pytest.warns(UserWarning, match=reason) as said:
        run = selffl.train("softmax", fed, "ditto", tracker=[faulty, note], **OPTIONS)
    assert len(said) == 1
    assert faulty.news.count("failed") == 1
    assert [news for kind, *news in note.news if kind == "log"] == [[row] for row in run.history]
    without = selffl.train("softmax", fed, "ditto", **OPTIONS)
    assert [row["weighted_accuracy"] for row in run.history] == [row["weighted_accuracy"] for row in without.history]


def test_trackers_are_told_when_a_run_stops_or_diverges(fed):
    def interrupt(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    note = Note()
    with pytest.raises(KeyboardInterrupt):
        selffl.train("softmax", fed, "ditto", tracker=note, on_round=interrupt, **OPTIONS)
    assert note.news[-1][1]["status"] == "stopped"
    assert [row["round"] for kind, row, *_ in note.news if kind == "log"] == [1, 2, 3]
    note = Note()
    with pytest.raises(DivergedError):
        selffl.train("softmax", fed, selffl.algorithm("ditto", penalty=100.0), tracker=note, rounds=40)
    assert note.news[-1][1]["status"] == "diverged"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("tensorbord", r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        (7, r"tracker is 7; expected 'tensorboard', 'mlflow', 'wandb', or an object with begin, log and end"),
        (Note, r"expected 'tensorboard', 'mlflow', 'wandb', or an object"),
        (["mlflow", "x"], r"unknown tracker 'x'"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_is_written(choice, reason, fed, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        selffl.train("softmax", fed, "ditto", tracker=choice, out=tmp_path / "run", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_missing_is_named_with_its_extra(name, fed, monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "find_spec", lambda wanted: None if wanted == name else util.find_spec(wanted))
    with pytest.raises(ConfigError, match=rf"wants the package {name}, which is not here: .*'selffl\[{name}\]'"):
        selffl.train("softmax", fed, "ditto", tracker=name, **OPTIONS)
    run = tmp_path / "run"
    selffl.train("softmax", fed, "ditto", out=run, **OPTIONS)
    (run / tracking.FILE).write_text(json.dumps({name: {}}), encoding="utf-8")
    with pytest.warns(UserWarning, match=rf"'selffl\[{name}\]'\. The run continues without it"):
        assert selffl.resume(run, rounds=8).summary["status"] == "finished"
    (run / tracking.FILE).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"trackers\.json is damaged"):
        selffl.resume(run, rounds=9)


# -------------------------------------------------------------------------------------------- read back by their own


class OfTensorBoard:
    """What lies in event files."""

    name = "tensorboard"

    def __init__(self, folder):
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        self.found = reading.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        self.found.Reload()

    @staticmethod
    def place(out):
        return out / "tensorboard"

    def curves(self):
        return {
            name: {event.step: event.value for event in self.found.Scalars(name)}
            for name in self.found.Tags()["scalars"]
        }

    def check(self, run):
        text = self.found.Tensors("summary/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert json.loads(text.strip("`\n")) == run.summary
        config = self.found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
        assert json.loads(config.strip("`\n"))["learning_rate"] == run.config.learning_rate
        assert [event.step for event in self.found.Scalars("clients")] == [row["round"] for row in run.history]
        spread = self.found.Histograms("clients/accuracy")[-1].histogram_value
        values = [row["accuracy"] for row in run.clients]
        assert (spread.num, spread.min, spread.max) == (len(values), min(values), max(values))

    def num_runs(self):
        return 1


class OfMLflow:
    """What MLflow's client finds."""

    name = "mlflow"

    def __init__(self, folder):
        client = pytest.importorskip("mlflow.tracking").MlflowClient
        self.client = client(tracking_uri=folder.as_uri())
        experiment = self.client.get_experiment_by_name("selffl")
        self.runs = self.client.search_runs([experiment.experiment_id])
        self.run = self.runs[0]

    @staticmethod
    def place(out):
        return out / "mlflow"

    def curves(self):
        return {
            name: {point.step: point.value for point in self.client.get_metric_history(self.run.info.run_id, name)}
            for name in self.run.data.metrics
        }

    def check(self, run):
        assert self.run.info.status == "FINISHED"
        assert self.run.info.run_name == "ditto on arrays, seed 0"
        assert self.run.data.params["learning_rate"] == str(run.config.learning_rate)
        assert self.run.data.params["options.num_local_steps"] == "20"
        points = self.client.get_metric_history(self.run.info.run_id, "clients")
        assert [point.step for point in points] == [row["round"] for row in run.history]  # each once
        folder = Path(self.run.info.artifact_uri.removeprefix("file://"))
        assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == run.summary
        table = list(csv.DictReader(io.StringIO((folder / "clients.csv").read_text(encoding="utf-8"))))
        assert [row["client"] for row in table] == [row["client"] for row in run.clients]
        assert [float(row["accuracy"]) for row in table] == [row["accuracy"] for row in run.clients]

    def num_runs(self):
        return len(self.runs)


class OfWandB:
    """What lies in the files of offline runs: a log as LevelDB has it, of wandb's own messages."""

    name = "wandb"

    def __init__(self, folder):
        self.message = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
        self.files = sorted(folder.glob("offline-run-*/*.wandb"))
        self.records = [record for file in self.files for record in self.whole(file)]

    def whole(self, file):
        """All records of a file, once the process that writes it has written the last."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            records = [self.message.FromString(content) for content in self.contents(file.read_bytes())]
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                return records
            time.sleep(0.05)
        pytest.fail(f"{file} has no end")

    @staticmethod
    def contents(log):
        """Records, put together from blocks of 32 KiB: sum, length, and whether it is whole, or where it belongs."""
        place, whole = 7, b""
        while place + 7 <= len(log):
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", log[place : place + 7])
            whole += log[place + 7 : place + 7 + length]
            place += 7 + length
            if place > len(log):  # it is still being written
                return
            if kind in (1, 4):
                yield whole
                whole = b""

    @staticmethod
    def place(out):
        return out / "wandb"

    def curves(self):
        found = {}
        for record in self.records:
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name, *inner = [item.key] if item.key else item.nested_key
                    if not name.startswith("_") and not inner:  # a table is nested
                        found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
        return found

    def check(self, run):
        begun = [record.run for record in self.records if record.WhichOneof("record_type") == "run"]
        assert {(each.project, each.display_name) for each in begun} == {("selffl", "ditto on arrays, seed 0")}
        config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
        assert config["learning_rate"] == run.config.learning_rate
        summary = {}
        for record in self.records:
            if record.WhichOneof("record_type") == "summary":
                summary |= {
                    item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update
                }
        assert {name: summary[name] for name in run.summary} == run.summary
        (table,) = self.files[-1].parent.glob("files/media/table/*.json")
        content = json.loads(table.read_text(encoding="utf-8"))
        where = content["columns"].index("accuracy")
        assert {row[0]: row[where] for row in content["data"]} == {
            row["client"]: row["accuracy"] for row in run.clients
        }

    def num_runs(self):
        return len({record.run.run_id for record in self.records if record.WhichOneof("record_type") == "run"})


readers = pytest.mark.parametrize("reader", [OfTensorBoard, OfMLflow, OfWandB], ids=lambda reader: reader.name)


def agree(found, history):
    expected = curves(history)
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert found[name] == pytest.approx(points, rel=1e-6), name


@readers
@pytest.mark.slow
def test_what_was_written_is_the_history(reader, fed, tmp_path):
    run = selffl.train("softmax", fed, "ditto", tracker=reader.name, out=tmp_path / "run", **OPTIONS)
    found = reader(reader.place(tmp_path / "run"))
    agree(found.curves(), run.history)
    found.check(run)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # and nothing elsewhere


@readers
@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_in_the_tracked_run(reader, fed, tmp_path):
    def interrupt(row):
        if row["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selffl.train(
            "softmax",
            fed,
            "ditto",
            tracker=reader.name,
            out=tmp_path / "run",
            checkpoint_every=3,
            on_round=interrupt,
            **OPTIONS,
        )
    if reader is OfMLflow:
        assert reader(reader.place(tmp_path / "run")).run.info.status == "KILLED"
    run = selffl.resume(tmp_path / "run")
    found = reader(reader.place(tmp_path / "run"))
    whole = [{name: value for name, value in row.items() if name != "seconds"} for row in run.history]
    assert [row["round"] for row in whole] == [1, 2, 3, 4, 5, 6]
    agree({name: points for name, points in found.curves().items() if name != "seconds"}, whole)
    found.check(run)
    assert found.num_runs() == 1


@readers
@pytest.mark.slow
def test_without_a_folder_files_lie_where_each_has_them(reader, fed, tmp_path):
    run = selffl.train("softmax", fed, "ditto", tracker=reader.name, **OPTIONS)
    name = {"tensorboard": "runs", "mlflow": "mlruns", "wandb": "wandb"}[reader.name]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    inner = next((tmp_path / name).iterdir()) if reader is OfTensorBoard else tmp_path / name
    agree(reader(inner).curves(), run.history)


@pytest.mark.slow
def test_all_three_at_once_and_mlflow_where_the_environment_says(fed, tmp_path, monkeypatch):
    for name in TRACKERS:
        pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = selffl.train("softmax", fed, "ditto", tracker=list(TRACKERS), out=tmp_path / "run", **OPTIONS)
    for reader, place in (
        (OfTensorBoard, tmp_path / "run" / "tensorboard"),
        (OfMLflow, tmp_path / "elsewhere"),
        (OfWandB, tmp_path / "run" / "wandb"),
    ):
        agree(reader(place).curves(), run.history)
    assert json.loads((tmp_path / "run" / tracking.FILE).read_text(encoding="utf-8")).keys() == TRACKERS.keys()
