"""Recordings, their clips and their spectrograms."""

import sys

import made_up_clips
import numpy as np
import pytest
import soundfile
import torch

from selffl.data import audio, spectrogram
from selffl.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from the real files
    return made_up_clips.write(tmp_path, monkeypatch)


def trust(folder, monkeypatch, name="sc_yes.flac"):
    """A changed file with the right checksum."""
    content = (folder / name).read_bytes()
    monkeypatch.setitem(audio.FLAC_SHA256, name, made_up_clips.digest(content))


# ------------------------------------------------------------------------------------------------------------- reading


def test_clips_are_the_pieces_the_table_names(folder):
    index, clips = audio.load_clips()
    assert len(index) == len(clips.start) == 186
    assert len(clips.samples) == index.length.sum()
    for row in (0, 1, 70, 130, 185):
        whole = soundfile.read(folder / str(index.file[row]), dtype="int16")[0]
        wanted = whole[index.start[row] : index.start[row] + index.length[row]]
        assert np.array_equal(clips.samples[clips.start[row] : clips.start[row] + clips.length[row]], wanted)


def test_a_decoded_copy_needs_no_soundfile(folder, monkeypatch):
    index, clips = audio.load_clips()
    paths = audio.decode_to(folder, largest_part=2_000_000)
    assert len(paths) > 2
    assert [path.name for path in paths] == [f"clips-{number}.npz" for number in range(1, len(paths) + 1)]
    for name in audio.FLAC_SHA256:
        (folder / name).unlink()
    monkeypatch.setitem(sys.modules, "soundfile", None)
    again_index, again = audio.load_clips()
    assert np.array_equal(again_index.start, index.start)
    assert np.array_equal(again.samples, clips.samples)
    assert again.samples.dtype == np.int16


@pytest.mark.slow
def test_a_decoded_copy_is_checked(folder):
    (path,) = audio.decode_to(folder)
    content = dict(np.load(path))
    content["sc_yes.flac"][7] += 1
    np.savez_compressed(path, **content)
    with pytest.raises(DataError, match=r"^.*clips-1.npz holds samples of sc_yes.flac with SHA-256 .*; expected"):
        audio.load_clips()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"^.*clips-1.npz cannot be read .*Decode them again\.$"):
        audio.load_clips()


def test_without_soundfile_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r'^[^\n]*soundfile[^\n]*pip install "selffl\[audio\]"[^\n]*$'):
        audio.load_clips()


def test_a_damaged_recording_is_one_line(folder, monkeypatch):
    path = folder / "sc_yes.flac"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"^[^\n]*sc_yes.flac has SHA-256 [^\n]*; expected [^\n]*copy it again\.$"):
        audio.load_clips()
    trust(folder, monkeypatch)  # even then
    with pytest.raises(DataError, match=r"^[^\n]*sc_yes.flac [^\n]*It is damaged[^\n]*$"):
        audio.load_clips()
    path.write_bytes(b"no sound at all")
    trust(folder, monkeypatch)
    with pytest.raises(DataError, match=r"^[^\n]*sc_yes.flac cannot be read \([^\n]*\); expected a recording as FLAC"):
        audio.load_clips()
    path.unlink()
    with pytest.raises(DataError, match=r"^sc_yes.flac of kws was not found in"):
        audio.load_clips()


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16_000, 2)])
def test_another_rate_or_more_channels_are_refused(folder, monkeypatch, rate, channels):
    soundfile.write(folder / "sc_yes.flac", np.zeros((100, channels), dtype=np.int16), rate)
    trust(folder, monkeypatch)
    with pytest.raises(DataError, match=rf"has {rate} samples a second in {channels} channel\(s\); expected 16000"):
        audio.load_clips()


def test_a_row_beyond_the_end_is_one_line(folder, monkeypatch):
    path = folder / "index.csv"
    text = path.read_text()
    changed = text.replace("sc_yes.flac,0,16000", "sc_yes.flac,0,99999999", 1)
    path.write_text(changed)
    with pytest.raises(DataError, match=r"index.csv has SHA-256"):
        audio.load_clips()
    monkeypatch.setattr(audio, "INDEX_SHA256", made_up_clips.digest(changed.encode()))
    with pytest.raises(DataError, match=r"^[^\n]*row 75 is 99999999 samples of sc_yes.flac from 0; expected a piece"):
        audio.load_clips()
    path.write_text(text.replace("start", "begin", 1))
    monkeypatch.setattr(audio, "INDEX_SHA256", made_up_clips.digest(path.read_bytes()))
    with pytest.raises(DataError, match=r"^[^\n]*index.csv cannot be read \('start'\); expected a table of clips"):
        audio.load_clips()


