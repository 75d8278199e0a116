"""Which clips make the rows of the wake-word federation: who gets them, and how each row is to be rendered.

All of it follows from the table of clips and a seed; no sound is read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from selffl.data.audio import Index
from selffl.data.devices import DEVICES, NUM_ROOMS, ROW_SAMPLES, Takes
from selffl.errors import DataError

Integers = npt.NDArray[np.int64]
Cell = tuple[int, int]  # type of device, state

WAKE_WORD = "alexa"
ALARMS = ("clock_alarm", "siren", "church_bells")
STATES = ("normal", "playback", "alarm")
NORMAL, PLAYBACK, ALARM = range(3)
TRAIN, TEST = range(2)

# Rows of types A to E in each state: the paper's table of sample sizes.  A and C have no alarm.
TABLE = np.array(
    [[43922, 28852, 10404, 76804, 51097], [12011, 4223, 4336, 21511, 10985], [0, 646, 0, 1427, 1318]],
)
POSITIVE_SHARE = 0.25  # of training rows; the paper does not give its own
TEST_RENDERINGS = (3, 8)  # of each test clip in each state: of another sound, of the wake word
# dB below full scale, of a clip's loudest half second.  Clips are not left as loud as they are: in the median, those of
# the wake word are 3 dB quieter than those of the other wake words, which has nothing to do with what is said.
LEVELS_DB = (-34.0, -22.0)
BACKGROUND_DB = -20.0  # dB, of a clip of background noise relative to speech
CUT_SAMPLES = 1600  # samples, 0.1 s, that a clip may lose at either end
NOISES_DB = (-40.0, -14.0)  # below full scale, of a room; so loud that a network trained on all rows errs often enough
SNRS_DB = {PLAYBACK: (0.0, 15.0), ALARM: (0.0, 10.0)}  # dB: a clip's loudest half second over the bed's window
SPEECH_BEDS = 0.5  # share of playback rows whose bed is speech; the others' is a sound of ESC-50


def groups_of(index: Index) -> Integers:
    """Number of each clip's group: a speaker, a freesound id, or the clip where neither is known."""
    names = [
        f"{source} {speaker}" if speaker else f"clip {clip}"
        for clip, (source, speaker) in enumerate(zip(index.source, index.speaker, strict=True))
    ]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _kinds(index: Index) -> npt.NDArray[np.str_]:
    """What each clip is for: the wake word, another one, speech, background, a bed, or an alarm."""
    kind = np.where(index.source == "picovoice_wake_word_benchmark", index.label, "speech")
    kind = np.where(index.label == "_silence_", "background", kind)
    kind = np.where(index.label == "noise", np.where(np.isin(index.word, ALARMS), "alarm", "bed"), kind)
    return kind.astype(np.str_)


@dataclass(frozen=True)
class Deal:
    """Who has which clip: its part, its type of device, its group and what it is for."""

    part: Integers
    device: Integers
    group: Integers
    kind: npt.NDArray[np.str_]

    def clips(self, part: int, device: int, *kinds: str) -> Integers:
        """Numbers of the clips of these kinds."""
        return np.flatnonzero((self.part == part) & (self.device == device) & np.isin(self.kind, kinds))

    def negatives(self, part: int, device: int) -> Integers:
        """Clips of anything but the wake word, beds apart."""
        others = set(self.kind.tolist()) - {WAKE_WORD, "bed", "alarm"}
        return self.clips(part, device, *others)


def deal(index: Index, seed: int) -> Deal:
    """Clips by group to parts and types: two thirds for training, in the paper's proportions; the others evenly."""
    group, kind = groups_of(index), _kinds(index)
    _, first, size = np.unique(group, return_index=True, return_counts=True)
    kind_of_group = kind[first]  # two freesound ids are both bed and alarm: they stay together
    part, device = np.zeros(len(first), dtype=np.int64), np.zeros(len(first), dtype=np.int64)
    for name in np.unique(kind_of_group):
        rng = np.random.default_rng([seed, zlib.crc32(str(name).encode())])
        members = rng.permutation(np.flatnonzero(kind_of_group == name))
        num_test = round(len(members) / 3)
        shares = {"alarm": TABLE[ALARM], "bed": TABLE[PLAYBACK]}.get(str(name), TABLE.sum(0))
        for number, some, share in (
            (TEST, members[:num_test], (shares > 0).astype(float)),
            (TRAIN, members[num_test:], shares.astype(float)),
        ):
            part[some] = number
            device[some] = share_out(size[some], share)
    return Deal(part[group], device[group], group, kind)


