"""A sample of the kill points of Flower's server and clients; `make flower-kill-points` tries all of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from flower_kill_points import clients_killed

from kill_points import Experiment


@pytest.mark.slow
def test_server_and_clients_killed_together_go_on_to_the_same_bits(tmp_path):
    experiment = Experiment("both", tmp_path)
    assert experiment.points > 200
    for number in (60, 190):
        assert experiment.differences(number) == [], f"killed at operation {number} of {experiment.points}"


@pytest.mark.slow
def test_a_client_that_is_killed_is_a_message_lost():
    verdicts = list(clients_killed(step=29))
    assert len(verdicts) > 2
    assert all(is_good for _, is_good in verdicts), verdicts
