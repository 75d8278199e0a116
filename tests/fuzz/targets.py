"""Everything that reads bytes from elsewhere, one function each: it reads, or refuses in the package's own one line.

A finding is any other error, a message of several lines, or of an unbounded length.  `fuzz.py` looks for them;
`test_fuzz_cases.py` replays what it has found.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import selffl
from selffl.cli.training import settle
from selffl.data.cifar10 import read_batch
from selffl.data.estimates import read_estimates
from selffl.data.federation import Federation
from selffl.data.mnist import read_idx
from selffl.data.preparation import Preparation
from selffl.data.sent140 import read_tweets
from selffl.data.text import read_original
from selffl.engines.cohort import RunState
from selffl.engines.flower.memory import ClientMemory, Start
from selffl.errors import SelfFLError
from selffl.models.layers import build_layers, describe_layers
from selffl.reports import page, svg
from selffl.reports.collect import collect
from selffl.reports.record import load_studies
from selffl.runs import folder as files
from selffl.runs.predict import read_rows
from selffl.runs.recipe import check_settings
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.studies.own import read_study
from selffl.studies.problems import PROBLEMS

FOLDERS = Path(__file__).parents[1] / "runs" / "folders" / "859c796"
RUN_FILES = (files.HISTORY, files.PARTICIPATION, files.CLIENTS, files.SUMMARY, files.CONFIG, "partition.csv")
MOST_CHARACTERS = 4_000  # of a message


class Target(NamedTuple):
    """A parser, and inputs to begin with."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


class FoundError(Exception):
    """A refusal that is not one line."""


def check(target: Target, content: bytes) -> bool:
    """Whether the target took ``content``; anything but its own one-line refusal is raised."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return refusal_of(lambda: target.read(content)) is None


def refusal_of(read: Callable[[], object]) -> SelfFLError | None:
    """The package's own one-line error, if that is what comes of it."""
    try:
        read()
    except SelfFLError as error:
        text = str(error)
        if len(text.splitlines()) != 1 or len(text) > MOST_CHARACTERS:
            raise FoundError(f"{type(error).__name__} of {len(text)} characters: {text[:300]!r}") from error
        return error
    return None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, in memory where there is room for that."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def by_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """A parser of a file of that name."""

    def parsed(content: bytes) -> object:
        with folder() as place:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
            return read(place / name)

    return parsed


def by_folder(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """A parser of a folder that holds a file of that name."""
    return by_file(lambda path: read(path.parents[name.count("/")]), name)


def by_first_byte(*readers: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """The parser that the first byte says, of all others."""
    return lambda content: readers[content[0] % len(readers) if content else 0](content[1:])


# ------------------------------------------------------------------------------------------------------- what is read


def read_settings(content: bytes) -> object:
    """Lines of ``--set``, the first of which names a method."""
    name, *settings = content.decode("utf-8", "replace").splitlines() or [""]
    problem, options = settle(PROBLEMS["digits"](), name, settings)
    problem.method(name, **options)
    return check_settings(problem.settings)


@cache
def run_folder() -> dict[str, bytes]:
    """The files of a run, by name."""
    return {path.name: path.read_bytes() for path in (FOLDERS / "table").iterdir() if path.name in RUN_FILES}


def read_run(content: bytes, draws: bool = False) -> object:
    """A run's folder in which one file, by the first byte, is another."""
    with folder() as place:
        for name, known in run_folder().items():
            (place / name).write_bytes(known)
        (place / RUN_FILES[content[0] % len(RUN_FILES) if content else 0]).write_bytes(content[1:])
        if draws:
            return page.render(collect([place]))
        files.read_config(place)
        return files.read_records(place)


def read_study_folder(path: Path) -> object:
    """The records of a study, and its page."""
    return load_studies(path)