def test_files_are_listed_for_the_command_line(folder):
    assert [file.names[0] for file in audio.files()] == ["index.csv", *audio.FLAC_SHA256]
    for file in audio.files():
        file.load()
    audio.decode_to(folder)
    assert [file.names[0] for file in audio.files()] == ["index.csv", "clips-1.npz"]


def test_the_real_clips():
    try:
        index, clips = audio.load_clips()
    except (DataError, ConfigError) as error:
        pytest.skip(str(error))
    assert len(index) == 3149
    assert (index.label == "alexa").sum() == 315
    assert (index.label == "noise").sum() == 176
    assert len(np.unique(index.speaker[index.source == "speech_commands_v0.02_test"])) == 233 + 1  # and none
    assert len(clips.samples) == index.length.sum()


# --------------------------------------------------------------------------------------------------------- spectrograms


def test_the_filter_bank_is_that_of_the_formula():
    """Once more, with loops, and feet and peaks in Hz turned into mel by the natural logarithm."""

    def to_mel(hertz):
        return 2595 / np.log(10) * np.log1p(hertz / 700)

    edges = [to_mel(60) + (to_mel(7600) - to_mel(60)) * k / 41 for k in range(42)]
    expected = np.zeros((257, 40))
    for number in range(257):
        place = to_mel(number * 31.25)
        for band in range(40):
            left, middle, right = edges[band : band + 3]
            if left < place <= middle:
                expected[number, band] = (place - left) / (middle - left)
            elif middle < place < right:
                expected[number, band] = (right - place) / (right - middle)
    np.testing.assert_allclose(spectrogram.filter_bank().numpy(), expected, atol=1e-12)
    assert (expected.sum(0) > 0.3).all()  # no band is empty
    centres = spectrogram.band_centres().numpy()
    np.testing.assert_allclose([to_mel(centre) for centre in centres], edges[1:-1], atol=1e-9)


@pytest.mark.parametrize("band", [3, 10, 25, 38])
def test_a_sine_stands_in_its_band_at_its_level(band):
    frequency = float(spectrogram.band_centres()[band])
    time = torch.arange(24_000, dtype=torch.float64) / 16_000
    sound = 10 ** (-30 / 20) * torch.sin(2 * torch.pi * frequency * time)
    levels = spectrogram.log_mel(sound[None])[0]
    assert levels.shape == (40, 76)
    inner = levels[:, 2:-2].mean(1)
    assert int(inner.argmax()) == band
    assert float(inner[band]) == pytest.approx(-30, abs=2)
    far = (torch.arange(40) - band).abs() > 8
    assert float(inner[far].max()) < -65


def test_spectrograms_agree_with_a_plain_transform():
    """Frame by frame with NumPy's transform, the window and the reflection at the ends written out."""
    sound = np.random.default_rng(0).normal(0, 0.05, 3200)
    padded = np.concatenate([sound[256:0:-1], sound, sound[-2:-258:-1]])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)
    expected = []
    for start in range(0, 3201, 320):
        power = np.abs(np.fft.rfft(padded[start : start + 512] * window)) ** 2 / 128**2
        expected.append(10 * np.log10(power @ spectrogram.filter_bank().numpy()))
    found = spectrogram.log_mel(torch.from_numpy(sound)[None])[0].numpy()
    np.testing.assert_allclose(found, np.clip(np.stack(expected, 1), -80, 0), atol=1e-8)


def test_bytes_are_the_decibels_in_steps():
    sound = torch.from_numpy(np.random.default_rng(1).normal(0, 0.1, (2, 24_000)))
    codes = spectrogram.codes(sound)
    assert codes.dtype == torch.uint8
    step = 80 / 255
    assert float((spectrogram.decibels(codes) - spectrogram.log_mel(sound)).abs().max()) <= step / 2 + 1e-5
    ends = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    assert spectrogram.features(ends).tolist() == [[[[-1.0, 1.0]]]]
    assert spectrogram.features(codes).shape == (2, 1, 40, 76)
    assert spectrogram.codes(torch.zeros(1, 24_000, dtype=torch.float64)).max() == 0
