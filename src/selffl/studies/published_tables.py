"""The tables that were published, as descriptions: problems, methods, options, and the numbers as printed.

Protocols are those of the authors' public code where it says, else stated here.
"""

from __future__ import annotations

from dataclasses import replace

from selffl.studies.problems import Problem
from selffl.studies.published import PublishedTable, Shown, Trained
from selffl.studies.published_problems import SHARE_ACCURACY, MobileNetProblem, SharedTestProblem

PLAIN = {"optimiser": "sgd"}  # of methods that take no momentum
PLAIN_RATE = 0.1  # η without momentum that goes as far as 0.01 with 0.9

# -------------------------------------------------------------------------------------------------- MNIST, pFedBayes

_SMALL_MNIST = Problem(
    "published-mnist-pfedbayes",
    "MNIST over ten clients with five digits and 1,000 training rows each (pFedBayes's small MNIST)",
    data="mnist",
    model="mlp",
    rounds=800,
    participation=1.0,
    batch_size=100,
    data_options={"partition": "five-digits", "test_fraction": 0.8},
    model_options={"hidden": 100},
)
_NOISE = "noise of deviation 1, as the publication has it"
PFEDBAYES = PublishedTable(
    _SMALL_MNIST.name,
    "Published: pFedBayes on the small MNIST",
    "Zhang et al., ICML 2022, as the README of AllenBeau/pFedBayes quotes it (reproduced there: 97.30 and 93.10)",
    {"small MNIST": _SMALL_MNIST},
    (
        Trained(
            "pfedbayes",
            (
                Shown("pFedBayes, personal", ("97.09 ± 0.13",), differs=_NOISE),
                Shown("pFedBayes, global", ("92.33 ± 0.76",), is_global=True, differs=_NOISE),
            ),
            most_seeds=1,
        ),
        Trained("self-fl-auto", (Shown("self-fl-auto"),)),
        Trained("ditto", (Shown("Ditto"),)),
        Trained("perfedavg", (Shown("Per-FedAvg"),)),
        Trained("fedavg", (Shown("FedAvg"),)),
        Trained("local", (Shown("local"),)),
        Trained("pfedme", (Shown("pFedMe"),), most_seeds=1),
    ),
)

# ------------------------------------------------------------------------------------------------- CIFAR-10, FedKDDC

_PFEDGRAPH = SharedTestProblem(
    "published-cifar10-fedkddc",
    "CIFAR-10 over ten clients (pFedGraph's protocol), tested on all test images by each client's shares of classes",
    data="cifar10",
    model="cnn",
    rounds=50,
    participation=1.0,
    learning_rate=0.01,
    batch_size=64,
    optimiser="momentum",
    weight_decay=1e-5,
    augmentation="crop flip",
    num_local_steps=200,
    max_local_steps=400,
)
_LAST = "the last round's model"
FEDKDDC = PublishedTable(
    _PFEDGRAPH.name,
    "Published: FedKDDC's table on CIFAR-10",
    "README of Zzy9797/FedKDDC; protocol of MediaBrain-SJTU/pFedGraph",
    {
        setting: replace(_PFEDGRAPH, data_options={"partition": f"pfedgraph-{partition}"})
        for setting, partition in (
            ("Dirichlet 0.1", "dirichlet"),
            ("two classes a client", "classes"),
            ("homogeneous", "alike"),
        )
    },
    (
        Trained(
            "fedavg",
            (
                Shown("FedAvg", ("62.92", "66.19", "67.12")),
                Shown("FedAvg-FT", ("84.09", "90.20", "63.09"), fine_tune=200, differs=_LAST),
                Shown(
                    "kNN-Per",
                    ("70.05", "79.09", "67.01"),
                    neighbours=10,
                    differs=f"{_LAST}; how much neighbours count is chosen by training rows, there it is a half",
                ),
            ),
        ),
        Trained(
            "fedprox",
            (
                Shown("FedProx", ("62.25", "55.76", "67.07")),
                Shown("FedProx-FT", ("83.71", "90.37", "61.93"), fine_tune=200, differs=f"{_LAST}; tuned without pull"),
            ),
            {"penalty": 0.01},
        ),
        Trained(
            "perfedavg",
            (
                Shown(
                    "Per-FedAvg",
                    ("84.02", "89.60", "63.24"),
                    fine_tune=200,
                    differs=f"{_LAST}, after 200 steps; no momentum, η = {PLAIN_RATE:g}",
                ),
            ),
            {"inner_learning_rate": 0.001},
            PLAIN | {"learning_rate": PLAIN_RATE},
        ),
        Trained(
            "pfedme",
            (Shown("pFedMe", ("75.24", "81.73", "47.48"), differs="θ is shown, there the client's copy of w"),),
            {"penalty": 15.0, "num_inner_steps": 5},
            PLAIN | {"weight_decay": 0.001},
        ),
        Trained("ditto", (Shown("Ditto", ("83.78", "89.41", "65.35")),), {"penalty": 1.0}),
        Trained(
            "fedrep",
            (Shown("FedRep", ("83.47", "90.02", "62.88")),),
            {"head_steps": 80, "num_local_steps": 200},
        ),
        Trained(
            "fedrod",
            (
                Shown(
                    "FedRoD",
                    ("83.49", "90.66", "62.07"),
                    differs="no weight decay; the generic head is averaged, there it stays with the client",
                ),
            ),
            settings={"weight_decay": 0.0},
        ),
        Trained("local", (Shown("local"),)),
        Trained(
            "self-fl-auto",
            (Shown("self-fl-auto"),),
            settings=PLAIN | {"learning_rate": PLAIN_RATE, "weight_decay": 0.0},
        ),
    ),
    chosen="validation",
    metric=SHARE_ACCURACY,
    validation_fraction=0.2,
    quick_share=25,
)

