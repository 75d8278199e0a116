"""A small folder of made-up recordings, with the columns and kinds of the real ones."""

import csv
import hashlib

import numpy as np
import soundfile

from selffl.data import audio

PICOVOICE, COMMANDS, ESC = "picovoice_wake_word_benchmark", "speech_commands_v0.02_test", "ESC-50"


def tone(rng, length):
    """A steady sine of any pitch and level, with a little noise."""
    sine = np.sin(2 * np.pi * rng.uniform(150, 3000) * np.arange(length) / 16_000 + rng.uniform(0, 6))
    sound = rng.uniform(0.02, 0.5) * (sine + 0.05 * rng.standard_normal(length))
    return (sound.clip(-1, 1) * 32767).astype(np.int16)


def rows():
    """File, length, source, label, word, speaker of each clip."""
    for number in range(60):
        yield "ww_alexa.flac", 24_000 - 1000 * (number % 3 == 0), PICOVOICE, "alexa", "alexa", ""
    for _ in range(15):
        yield "ww_computer.flac", 24_000, PICOVOICE, "computer", "computer", ""
    for number in range(60):
        yield "sc_yes.flac", 16_000, COMMANDS, "yes", "yes", f"speaker{number % 30}"
    for _ in range(15):
        yield "sc_silence.flac", 16_000, COMMANDS, "_silence_", "", ""
    for number in range(14):
        yield "noise_siren.flac", 32_000, ESC, "noise", "siren", f"{number // 2 if number < 4 else number}"
    for number in range(22):
        yield "noise_rain.flac", 32_000, ESC, "noise", "rain", f"{number + 13}"  # id 13 is an alarm as well


def write(folder, monkeypatch):
    """Write the folder ``kws``, and make its checksums the expected ones."""
    place = folder / "kws"
    place.mkdir()
    rng = np.random.default_rng(0)
    recordings: dict[str, list[np.ndarray]] = {}
    lines = []
    for name, length, *about in rows():
        pieces = recordings.setdefault(name, [])
        lines.append([name, sum(map(len, pieces)), length, *about, "", 0])
        pieces.append(tone(rng, length))
    with (place / "index.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["file", "start", "length", "source", "label", "word", "speaker", "orig", "orig_start"])
        writer.writerows(lines)
    samples = {name: np.concatenate(pieces) for name, pieces in recordings.items()}
    for name, sound in samples.items():
        soundfile.write(place / name, sound, 16_000, subtype="PCM_16")
    monkeypatch.setenv("SELFFL_DATA", str(folder))
    expect(place, samples, monkeypatch)
    return place


def expect(place, samples, monkeypatch):
    """Make the checksums of what lies there the expected ones."""
    monkeypatch.setattr(audio, "INDEX_SHA256", digest((place / "index.csv").read_bytes()))
    monkeypatch.setattr(audio, "FLAC_SHA256", {name: digest((place / name).read_bytes()) for name in samples})
    monkeypatch.setattr(audio, "SAMPLES_SHA256", {name: digest(sound.tobytes()) for name, sound in samples.items()})


def digest(content):
    return hashlib.sha256(content).hexdigest()
