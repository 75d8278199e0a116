"""One's own data, model, loss and metric in ten lines, whatever the data are kept in: each text is run as it stands."""

import numpy as np
import pandas as pd
import pytest
import torch

import selffl

SITES = ("north", "south", "west")

PANDAS = """
import pandas, selffl
from torch import nn
frame = pandas.read_csv("all.csv")
fed = selffl.Federation.from_frame(frame, client="site", label="outcome", test_fraction=0.25)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, len(fed.classes)))
run = selffl.train(model, fed, "self-fl", rounds=2, participation=1.0)
number = run.personal_model("north")(fed.test.features[:1]).argmax().item()
print("the first row is", fed.classes[number])
"""

POLARS = """
import polars, selffl
from torch import nn
frame = polars.read_csv("all.csv")
fed = selffl.Federation.from_frame(frame, client="site", label="outcome", features=["age", "dose"])
run = selffl.train(nn.Linear(2, len(fed.classes)), fed, "ditto", rounds=2, participation=1.0, optimiser="adam")
"""

CSV = """
import selffl
from torch import nn
fed = selffl.Federation.from_csv("all.csv", client="site", label="outcome")
run = selffl.train(nn.Linear(3, len(fed.classes)), fed, "self-fl", rounds=2, participation=1.0)
"""

ARRAYS = """
import numpy, selffl, torchmetrics
from torch import nn
table = numpy.genfromtxt("all.csv", delimiter=",", skip_header=1, usecols=(1, 2, 3))
site = numpy.genfromtxt("all.csv", delimiter=",", skip_header=1, usecols=0, dtype=str)
fed = selffl.Federation.from_arrays(table[:, :2].astype("float32"), table[:, 2].astype(int), site)
metrics = {"f1": torchmetrics.F1Score("multiclass", num_classes=2, average="macro")}
run = selffl.train(nn.Linear(2, 2), fed, "self-fl", rounds=2, participation=1.0, metrics=metrics)
print(run.summary["weighted_f1"], [row["f1"] for row in run.clients])
"""

DATASET = """
import selffl, torch
from torch import nn
from torchvision_like import Squares
data = Squares(train=True)
fed = selffl.Federation.from_dataset(data, client=[k % 3 for k in range(len(data))])
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
loss = nn.CrossEntropyLoss(label_smoothing=0.1)
run = selffl.train(model, fed, "fedavg", rounds=2, participation=1.0, loss=loss)
"""

FOLDER = """
import selffl
from torch import nn
fed = selffl.Federation.from_folder("sites", label="outcome")
run = selffl.train(nn.Linear(3, len(fed.classes)), fed, "self-fl", rounds=2, participation=1.0, out="run")
model = selffl.load("run").personal_model("north")
"""

HUGGINGFACE = """
import datasets, selffl
from torch import nn
data = datasets.load_from_disk("pictures")
fed = selffl.Federation.from_huggingface(data, client="site", features="image")
model = nn.Sequential(nn.Flatten(), nn.Linear(16, len(fed.classes)))
run = selffl.train(model, fed, "self-fl", rounds=2, participation=1.0)
"""

PARTITIONS = """
import datasets, selffl
from torch import nn
data = datasets.load_from_disk("pictures")
parts = {site: data.filter(lambda row, site=site: row["site"] == site) for site in ("north", "south", "west")}
fed = selffl.Federation.from_huggingface(parts, features="image")
model = nn.Sequential(nn.Flatten(), nn.Linear(16, len(fed.classes)))
run = selffl.train(model, fed, "fedprox", rounds=2, participation=1.0, optimiser="momentum")
"""

REGRESSION = """
import pandas, selffl, torchmetrics
from torch import nn
frame = pandas.read_csv("all.csv").drop(columns="outcome")
fed = selffl.Federation.from_frame(frame, client="site", label="dose")
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
metrics = {"mae": torchmetrics.MeanAbsoluteError()}
run = selffl.train(model, fed, "local", loss=nn.functional.huber_loss, rounds=2, participation=1.0, metrics=metrics)
"""

TEXTS = {
    "pandas": PANDAS,
    "polars": POLARS,
    "csv": CSV,
    "arrays": ARRAYS,
    "torch": DATASET,
    "folder": FOLDER,
    "huggingface": HUGGINGFACE,
    "partitions": PARTITIONS,
    "regression": REGRESSION,
}

MODULE = '''
import torch

class Squares(torch.utils.data.Dataset):
    """Pairs of a picture and whether it is bright, one by one."""

    def __init__(self, train):
        self.pictures = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, number):
        return self.pictures[number], int(self.pictures[number].mean() > 0.5)
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the same made-up trial as a table, a folder of tables, and pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)
    rows = 90
    frame = pd.DataFrame(
        {
            "site": rng.choice(SITES, rows),
            "age": rng.normal(size=rows).round(3),
            "dose": rng.normal(size=rows).round(3),
            "smokes": rng.integers(0, 2, rows),
        }
    )
    frame["outcome"] = np.where(frame["age"] + frame["dose"] > 0, "well", "ill")
    frame.to_csv("all.csv", index=False)
    (tmp_path / "sites").mkdir()
    for site, own in frame.groupby("site"):
        own.drop(columns="site").to_csv(f"sites/{site}.csv", index=False)
    (tmp_path / "torchvision_like.py").write_text(MODULE)
    return frame


def pictures(frame):
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    rng = np.random.default_rng(1)
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["dark", "bright"]),
        "site": datasets.Value("string"),
    }
    images = rng.integers(0, 256, (len(frame), 4, 4)).astype(np.uint8)
    columns = {
        "image": [Image.fromarray(image) for image in images],
        "label": (images.mean((1, 2)) > 128).astype(int).tolist(),
        "site": frame["site"].tolist(),
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk("pictures")


@pytest.mark.parametrize("name", TEXTS)
def test_ten_lines_are_enough(name, place):
    if name in ("huggingface", "partitions"):
        pictures(place)
    text = TEXTS[name].strip()
    assert len(text.splitlines()) <= 10
    torch.manual_seed(0)
    found = {}
    exec(compile(text, name, "exec"), found)
    run, fed = found["run"], found["fed"]
    assert run.summary["status"] == "finished"
    assert fed.num_clients == 3
    sizes = place["site"].value_counts()
    expected = [20, 20, 20] if name == "torch" else [int(sizes[site]) for site in sorted(SITES)]
    assert fed.num_examples.tolist() == expected
    assert len(run.clients) == 3
    for client in fed.clients:
        assert isinstance(run.personal_model(client), torch.nn.Module)
    names = {"huggingface": ["dark", "bright"], "partitions": ["dark", "bright"]}
    named = ("pandas", "polars", "csv", "folder", *names)
    assert fed.classes == (names.get(name, ["ill", "well"]) if name in named else None)
    score = "weighted_mae" if name == "regression" else "weighted_accuracy"
    assert run.summary[score] > 0


def test_what_is_no_federation_is_refused_with_the_way_to_one(place):
    with pytest.raises(selffl.ConfigError, match=r"federation is a DataFrame; expected a Federation, such as"):
        selffl.train(torch.nn.Linear(3, 2), place, "fedavg")