# -------------------------------------------------------------------------------------------------- CIFAR-10, FedLMI

_PFLLIB = Problem(
    "published-cifar10-fedlmi",
    "CIFAR-10 over 20 clients (PFLlib's partitions)",
    data="cifar10",
    model="cnn",
    rounds=150,
    participation=0.5,
    learning_rate=0.005,
    batch_size=10,
    num_local_epochs=1,
    model_options={"channels": (32, 64), "hidden": (512,)},
)
FEDLMI = PublishedTable(
    _PFLLIB.name,
    "Published: FedLMI's table on CIFAR-10",
    "README of Wuhiahia/FedLMI; partitions, network and options of TsingZ0/PFLlib",
    {
        setting: replace(_PFLLIB, data_options={"partition": f"pfllib-{partition}"})
        for setting, partition in (("practical, Dirichlet 0.1", "dirichlet"), ("pathological, two classes", "classes"))
    },
    (
        Trained("fedavg", (Shown("FedAvg", ("59.47", "56.49")),)),
        Trained("fedprox", (Shown("FedProx", ("59.59", "56.27")),), {"penalty": 0.001}),
        Trained(
            "perfedavg",
            (Shown("Per-FedAvg", ("85.05", "87.41")),),
            {"inner_learning_rate": 0.001},
        ),
        Trained(
            "pfedme",
            (Shown("pFedMe", ("82.17", "81.58")),),
            {"penalty": 15.0, "num_inner_steps": 5, "personal_learning_rate": 0.01},
            {"learning_rate": 0.01},
        ),
        Trained(
            "fedbabu",
            (Shown("FedBABU", ("91.03", "90.71"), differs="tuned once, after the last round"),),
            {"fine_tune_epochs": 10},
        ),
        Trained(
            "fedrep",
            (Shown("FedRep", ("90.53", "90.53"), differs="225 steps of the head, there a pass: the mean of as many"),),
            {"head_steps": 225},
        ),
        Trained("fedala", (Shown("FedALA", ("90.84", "91.23")),)),
        Trained("local", (Shown("local"),)),
        Trained("ditto", (Shown("Ditto"),)),
        Trained("self-fl-auto", (Shown("self-fl-auto"),)),
    ),
    chosen="test",
    quick_share=75,
)

# ------------------------------------------------------------------------------------------------- CIFAR-10, kNN-Per

_START = "random first weights, there ImageNet's (models.py: pretrained)"
_BATCH = f"{_START}; BatchNorm by each minibatch"
_KNNPER = MobileNetProblem(
    "published-cifar10-knnper",
    "CIFAR-10 over 200 clients, classes by Dirichlet 0.3 (kNN-Per)",
    data="cifar10",
    model="mobilenet-v2",
    rounds=100,
    participation=1.0,
    learning_rate=0.05,
    learning_rate_schedule="step 0.1 0.5 0.75",
    batch_size=128,
    weight_decay=5e-4,
    num_local_epochs=1,
    data_options={"partition": "knnper", "test_fraction": 0.2},
)
KNNPER = PublishedTable(
    _KNNPER.name,
    "Published: kNN-Per's table on CIFAR-10",
    "README of omarfoq/knn-per",
    {"Dirichlet 0.3": _KNNPER},
    (
        Trained("local", (Shown("Local", ("57.6",), differs=_START),)),
        Trained(
            "fedavg",
            (
                Shown("FedAvg", ("72.8",), differs=_START),
                Shown("FedAvg+", ("75.2",), fine_tune=20, differs=f"{_START}; 20 steps of tuning"),
                Shown(
                    "kNN-Per",
                    ("83.0",),
                    neighbours=7,
                    differs=f"{_START}; how much neighbours count is chosen by training rows",
                ),
            ),
        ),
        Trained("ditto", (Shown("Ditto", ("80.0",), differs=f"{_START}; λ = 1, there unknown"),)),
        Trained("fedrep", (Shown("FedRep", ("77.7",), differs=_START),), {"head_steps": 20}),
        Trained("apfl", (Shown("APFL", ("78.9",), differs=_BATCH),), settings={"batch_norm": "batch"}),
        Trained(
            "self-fl-auto",
            (Shown("self-fl-auto", differs="BatchNorm by each minibatch; no weight decay"),),
            settings={"batch_norm": "batch", "weight_decay": 0.0},
        ),
    ),
    quick_share=50,
)

PUBLISHED = tuple(table.study for table in (PFEDBAYES, FEDKDDC, FEDLMI, KNNPER))