def read_memory(content: bytes) -> object:
    """A client's memory whose header is this JSON, under a checksum that is right."""
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(about, dict):
        return None
    newcomer = selffl.algorithm("ditto").newcomer(torch.zeros(1, 3))
    with folder() as place:
        memory = ClientMemory(place, "x", "a", newcomer, "r")
        memory.keep(1, Start(newcomer, 0), newcomer)
        tensors, _ = load_tensors(memory.path)
        save_tensors(memory.path, tensors, about)
        return memory.before(10**9)


def read_state(content: bytes) -> object:
    """A checkpoint whose header is this JSON, under a checksum that is right."""
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(about, dict):
        return None
    method, params = selffl.algorithm("ditto"), torch.zeros(3)
    counts = torch.zeros(2, dtype=torch.int64)
    state = RunState(0, params, method.newcomer(torch.zeros(2, 3)), counts, counts)
    with folder() as place:
        tensors = {"memory.params": torch.zeros(2, 3), "memory.clock": torch.zeros(2), "server": params}
        save_tensors(place / files.CHECKPOINT, tensors | {"num_gradients": counts, "num_rounds": counts}, about)
        return files.read_checkpoint(place, state)


def read_layers(content: bytes) -> object:
    """A description of layers."""
    try:
        return build_layers(json.loads(content))
    except (ValueError, RecursionError):
        return None


def read_leaf(path: Path) -> object:
    """Users in LEAF's JSON."""
    return Federation.from_leaf(path)


# -------------------------------------------------------------------------------------------------- where one begins


def run_seeds() -> list[bytes]:
    """Each file of a run, behind its number."""
    return [bytes([number]) + run_folder()[name] for number, name in enumerate(RUN_FILES) if name in run_folder()]


def table_seeds() -> list[bytes]:
    """Small tables of several kinds."""
    texts = [
        "client,age,town,label\na,3,x,0\na,4.5,y,1\nb,5,x,0\nb,6,y,1\n",
        "client;x;label\na;1,5;ja\na;2,5;nein\nb;1.000,5;ja\nb;3;nein\n",
        'client\tx\tlabel\n"a"\t\t1.5\nb\tNA\t2.5\nb\t1e5\t-3\na\t2020-01-02\t3\n',
        "\ufeffclient,x,label\r\n1,true,0\r\n1,false,1\r\n2,true,0\r\n2,false,1\r\n",
    ]
    return [text.encode() for text in texts]


def parquet_seeds() -> list[bytes]:
    """The same as columns."""
    found = []
    for values in ([1.0, 2.0, 3.0, 4.0], ["x", "y", "x", None], [[1.0], [2.0], [3.0], [4.0]]):
        file = io.BytesIO()
        pq.write_table(pa.table({"client": ["a", "a", "b", "b"], "x": values, "label": [0, 1, 0, 1]}), file)
        found.append(file.getvalue())
    return found


def idx_seeds() -> list[bytes]:
    """Images and labels, and both compressed."""
    images = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(range(8))
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3])
    return [b"\0" + images, b"\0" + labels, b"\1" + gzip.compress(images), b"\1" + gzip.compress(labels)]


