"""The stand-in for the paper's private audio: clips dealt out to made-up devices, and rendered."""

import itertools
import shutil

import made_up_clips
import numpy as np
import pytest
import torch

from selffl.data import audio, devices, spectrogram, wakeword_rows
from selffl.data import wakeword as module
from selffl.data.wakeword_rows import ALARM, NORMAL, PLAYBACK, SNRS_DB, TABLE, TEST, TRAIN
from selffl.errors import ConfigError, DataError

SMALL = 1 / 1500


@pytest.fixture(scope="module", autouse=True)
def made_up(tmp_path_factory):
    """Made-up recordings, and rows rendered from them, in folders of their own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("wakeword")
        patch.chdir(folder)  # away from the real files
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(wakeword_rows, "TEST_RENDERINGS", (1, 2))
        yield made_up_clips.write(folder, patch)


@pytest.fixture(scope="module")
def fed():
    return module.wakeword(scale=SMALL)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "selffl" / "wakeword"


@pytest.fixture
def full_cache(fed, empty_cache, made_up):
    """A copy of what was rendered for the rows of ``fed``."""
    shutil.copytree(made_up.parent / "cache" / "selffl" / "wakeword", empty_cache)
    return empty_cache


def loaded_index():
    return audio.index_file().load()


# --------------------------------------------------------------------------------------------------------------- clips


@pytest.mark.parametrize("seed", range(4))
def test_no_group_is_in_two_parts_or_with_two_types(seed):
    index = loaded_index()
    dealt = wakeword_rows.deal(index, seed)
    names = [f"{s} {p}" if p else f"clip {n}" for n, (s, p) in enumerate(zip(index.source, index.speaker, strict=True))]
    homes = {}
    for name, part, device in zip(names, dealt.part, dealt.device, strict=True):
        homes.setdefault(name, set()).add((int(part), int(device)))
    assert all(len(home) == 1 for home in homes.values())
    assert len(homes) == 60 + 15 + 30 + 15 + 12 + 21  # the id that is alarm and rain is one group


def test_a_third_is_for_testing_evenly_and_the_rest_in_the_papers_proportions():
    dealt = wakeword_rows.deal(loaded_index(), 0)
    wake = dealt.kind == "alexa"
    test = np.bincount(dealt.device[wake & (dealt.part == TEST)], minlength=5)
    train = np.bincount(dealt.device[wake & (dealt.part == TRAIN)], minlength=5)
    assert test.tolist() == [4] * 5
    expected = 40 * TABLE.sum(0) / TABLE.sum()
    assert np.abs(train - expected).max() < 1
    alarm = (dealt.kind == "alarm") & (dealt.part == TRAIN)
    assert set(dealt.device[alarm]) == {1, 3, 4}


def test_the_deal_depends_on_the_seed():
    first, again, other = (wakeword_rows.deal(loaded_index(), seed) for seed in (0, 0, 1))
    assert np.array_equal(first.part, again.part)
    assert np.array_equal(first.device, again.device)
    assert not np.array_equal(first.part, other.part)


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_the_papers_times_scale():
    about = module.describe(scale=1 / 64)
    for device, state in itertools.product(range(5), range(3)):
        here = (about.train.device == device) & (about.train.state == state)
        assert here.sum() == round(TABLE[state, device] / 64)
        assert abs(about.train.label[here].sum() - here.sum() / 4) <= 0.5
    assert len(about.train) == pytest.approx(267_536 / 64, abs=7)


def test_clips_are_used_equally_often_and_test_clips_in_every_state():
    index = loaded_index()
    dealt = wakeword_rows.deal(index, 0)
    about = module.describe(scale=1 / 64)
    for device, state in wakeword_rows.cells():
        for label in (0, 1):
            of = dealt.negatives if label == 0 else lambda *at: dealt.clips(*at, "alexa")
            here = (about.train.device == device) & (about.train.state == state) & (about.train.label == label)
            used = np.bincount(about.train.clip[here], minlength=len(index))[of(TRAIN, device)]
            assert used.sum() == here.sum()
            assert used.max() - used.min() <= 1
            here = (about.test.device == device) & (about.test.state == state) & (about.test.label == label)
            used = np.bincount(about.test.clip[here], minlength=len(index))[of(TEST, device)]
            assert set(used) == {(1, 2)[label]}
            assert used.sum() == here.sum()


@pytest.mark.parametrize("part", [TRAIN, TEST])
def test_a_row_is_made_of_what_its_type_and_part_have(part):
    index = loaded_index()
    dealt = wakeword_rows.deal(index, 0)
    for cell in wakeword_rows.cells():
        takes = wakeword_rows.takes_of(index, dealt, 0, cell, part, 1 / 100)
        device, state = cell
        for clip in (takes.clip, takes.bed[takes.bed >= 0]):
            assert (dealt.device[clip] == device).all()
            assert (dealt.part[clip] == part).all()
        assert (takes.place >= -1600).all()
        assert (takes.place + index.length[takes.clip] <= 24_000 + 1600).all()
        assert ((takes.room >= 0) & (takes.room < 8)).all()
        silent = dealt.kind[takes.clip] == "background"
        level = takes.level + 20 * silent
        assert ((level >= -34) & (level <= -22)).all()
        if state == NORMAL:
            assert (takes.bed == -1).all()
            continue
        low, high = SNRS_DB[state]
        assert ((level - takes.bed_level >= low) & (level - takes.bed_level <= high)).all()
        assert (takes.bed != takes.clip).all()
        assert set(dealt.kind[takes.bed]) <= ({"alarm"} if state == ALARM else {"bed", "speech", "computer"})
        if state == PLAYBACK and part == TRAIN and device == 3:
            assert 0.35 < (dealt.kind[takes.bed] != "bed").mean() < 0.65
            assert np.ptp(takes.place[index.length[takes.clip] == 16_000]) > 9000


def test_a_cell_depends_on_no_other():
    """Test rows do not know the scale, and other types none of this one's rows."""
    index = loaded_index()
    dealt = wakeword_rows.deal(index, 0)
    few, many = (wakeword_rows.takes_of(index, dealt, 0, (1, PLAYBACK), TEST, scale) for scale in (0.001, 0.01))
    assert all(np.array_equal(vars(few)[name], vars(many)[name]) for name in vars(few))
    other = wakeword_rows.takes_of(index, dealt, 1, (1, PLAYBACK), TEST, 0.001)  # another seed, the same clips
    assert not np.array_equal(few.level, other.level)


