"""The wake-word studies: bootstrap, tables and verdicts on made-up scores; and all of them on made-up rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from selffl.data.devices import DEVICES
from selffl.data.federation import Federation, Rows
from selffl.data.wakeword import Description, RowTable
from selffl.data.wakeword_rows import ALARM, NORMAL, STATES
from selffl.maths.detection import relative_false_accepts
from selffl.studies import STUDIES, detection, problems
from selffl.studies import audio as module
from selffl.studies.arms import Outcome
from selffl.studies.detection import redrawn, relative
from selffl.studies.problems import WAKEWORD, WarmUp
from selffl.studies.result import Job


def test_bootstrap_counts_belong_to_clips_and_are_poisson_with_mean_one(monkeypatch):
    monkeypatch.setattr(detection, "NUM_SAMPLES", 4000)
    clips = torch.tensor([7, 7, 3, 9, 9, 9, 4])
    weight = redrawn(clips)
    assert weight.shape == (4000, 7)
    for clip in clips.unique():
        columns = weight[:, clips == clip]
        assert (columns == columns[:, :1]).all()
    shares = [(weight[:, [0, 2, 3, 6]] == k).double().mean().item() for k in range(4)]
    assert shares == pytest.approx([math.exp(-1) / math.factorial(k) for k in range(4)], abs=0.02)
    # The same wherever the clip is met; different clips have nothing to do with each other.
    assert torch.equal(redrawn(torch.tensor([3, 100]))[:, 0], weight[:, 2])
    assert abs(torch.corrcoef(weight[:, [0, 2]].T)[0, 1]) < 0.06


def test_the_bootstrap_spread_is_that_of_new_samples_and_not_shifted(monkeypatch):
    """Groups of four equal rows: rows drawn alone would show half the spread."""
    monkeypatch.setattr(detection, "NUM_SAMPLES", 400)
    rng = torch.Generator().manual_seed(3)

    def sample():
        base = torch.randn(120, generator=rng, dtype=torch.float64)
        labels = (torch.arange(120) < 40).long()
        scores, reference = (base + labels + 0.5 * torch.randn(120, generator=rng) for _ in range(2))
        return [column.repeat_interleave(4) for column in (scores, reference, labels, torch.arange(120))]

    spread = torch.tensor([float(relative_false_accepts(*sample()[:3], 0.5).log()) for _ in range(300)]).std()
    widths, shifts = [], []
    for _ in range(12):
        scores, reference, labels, clips = sample()
        point = relative_false_accepts(scores, reference, labels, 0.5).log()
        found = relative_false_accepts(scores, reference, labels, 0.5, redrawn(clips)).log()
        widths.append(float(found.std()))
        shifts.append(float(found.mean() - point))
    assert np.mean(widths) / float(spread) == pytest.approx(1.0, abs=0.25)
    assert abs(np.mean(shifts)) < 0.3 * float(spread)


def test_a_run_that_diverged_leaves_an_empty_cell_and_the_rest_as_it_was():
    tables = [table_of(seed) for seed in range(3)]
    outcomes = outcomes_of(tables, 1.5)
    outcomes[1] = replace(outcomes[1], summary={"status": "diverged"}, scores={})
    for value in relative(outcomes, "global", tables).values():
        assert str(value) == "diverged"
        assert value.by_seed.isnan().tolist() == [False, True, False]
    chart = detection.curves({"x": (outcomes, "global")}, tables, NORMAL, "Normal")
    assert all(y >= 0 for line in chart.series for y in line.y)


# --------------------------------------------------------------------------------------------------- made-up scores


def table_of(seed, clips=12):
    """Two renderings of each clip, a third of them positive, in every type and state there is."""
    lines = [
        (device, state, 100 * device + clip, int(clip % 3 == 0))
        for device in range(5)
        for state in range(3)
        if state != ALARM or device in (1, 3, 4)
        for clip in range(clips)
        for _ in range(2)
    ]
    return RowTable(*np.random.default_rng(seed).permutation(lines).T)


def scores_of(table, seed, strength):
    """Normal scores, larger for positives; rows of a clip score alike."""
    rng = np.random.default_rng(seed)
    by_clip = rng.normal(size=1000)
    return torch.from_numpy(strength * table.label + by_clip[table.clip] + 0.1 * rng.normal(size=len(table)))


def outcomes_of(tables, strength):
    found = []
    for seed, table in enumerate(tables):
        scores = {"start": scores_of(table, 10 + seed, 1.0), "global": scores_of(table, 20 + seed, strength)}
        found.append(Outcome(seed, {"status": "finished"}, [], [], 1, scores | {"same": scores["start"]}))
    return found


def test_relative_false_accepts_of_a_cell_by_hand():
    tables = [table_of(seed) for seed in range(3)]
    outcomes = outcomes_of(tables, 1.5)
    found = relative(outcomes, "global", tables)
    assert list(found) == [(d, s) for d in range(5) for s in range(3) if s != ALARM or d in (1, 3, 4)]
    for (device, state), value in found.items():
        for outcome, table, log in zip(outcomes, tables, value.by_seed.tolist(), strict=True):
            start, scores = outcome.scores["start"].tolist(), outcome.scores["global"].tolist()
            positives = sorted(
                s for s, y, at in zip(start, table.label, table.state, strict=True) if y == 1 and at == NORMAL
            )
            threshold = positives[len(positives) // 10]
            here = [k for k in range(len(table)) if table.device[k] == device and table.state[k] == state]
            rejected = sum(table.label[k] == 1 and start[k] < threshold for k in here)

            def accepted(scores, here=here, table=table, rejected=rejected):
                level = sorted(scores[k] for k in here if table.label[k] == 1)[rejected]
                return sum(scores[k] >= level for k in here if table.label[k] == 0)

            assert math.exp(log) == pytest.approx((accepted(scores) + 0.5) / (accepted(start) + 0.5))
        assert value.low <= value.mean <= value.high


def test_the_model_it_started_from_is_one_everywhere_with_no_interval_to_speak_of():
    tables = [table_of(seed) for seed in range(2)]
    for value in relative(outcomes_of(tables, 1.0), "same", tables).values():
        assert (value.low, value.mean, value.high) == (1.0, 1.0, 1.0)
        assert str(value) == "1.00 [1.00, 1.00]"


def test_averages_and_spreads_over_types_and_states():
    by_seed = {(0, 0): [0.1, -0.1], (1, 0): [0.3, 0.1], (1, 1): [-0.4, 0.0]}
    found = {cell: detection.Relative(torch.tensor(logs), 0.0, 0.0) for cell, logs in by_seed.items()}
    assert detection.average(found, 0).tolist() == pytest.approx([0.2, 0.0])
    assert detection.size(found).tolist() == pytest.approx([0.8 / 3, 0.2 / 3])
    assert detection.spread(found).tolist() == pytest.approx(
        [np.std(v, ddof=1) for v in ([0.1, 0.3, -0.4], [-0.1, 0.1, 0])]
    )
    assert detection.line(found, 1) == {"A": "NA", "B": str(found[1, 1]), "C": "NA", "D": "NA", "E": "NA"}


# ------------------------------------------------------------------------------------------------------ made-up rows


def made_up(seed=0, clients_per_type=1, scale=1.0, validation_fraction=0.0):
    """Small spectrograms with a bright band where there is a wake word, at another height on each type."""
    tables = table_of(seed), table_of(seed + 50)
    parts = {}
    for name, table in zip(("train", "test"), tables, strict=True):
        client = clients_per_type * table.device + table.clip % clients_per_type
        order = np.argsort(client, kind="stable")
        table = table.at(order)
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(len(table), 1, 16, 48)).astype(np.float32)
        rows[np.arange(len(table)), 0, 3 * table.device] += 2 * table.label[:, None]
        sizes = np.bincount(client, minlength=5 * clients_per_type)
        offset = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
        parts[name] = table, Rows(torch.from_numpy(rows), torch.from_numpy(table.label), offset)
    cluster = torch.arange(5).repeat_interleave(clients_per_type)
    ids = [f"{name}-{number}" for name in DEVICES for number in range(clients_per_type)]
    federation = Federation(ids, parts["train"][1], parts["test"][1], cluster=cluster)
    return federation, Description(parts["train"][0], parts["test"][0])


@pytest.fixture
def small(monkeypatch):
    quick = replace(
        WAKEWORD, rounds=2, batch_size=8, num_local_steps=2, max_local_steps=3, model_options={"width": 0.05},
        warm_up=WarmUp(rounds=1, is_pooled=True, num_local_steps=5),
    )  # fmt: skip
    monkeypatch.setattr(problems, "_load", lambda name, seed, share, options: made_up(seed, **dict(options))[0])
    monkeypatch.setattr(module, "describe", lambda **options: made_up(**options)[1])
    monkeypatch.setattr(detection, "NUM_SAMPLES", 50)
    return {"WAKEWORD": quick, "SAMPLED": replace(quick, participation=0.25, data_options={"clients_per_type": 4})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the runs of all studies lie: those that two of them share are trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "lines", "claims"),
    [
        ("wakeword-global", list(module.PAPER["wakeword-global"]), 11),
        ("wakeword-personal", ["self-fl", "fedavg-e", "ditto-e", "perfedavg", "local"], 5),
        ("augmented-wakeword", ["Algorithm 1", "Algorithm 2"], 1),
        ("wakeword-clusters", ["client level", "clusters by device type", "clusters by variance"], 4),
        ("wakeword-participation", ["C = 0.25", "C = 0.1"], 3),
    ],
)
def test_every_study_runs_from_warm_up_to_verdicts(small, runs, study, lines, claims):
    assert "stand-in" in STUDIES[study].title
    made = STUDIES[study].run
    of = "SAMPLED" if made.args[0] is module.SAMPLED else "WAKEWORD"
    options = {"max_convergence_steps": 4} if study == "augmented-wakeword" else {}
    result = made.func(small[of], Job(num_seeds=2, folder=runs), **options)
    by_state = "state" in result.table[0]
    assert [line["method"] for line in result.table] == [label for label in lines for _ in range(3 if by_state else 1)]
    for line in result.table:
        is_alarm = line.get("state") == STATES[ALARM]
        assert [line[name] == "NA" for name in DEVICES] == [is_alarm and name in "AC" for name in DEVICES]
    assert len(result.claims) == claims
    assert {claim.verdict for claim in result.claims} <= {"holds", "inconclusive", "does not hold"}
    # A number for every method, cell and seed.
    assert len(result.rows) == len(lines) * 13 * 2
    assert all(row["relative_false_accepts"] > 0 for row in result.rows)
    (figure,) = result.figures
    assert [chart.title for chart in figure.charts] == ["Normal", "Playback", "Alarm"]
    assert [line.name for line in figure.charts[0].series] == [*lines, "pre-trained"]
    assert figure.charts[0].series[-1].is_reference
    assert "from a model trained for 5 steps on all rows pooled" in result.setting
    # A third of twelve clips of each type in either part; two renderings each in the states there are.
    assert "training: 312 rows rendered from 20 clips of the wake word and 40 others" in result.setting
    assert "test: 312 rows rendered from 20 clips" in result.setting


def test_a_quick_look_is_smaller():
    problem = module._shorten_if_quick(WAKEWORD, Job(quick=True))
    assert len(module.seeds_of(Job(quick=True))) == 2
    assert problem.model_options == {"width": 0.125}
    assert problem.data_options["scale"] < 1 / 32
    assert problem.warm_up.is_pooled
    assert module._shorten_if_quick(WAKEWORD, Job()) is WAKEWORD
