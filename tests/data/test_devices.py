"""What the made-up devices do to a sound, measured."""

import numpy as np
import pytest
import torch

from selffl.data import devices
from selffl.data.audio import Clips
from selffl.data.devices import DEVICES, ROW_SAMPLES, Takes

every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())


def clips_of(*sounds):
    length = np.array([len(sound) for sound in sounds])
    whole = np.concatenate([(sound * 32768).round().astype(np.int16) for sound in sounds])
    return Clips(whole, np.cumsum(length) - length, length)


def takes(count, **given):
    plain = {
        "clip": 0, "place": 0, "level": -26.0, "bed": -1, "bed_start": 0, "bed_level": -np.inf, "room": 0,
        "room_noise": -np.inf,
    }  # fmt: skip
    return Takes(**{name: np.full(count, value) for name, value in (plain | given).items()})


def decibels(power):
    return 10 * np.log10(power)


def sine(length, frequency=440, amplitude=0.1):
    return amplitude * np.sin(2 * np.pi * frequency * np.arange(length) / 16_000)


def test_a_clip_is_as_loud_as_its_loudest_half_second():
    rng = np.random.default_rng(0)
    sound = 0.01 * rng.standard_normal(20_000)
    sound[6000:14_000] *= 10
    clips = clips_of(sound, sine(16_000), sine(4000))  # the last is shorter than half a second
    slow = max((sound[start : start + 8000] ** 2).mean() for start in range(0, 12_001, 25))
    found = devices.loudness(clips)
    assert found[0] == pytest.approx(slow, rel=1e-2)
    assert found[1:] == pytest.approx([0.005, 0.005], rel=1e-2)


@pytest.mark.parametrize("place", [-1600, 0, 3000, 9600])
def test_a_clip_lies_at_its_place_at_its_level(place):
    clips = clips_of(sine(16_000))
    sound, beds = devices.mixture(clips, devices.loudness(clips), takes(1, place=place, level=-31.0))
    assert sound.shape == (1, ROW_SAMPLES)
    begin, end = max(place, 0), min(place + 16_000, ROW_SAMPLES)
    assert not sound[0, :begin].any()
    assert not sound[0, end:].any()
    inner = sound[0, begin + 160 : end - 160]  # within the fades
    assert decibels((inner**2).mean()) == pytest.approx(-31, abs=0.05)
    expected = clips.samples[begin + 160 - place : end - 160 - place].astype(float)
    assert np.corrcoef(inner, expected)[0, 1] == pytest.approx(1)
    assert not beds.any()


@pytest.mark.parametrize("snr", [-3.0, 0.0, 7.5, 15.0])
@pytest.mark.parametrize("length", [16_000, 32_000])
def test_the_mixture_has_its_signal_to_noise_ratio(snr, length):
    rng = np.random.default_rng(1)
    clips = clips_of(sine(24_000), 0.02 * rng.standard_normal(length) * np.linspace(0.2, 1, length))
    some = takes(3, bed=1, bed_start=5000, bed_level=-26 - snr)
    sound, beds = devices.mixture(clips, devices.loudness(clips), some)
    signal, noise = (sound[:, 160:-160] ** 2).mean(1), (beds**2).mean(1)
    assert decibels(signal / noise) == pytest.approx(np.full(3, snr), abs=0.05)
    raw = np.roll(clips.samples[24_000:], -5000)
    again = np.concatenate([raw, raw])[:ROW_SAMPLES]
    assert np.corrcoef(beds[0], again)[0, 1] == pytest.approx(1)


def test_a_silent_bed_stays_silent():
    clips = clips_of(sine(24_000), np.zeros(32_000))
    _, beds = devices.mixture(clips, devices.loudness(clips), takes(1, bed=1, bed_level=-20.0))
    assert not beds.any()