# ---------------------------------------------------------------------------------------------------------- federation


def test_the_federation_has_a_client_for_each_type(fed):
    assert fed.clients == list("ABCDE")
    assert fed.cluster.tolist() == [0, 1, 2, 3, 4]
    assert fed.num_classes == 2
    assert fed.train.features.dtype == torch.float32
    assert fed.train.features.shape[1:] == (1, 40, 76)
    assert fed.train.features.abs().max() <= 1
    rounded = np.array([[round(number * SMALL) for number in row] for row in TABLE.tolist()])
    assert fed.train.num_examples.tolist() == rounded.sum(0).tolist()
    assert fed.train.labels.dtype == torch.int64


def test_the_description_is_in_the_federations_order(fed):
    """Each row is one of the renderings that its type, state and clip have, rendered once more by themselves."""
    about = module.describe(scale=SMALL)
    index, clips = audio.load_clips()
    dealt = wakeword_rows.deal(index, 0)
    loud = devices.loudness(clips)
    for name, part in (("train", TRAIN), ("test", TEST)):
        rows, table = getattr(fed, name), getattr(about, name)
        assert np.array_equal(rows.labels.numpy(), table.label)
        assert np.array_equal(rows.owner.numpy(), table.device)
        for device, state in [(1, ALARM), (2, PLAYBACK)]:
            takes = wakeword_rows.takes_of(index, dealt, 0, (device, state), part, SMALL)
            rng = np.random.default_rng([0, device, part, state, 1])
            codes = devices.render(clips, loud, takes, list(devices.DEVICES.values())[device], rng)
            expected = spectrogram.features(codes)
            here = np.flatnonzero((table.device == device) & (table.state == state))
            assert len(here) == len(takes)
            left = list(range(len(takes)))
            for row in here:
                found = next(k for k in left if torch.equal(expected[k], rows.features[row]))
                assert takes.clip[found] == table.clip[row]
                left.remove(found)


def test_counts_tell_clips_from_rows(fed):
    about = module.describe(scale=SMALL)
    table = about.counts()
    assert sum(line["rows"] for line in table if line["part"] == "train") == len(fed.train.labels)
    assert sum(line["rows"] for line in table if line["part"] == "test") == len(fed.test.labels)
    line = next(x for x in table if (x["part"], x["type"], x["state"], x["label"]) == ("test", "B", "alarm", 1))
    assert (line["clips"], line["rows"]) == (4, 8)
    assert not [x for x in table if x["type"] in "AC" and x["state"] == "alarm"]


def test_the_source_makes_it_again(fed):
    options = dict(fed.source)
    assert options.pop("name") == "wakeword"
    assert options == {"seed": 0, "clients_per_type": 1, "scale": SMALL, "validation_fraction": 0.0}
    assert module.wakeword(**options).fingerprint() == fed.fingerprint()


def test_another_seed_is_another_federation(fed):
    other = module.wakeword(seed=1, scale=SMALL)
    assert other.train.num_examples.tolist() == fed.train.num_examples.tolist()
    assert other.fingerprint() != fed.fingerprint()