def npz_seeds(**arrays: Any) -> list[bytes]:
    """Arrays as NumPy saves them."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return [file.getvalue()]


def json_seeds(*values: Any) -> list[bytes]:
    """Values as JSON."""
    return [json.dumps(value).encode() for value in values]


def leaf_seeds() -> list[bytes]:
    """Two users, whose features are numbers, text or images."""
    found = []
    for x in ([[1.0, 2.0], [3.0, 4.0]], [[[1], [2]], [[3], [4]]]):
        data = {name: {"x": x, "y": [0, 1]} for name in ("a", "b")}
        found.append({"users": ["a", "b"], "num_samples": [2, 2], "user_data": data, "hierarchies": ["p", "q"]})
    return json_seeds(*found)


def tensor_seeds() -> list[bytes]:
    """A file of tensors."""
    with folder() as place:
        save_tensors(place / "t.safetensors", {"a": torch.arange(6.0).view(2, 3)}, {"round": 3})
        return [(place / "t.safetensors").read_bytes()]


STUDY = b"""title = "A"
data = "digits"
model = "softmax"
rounds = 3
seeds = 2
algorithms = ["fedavg", "ditto"]
[options.ditto]
penalty = 0.5
[data_options]
num_clients = 4
"""
SETTINGS = [
    b"ditto\npenalty=0.5\nrounds=3\nrow_clip=1.0\noptimiser=adam",
    b"self-fl\nmax_local_steps=20\nlearning_rate_schedule=step 0.1 0.5",
    b'fedavg\nweighting="equal"\nbatch_norm=null\naugmentation=crop flip\nnum_local_epochs=2',
]
NPZ = {"x": np.ones((4, 2), dtype=np.float32), "y": np.array([0, 1, 0, 1])}
CIFAR = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [1, 2]}


def layer_seeds() -> list[bytes]:
    """Descriptions of modules."""
    made = (
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Dropout(0.1)),
        torch.nn.Conv2d(1, 2, 3),
    )
    return json_seeds(*(describe_layers(module) for module in made))


def pfllib(path: Path) -> object:
    """A folder of PFLlib's in which both parts are this file."""
    for part in ("train", "test"):
        (path / part).mkdir()
        (path / part / "0.npz").write_bytes((path / "0.npz").read_bytes())
    return Federation.from_pfllib(path, trusted=True)


TARGETS: dict[str, Target] = {
    "study": Target(by_folder(read_study, "study.toml"), lambda: [STUDY]),
    "settings": Target(read_settings, lambda: SETTINGS),
    "run": Target(read_run, run_seeds),
    "report": Target(lambda content: read_run(content, draws=True), run_seeds),
    "record": Target(
        by_folder(read_study_folder, "record.json"), lambda: [(FOLDERS / "study" / "record.json").read_bytes()]
    ),
    "svg": Target(
        by_file(lambda path: svg.embed(path, "a", "b"), "a.svg"),
        lambda: [(FOLDERS / "study" / "errors.svg").read_bytes()],
    ),
    "csv": Target(by_file(Federation.from_csv, "a.csv"), table_seeds),
    "parquet": Target(by_file(Federation.from_csv, "a.parquet"), parquet_seeds),
    "folder": Target(by_folder(Federation.from_folder, "a.csv"), lambda: [b"x,label\n1,0\n2,1\n3,0\n"]),
    "npz": Target(by_folder(Federation.from_folder, "a.npz"), lambda: npz_seeds(**NPZ)),
    "estimates": Target(by_file(read_estimates, "a.csv"), lambda: [b"client,estimate,variance\na,1,0.5\nb,2,1e-3\n"]),
    "idx": Target(by_first_byte(*(by_file(read_idx, name) for name in ("a", "a.gz"))), idx_seeds),
    "cifar": Target(
        by_first_byte(*(by_file(read_batch, name) for name in ("a", "a.bin"))),
        lambda: [b"\0" + pickle.dumps(CIFAR, protocol=2), b"\1" + bytes(2 * 3073)],
    ),
    "leaf": Target(by_folder(read_leaf, "a.json"), leaf_seeds),
    "pfllib": Target(by_folder(pfllib, "0.npz"), lambda: npz_seeds(data=np.array(NPZ, dtype=object))),
    "embeddings": Target(by_file(lambda path: read_original(path, 2, 2), "a.txt"), lambda: [b"the 1 2\nof -0.5 1e3\n"]),
    "tweets": Target(by_file(read_tweets, "a.csv"), lambda: [b'"0","1","d","q","u","t"\n"4","2","d","q","v","s"\n']),
    "preparation": Target(
        by_file(Preparation.load, "preparation.json"), lambda: [(FOLDERS / "table" / "preparation.json").read_bytes()]
    ),
    "predict": Target(
        by_file(lambda path: read_rows(path, Preparation.load(FOLDERS / "table" / "preparation.json")), "a.csv"),
        table_seeds,
    ),
    "layers": Target(read_layers, layer_seeds),
    "tensors": Target(by_file(load_tensors, "a.safetensors"), tensor_seeds),
    "memory": Target(read_memory, lambda: json_seeds({"experiment": "x", "client": "a", "round": 1, "run": "r"})),
    "checkpoint": Target(read_state, lambda: json_seeds({"round": 3, "seconds": 1.5})),
}