@every_device
def test_rooms_die_away_as_stated(device):
    echoes = devices.rooms(device)
    assert (echoes[:, 0] == 1).all()
    energy = (echoes[:, 1:] ** 2).sum(1)
    assert decibels(1 / energy) == pytest.approx(np.full(8, device.direct), abs=1e-6)
    blocks = (echoes[:, 200:5000].reshape(8, 12, 400) ** 2).mean((0, 2))
    fall = np.polyfit(np.arange(12) * 400 / 16_000, decibels(blocks), 1)[0]
    assert -60 / fall == pytest.approx(device.reverberation, rel=0.1)
    assert len(np.unique(echoes[:, 100])) == 8


@every_device
def test_the_response_is_the_table(device):
    gain = 20 * np.log10(devices.response(device))
    frequency = np.fft.rfftfreq(devices.FOURIER_SAMPLES, 1 / 16_000)
    for centre, expected in zip(devices.OCTAVES_HZ, device.response, strict=True):
        assert gain[np.abs(frequency - centre).argmin()] == pytest.approx(expected, abs=0.3)
    between = np.abs(frequency - np.sqrt(1000 * 2000)).argmin()
    assert gain[between] == pytest.approx((device.response[4] + device.response[5]) / 2, abs=0.01)


@every_device
def test_the_filter_is_a_convolution(device):
    """Without noise, what is heard is the sound, the room and the response one after the other."""
    quiet = devices.Device(**(vars(device) | {"noise": -400.0, "hum": 0.0}))
    sound = np.zeros((1, ROW_SAMPLES))
    sound[0, 5000:9000] = sine(4000, 1000, 0.05)
    found = devices.heard(sound, quiet, takes(1, room=3), np.random.default_rng(0)).numpy()[0]
    echoed = np.convolve(sound[0], devices.rooms(device)[3])[: devices.FOURIER_SAMPLES]
    echoed = np.concatenate([echoed, np.zeros(devices.FOURIER_SAMPLES - len(echoed))])
    expected = np.fft.irfft(np.fft.rfft(echoed) * devices.response(device), devices.FOURIER_SAMPLES)[:ROW_SAMPLES]
    np.testing.assert_allclose(found, expected * 10 ** (device.gain / 20), atol=1e-9)


@every_device
def test_the_noise_floor_is_as_stated(device):
    silence = np.zeros((20, ROW_SAMPLES))
    rng = np.random.default_rng(0)
    heard = devices.heard(silence, device, takes(20), rng).numpy()
    assert decibels((heard**2).mean()) == pytest.approx(device.noise + device.gain, abs=0.7)
    louder = devices.heard(silence, device, takes(20, room_noise=-30.0), rng).numpy()
    frequency = np.maximum(np.fft.rfftfreq(devices.FOURIER_SAMPLES, 1 / 16_000), 20)
    room = 1e-3 * np.average(devices.response(device) ** 2, weights=1 / frequency)
    expected = decibels(room + 10 ** (device.noise / 10)) + device.gain
    assert decibels((louder**2).mean()) == pytest.approx(expected, abs=0.7)


def test_what_is_too_loud_is_clipped():
    heard = devices.heard(
        np.ones((1, ROW_SAMPLES)) * sine(ROW_SAMPLES, 1000, 3.0), DEVICES["D"], takes(1), np.random.default_rng(0)
    )
    assert float(heard.abs().max()) == 1


def test_batches_change_nothing(monkeypatch):
    rng = np.random.default_rng(2)
    clips = clips_of(sine(24_000), 0.1 * rng.standard_normal(16_000))
    some = takes(7, room_noise=-50.0)
    loud = devices.loudness(clips)
    whole = devices.render(clips, loud, some, DEVICES["E"], np.random.default_rng(5))
    assert whole.shape == (7, 40, 76)
    monkeypatch.setattr(devices, "BATCH_ROWS", 3)
    assert torch.equal(devices.render(clips, loud, some, DEVICES["E"], np.random.default_rng(5)), whole)
    assert not torch.equal(devices.render(clips, loud, some, DEVICES["E"], np.random.default_rng(6)), whole)