def test_several_clients_of_a_type_share_its_groups(fed):
    options = {"clients_per_type": 2, "scale": SMALL}
    many, about = module.wakeword(**options), module.describe(**options)
    assert many.clients == [f"{name}-{number}" for name in "ABCDE" for number in (1, 2)]
    assert many.cluster.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    group = wakeword_rows.groups_of(loaded_index())
    for name in ("train", "test"):
        rows, table, before = getattr(many, name), getattr(about, name), getattr(fed, name)
        owner = rows.owner.numpy()
        assert np.array_equal(owner // 2, table.device)
        assert rows.num_examples.view(5, 2).sum(1).tolist() == before.num_examples.tolist()
        for first, second in itertools.combinations(range(10), 2):
            assert not set(group[table.clip[owner == first]]) & set(group[table.clip[owner == second]])
        for client in range(10):
            assert set(rows.labels[rows.owner == client].tolist()) == {0, 1}
        # The same rows, whoever has them.
        assert rows.features.double().sum() == pytest.approx(float(before.features.double().sum()))


@pytest.mark.slow
def test_validation_takes_whole_groups_of_the_training_rows(fed):
    options = {"validation_fraction": 0.3, "scale": 1 / 500}
    with_some, about = module.wakeword(**options), module.describe(**options)
    group = wakeword_rows.groups_of(loaded_index())
    assert not set(group[about.train.clip]) & set(group[about.validation.clip])
    assert np.array_equal(with_some.validation.labels.numpy(), about.validation.label)
    assert with_some.validation.num_examples.min() > 0
    without = module.describe(scale=1 / 500)
    assert len(about.train) + len(about.validation) == len(without.train)
    assert 0.2 < len(about.validation) / len(without.train) < 0.45
    assert with_some.test.features.equal(fed.test.features)  # whatever the scale


# --------------------------------------------------------------------------------------------------------------- cache


def test_rows_are_rendered_once(fed, empty_cache, monkeypatch):
    fresh = module.wakeword(scale=SMALL)
    assert fresh.fingerprint() == fed.fingerprint()
    assert len(list(empty_cache.iterdir())) == 2  # nothing half written beside them
    with monkeypatch.context() as patch:
        patch.setattr(devices, "render", lambda *_: pytest.fail("rendered again"))
        assert module.wakeword(scale=SMALL).fingerprint() == fed.fingerprint()
        assert module.wakeword(scale=SMALL, clients_per_type=2).num_clients == 10  # others' rows, the same cache


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_cache_is_rendered_anew(fed, full_cache, damage):
    for path in full_cache.iterdir():
        content = bytearray(path.read_bytes())
        content[-5] ^= 0xFF
        path.write_bytes({"cut": content[:-50], "flip": content, "empty": b""}[damage])
    assert module.wakeword(scale=SMALL).fingerprint() == fed.fingerprint()
    assert module.wakeword(scale=SMALL).fingerprint() == fed.fingerprint()


def test_a_cache_that_cannot_be_written_is_done_without(fed, tmp_path, monkeypatch):
    (tmp_path / "selffl").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.wakeword(scale=SMALL).fingerprint() == fed.fingerprint()


def test_the_cache_knows_devices_recipe_and_recordings(monkeypatch):
    index = loaded_index()
    takes = [wakeword_rows.takes_of(index, wakeword_rows.deal(index, 0), 0, (1, ALARM), TEST, SMALL)]
    keys = {module._key(0, TEST, takes), module._key(1, TEST, takes), module._key(0, TRAIN, takes)}
    monkeypatch.setattr(module, "RECIPE", 0)
    keys.add(module._key(0, TEST, takes))
    louder = devices.Device(**(vars(devices.DEVICES["A"]) | {"gain": 9}))
    monkeypatch.setitem(devices.DEVICES, "A", louder)
    keys.add(module._key(0, TEST, takes))
    takes[0].level[0] += 1
    keys.add(module._key(0, TEST, takes))
    assert len(keys) == 6


# -------------------------------------------------------------------------------------------------------------- border


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed is -1; expected"),
        ({"scale": 0}, "scale is 0; expected a number above 0"),
        ({"scale": float("inf")}, "scale is inf; expected"),
        ({"clients_per_type": 0}, "clients_per_type is 0; expected a whole number"),
        ({"clients_per_type": 3}, "clients_per_type is 3; expected 2 at most, as type"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0; expected"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        module.describe(**({"scale": SMALL} | options))


def test_too_few_clips_are_one_line(made_up, tmp_path, monkeypatch):
    lines = (made_up / "index.csv").read_text().splitlines(keepends=True)
    (tmp_path / "kws").mkdir()
    for left_out, message in (("alexa", "gets no clip of class 1 for"), ("siren", "gets no bed of the state alarm")):
        text = "".join(line for line in lines if left_out not in line)
        (tmp_path / "kws" / "index.csv").write_text(text)
        monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
        monkeypatch.setattr(audio, "INDEX_SHA256", made_up_clips.digest(text.encode()))
        with pytest.raises(DataError, match=message):
            module.describe()