def share_out(sizes: Integers, shares: npt.NDArray[np.float64]) -> Integers:
    """Who gets each thing, for sums of sizes near to the shares; largest first, to who lacks most."""
    lacking = shares / shares.sum() * sizes.sum()
    lacking[shares == 0] = -np.inf
    owner = np.zeros(len(sizes), dtype=np.int64)
    for thing in np.argsort(-sizes, kind="stable"):
        owner[thing] = lacking.argmax()
        lacking[owner[thing]] -= sizes[thing]
    return owner


def cells() -> list[Cell]:
    """The pairs of type and state there are, in the order in which rows are rendered."""
    return [(device, state) for device in range(len(DEVICES)) for state in range(len(STATES)) if TABLE[state, device]]


def _clips_of_rows(dealt: Deal, cell: Cell, part: int, scale: float, rng: np.random.Generator) -> Integers:
    """The clip of each row of a cell, all of its type's about equally often; other sounds, then the wake word."""
    device, state = cell
    num_rows = round(float(TABLE[state, device]) * scale)
    num_positive = round(POSITIVE_SHARE * num_rows)
    chosen = []
    for label, clips, count in (
        (0, dealt.negatives(part, device), num_rows - num_positive),
        (1, dealt.clips(part, device, WAKE_WORD), num_positive),
    ):
        if not len(clips):
            raise DataError(
                f"type {list(DEVICES)[device]} gets no clip of class {label} for {('training', 'testing')[part]}; "
                "expected one of each at least. The table lists too few: copy the whole of it."
            )
        if part == TEST:
            chosen.append(np.repeat(clips, TEST_RENDERINGS[label]))
        else:
            rounds = [rng.permutation(clips) for _ in range(count // len(clips) + 1)]
            chosen.append(np.concatenate(rounds)[:count])
    return np.concatenate(chosen)


def takes_of(index: Index, dealt: Deal, seed: int, cell: Cell, part: int, scale: float) -> Takes:
    """How each row of a cell is rendered; it depends on no other cell."""
    device, state = cell
    rng = np.random.default_rng([seed, device, part, state, 0])
    clip = _clips_of_rows(dealt, cell, part, scale, rng)
    count = len(clip)
    draw = rng.random((5, count))
    level = LEVELS_DB[0] + (LEVELS_DB[1] - LEVELS_DB[0]) * draw[0]
    start = np.floor(-CUT_SAMPLES + (ROW_SAMPLES - index.length[clip] + 2 * CUT_SAMPLES + 1) * draw[1]).astype(np.int64)
    bed, bed_start, bed_level = np.full(count, -1), np.zeros(count, dtype=np.int64), np.full(count, -np.inf)
    if state != NORMAL:
        bed = _beds(dealt, cell, part, clip, rng)
        spare = np.maximum(index.length[bed] - ROW_SAMPLES, 0) + 1
        # A bed that is too short begins again within the window, wherever it has begun.
        spare = np.where(index.length[bed] < ROW_SAMPLES, index.length[bed], spare)
        bed_start = np.floor(spare * draw[2]).astype(np.int64)
        low, high = SNRS_DB[state]
        bed_level = level - (low + (high - low) * draw[3])
    return Takes(
        clip=clip,
        place=start,
        level=level + np.where(dealt.kind[clip] == "background", BACKGROUND_DB, 0.0),
        bed=bed,
        bed_start=bed_start,
        bed_level=bed_level,
        room=rng.integers(NUM_ROOMS, size=count),
        room_noise=NOISES_DB[0] + (NOISES_DB[1] - NOISES_DB[0]) * draw[4],
    )


def _beds(dealt: Deal, cell: Cell, part: int, clip: Integers, rng: np.random.Generator) -> Integers:
    """A bed for each row, from those of its type and part; never the row's own clip."""
    device, state = cell
    sounds = dealt.clips(part, device, "alarm" if state == ALARM else "bed")
    if not len(sounds):
        raise DataError(
            f"type {list(DEVICES)[device]} gets no bed of the state {STATES[state]}; expected one for each part. The "
            "table lists too few: copy the whole of it."
        )
    bed = rng.choice(sounds, len(clip))
    if state == PLAYBACK:
        speech = np.setdiff1d(dealt.negatives(part, device), dealt.clips(part, device, "background"))
        if len(speech) > 1:
            number = rng.integers(len(speech), size=len(clip))
            number = np.where(speech[number] == clip, (number + 1) % len(speech), number)
            bed = np.where(rng.random(len(clip)) < SPEECH_BEDS, speech[number], bed)
    return bed
