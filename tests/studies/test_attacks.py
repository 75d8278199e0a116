"""The study of hostile clients on a tiny problem: who lies, what they say, and what is made of it."""

from dataclasses import replace

import pytest
import torch

from selffl.studies import attacks
from selffl.studies.attacked_problem import ATTACKS, LYING
from selffl.studies.attacks import DEFENCES, DIGITS_20, arms_of, attacks_study, honest_score
from selffl.studies.result import Job

TINY = replace(DIGITS_20, rounds=2, data_options={"test_fraction": 0.3, "num_clients": 5}, num_local_steps=5)


def sent(method, attack, share=0.4):
    """What five clients send in the first round, and who of them lies."""
    problem, uploads = replace(TINY, attack=attack, hostile_share=share, rounds=1), []
    method = problem.method(method)
    lying = LYING[method.name]

    class Heard(lying):
        def client_round(self, broadcast, memory, task):
            found = super().client_round(broadcast, memory, task)
            uploads.append(found[0])
            return found

    run = Heard(
        **vars(method), attack="flip" if attack == "none" else attack, liars=problem.liars(0) * (attack != "none")
    )
    replace(problem, attack="none")._train(run, 0, 0.0)
    return uploads[0], list(problem.liars(0))


def test_of_more_liars_the_first_are_those_of_fewer():
    fewer, more = (set(replace(DIGITS_20, hostile_share=share).liars(1)) for share in (0.1, 0.4))
    assert (len(fewer), len(more)) == (2, 8)
    assert fewer < more


@pytest.mark.parametrize(
    ("attack", "field", "of_honest"),
    [
        ("flip", "change", lambda change: -change),
        ("flip ×10", "change", lambda change: -10 * change),
        ("scale ×100", "change", lambda change: 100 * change),
        ("rows", "weight", lambda weight: torch.full_like(weight, 1e5)),
    ],
)
def test_liars_say_what_the_attack_is_called(attack, field, of_honest):
    honest, _ = sent("fedavg", "none")
    found, liars = sent("fedavg", attack)
    expected = getattr(honest, field).clone()
    expected[liars] = of_honest(expected[liars])
    torch.testing.assert_close(getattr(found, field), expected)


def test_colluders_say_the_same_and_noise_is_everybodys_own():
    found, liars = sent("fedavg", "colluding")
    moves = found.change / found.weight.unsqueeze(-1)
    torch.testing.assert_close(moves[liars[0]], moves[liars[1]])
    found, liars = sent("fedavg", "random")
    moves = found.change / found.weight.unsqueeze(-1)
    assert torch.nn.functional.cosine_similarity(moves[liars[0]], moves[liars[1]], dim=0).abs() < 0.2


def test_every_attack_is_tried_on_whom_it_concerns():
    tried = {(arm.algorithm, arm.settings["attack"]) for arm in arms_of((0.2,))} - {(name, "none") for name in DEFENCES}
    assert {attack for _, attack in tried} == set(ATTACKS)
    assert ("fedavg", "classes") not in tried
    assert ("self-fl-auto", "classes") in tried


def test_the_study_has_a_line_for_every_arm_and_measures_honest_clients(monkeypatch, tmp_path):
    monkeypatch.setattr(attacks, "DEFENCES", {"fedavg": ("clip",)})
    monkeypatch.setattr(attacks, "ATTACKS", ("flip ×10",))
    found = attacks_study(TINY, Job(num_seeds=2, folder=tmp_path), (0.2,))
    assert [line["defence"] for line in found.table] == ["none", "clip", "none", "clip"]
    assert [claim.text[:7] for claim in found.claims] == ["Target:", "Target:"]
    # One of five clients lies: the accuracy is that of the others' rows.
    runs = attacks.run_each(TINY, arms_of((0.2,)), range(2), Job(num_seeds=2, folder=tmp_path))
    outcome = runs["fedavg, flip ×10, 20%, none"][1]
    (liar,) = replace(TINY, hostile_share=0.2).liars(1)
    rest = [row for place, row in enumerate(outcome.clients) if place != liar]
    right = sum(row["accuracy"] * row["num_test"] for row in rest) / sum(row["num_test"] for row in rest)
    assert honest_score(TINY, outcome, 0.2, "accuracy") == pytest.approx(100 * right)
