"""The wake-word federation of the real recordings, where they are."""

import hashlib

import numpy as np
import pytest

from selffl.data import audio, devices, wakeword_rows
from selffl.data.wakeword import describe
from selffl.data.wakeword_rows import NORMAL, TEST
from selffl.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def index():
    try:
        return audio.index_file().load()
    except DataError as error:
        pytest.skip(str(error))


def test_real_clips_are_dealt_out_as_stated(index):
    dealt = wakeword_rows.deal(index, 0)
    wake = dealt.kind == "alexa"
    by_type = [np.bincount(dealt.device[wake & (dealt.part == part)], minlength=5).tolist() for part in (0, 1)]
    assert by_type == [[44, 26, 12, 78, 50], [21] * 5]
    assert len(dealt.negatives(TEST, 0)) == pytest.approx(170, abs=4)
    for first in range(5):
        for part in (0, 1):
            mine = (dealt.device == first) & (dealt.part == part)
            assert not set(index.speaker[mine]) & set(index.speaker[~mine]) - {""}
    # Two freesound ids are both an alarm and something else; each is one group.
    assert len(np.unique(dealt.group[index.label == "noise"])) == len(np.unique(index.speaker[index.label == "noise"]))


def test_real_rows_are_counted_as_stated(index):
    about = describe()
    assert len(about.train) == 8361
    assert (about.train.label == 1).sum() == 2090
    assert len(np.unique(about.train.clip[about.train.label == 1])) == 210
    assert len(np.unique(about.test.clip[about.test.label == 1])) == 105
    for device, state in wakeword_rows.cells():
        here = (about.test.device == device) & (about.test.state == state)
        assert about.test.label[here].sum() == 8 * 21


def test_real_rows_stay_as_they_were(index):
    """A checksum of a few rows: where it changes, so must the recipe's number, or old caches are taken for new."""
    try:
        clips = audio.load_clips()[1]
    except (DataError, ConfigError) as error:
        pytest.skip(str(error))
    takes = wakeword_rows.takes_of(index, wakeword_rows.deal(index, 0), 0, (4, NORMAL), TEST, 1 / 32)
    some = devices.Takes(**{name: values[-10:] for name, values in vars(takes).items()})
    codes = devices.render(clips, devices.loudness(clips), some, devices.DEVICES["E"], np.random.default_rng(0))
    assert codes.float().std() > 20
    found = hashlib.sha256(codes.numpy().tobytes()).hexdigest()
    assert found == "aff061c3715ade52bb1215252d1cf30de104948af96d61db55711107d6c09ee2"
