"""The studies of sums and noise, on embedded digits in place of MNIST: every arm, every claim, and what they say."""

from dataclasses import replace

import pytest

from selffl.privacy import epsilon
from selffl.studies import sums
from selffl.studies.problems import DIGITS
from selffl.studies.result import Job

SHORT = replace(DIGITS, rounds=3, num_local_steps=5, max_local_steps=10)


@pytest.mark.slow
def test_plain_and_summed_are_held_against_each_other(tmp_path):
    found = sums.sums_study(SHORT, replace(SHORT, name="letters"), Job(folder=tmp_path, num_seeds=2))
    assert [line["problem"] for line in found.table] == ["digits"] * 4 + ["letters"] * 4
    assert len(found.claims) == 4
    first, second = (float(line["personal models"].split()[0]) for line in found.table[:2])
    assert first == pytest.approx(second, abs=2.0)
    assert "paired over 2 seeds" in found.claims[0].evidence


@pytest.mark.slow
def test_noise_is_priced_in_accuracy_and_in_epsilon(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "NOISE", (2.0,))
    found = sums.noise_study(SHORT, Job(folder=tmp_path, num_seeds=2))
    lines = {line["method"]: line for line in found.table}
    assert list(lines) == ["self-fl-sums", "bounded, no noise", "local", "z = 2"]
    expected = epsilon(2.0, num_clients=40, participation=0.25, rounds=3, delta=sums.DELTA)
    assert lines["z = 2"][f"ε at δ = {sums.DELTA:g}"] == f"{expected:.1f}"
    shared = [float(lines[name]["global model"].split()[0]) for name in ("bounded, no noise", "z = 2")]
    assert shared[1] < shared[0] - 10  # forty clients are very few
    assert len(found.claims) == 1 + 2 * len(sums.NOISE)
    assert found.claims[-1].verdict in ("does not hold", "inconclusive")


def test_without_the_accountant_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("selffl.privacy._library", lambda: (_ for _ in ()).throw(sums.ConfigError("gone")))
    assert sums._epsilon(SHORT, 1.0, 40) == "not computed: dp-accounting is missing"