# ------------------------------------------------------------------------------------------------- Flower's messages

with contextlib.suppress(ImportError):
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    from selffl.engines.flower import messages, secure
    from selffl.engines.flower.answers import Bounds, check_answer
    from selffl.engines.flower.records import pack, upload_template
    from selffl.training.flat import FlatModel

    METHOD = selffl.algorithm("ditto")

    @cache
    def template() -> Any:
        """An upload of DITTO's."""
        return upload_template(METHOD, FlatModel(torch.nn.Linear(2, 1)))

    def as_message(content: bytes) -> RecordDict | None:
        """A message from JSON: tables of values, of numbers, and of arrays as [type, shape, kind, bytes]."""
        try:
            found = json.loads(content)
            configs = {name: ConfigRecord(_values(record)) for name, record in found["configs"].items()}
            metrics = {name: MetricRecord(_values(record)) for name, record in found["metrics"].items()}
            arrays = {
                name: ArrayRecord(
                    {
                        key: Array(kind, tuple(shape), how, base64.b64decode(data))
                        for key, (kind, shape, how, data) in record.items()
                    }
                )
                for name, record in found["arrays"].items()
            }
            return RecordDict({**configs, **metrics, **arrays})
        except Exception:  # Flower itself would not have let it through
            return None

    def _values(record: dict[str, Any]) -> dict[str, Any]:
        """Values of a record; text that begins with ``b64:`` is bytes."""

        def value(each: Any) -> Any:
            if isinstance(each, list):
                return [value(part) for part in each]
            return base64.b64decode(each[4:]) if isinstance(each, str) and each.startswith("b64:") else each

        return {name: value(each) for name, each in record.items()}

    def read_message(content: bytes) -> object:
        """Everything that the server or a client reads of a message."""
        message = as_message(content)
        if message is None:
            return None
        bounds = Bounds(template(), 100, ("f1",))
        readers = [
            lambda: messages.read(messages.Order, message),
            lambda: messages.read(messages.Introduction, message),
            lambda: check_answer(message, "x", 1, "a"),
            lambda: bounds.upload(message),
            lambda: bounds.scores(message),
            lambda: bounds.alone(message),
            lambda: secure._read_book(message),
            lambda: secure.read_masked(message, template(), METHOD),
        ]
        refused = [error for read in readers if (error := refusal_of(read)) is not None]
        if len(refused) == len(readers):
            raise refused[0]
        return None

    def message_seeds() -> list[bytes]:
        """An answer to a round, one to an evaluation, and keys."""
        about = {"experiment": "x", "round_number": 1, "client": "a", "num_gradients": 3}
        arrays = {
            name: [array.dtype, list(array.shape), array.stype, base64.b64encode(array.data).decode()]
            for name, array in pack(template()).items()
        }
        scores = {"num_train": 3, "num_test": 2, "personal.accuracy": 1.0, "global.accuracy": 2.0}
        scores |= {"personal.f1": 0.5, "global.f1": 0.5}
        key = "b64:" + base64.b64encode(bytes(32)).decode()
        book = {"numbers": [0, 1], "encryption": [key, key], "masking": [key, key]}
        return json_seeds(
            {"configs": {messages.ABOUT: about}, "metrics": {}, "arrays": {messages.ARRAYS: arrays}},
            {"configs": {messages.ABOUT: about}, "metrics": {messages.METRICS: scores}, "arrays": {}},
            {"configs": {secure.BOOK: book}, "metrics": {}, "arrays": {}},
        )

    TARGETS["flower"] = Target(read_message, message_seeds)
