"""Write the names that a shell completes, as the registries have them, to src/selffl/cli/names.json (`make names`)."""

from __future__ import annotations

import json
from dataclasses import fields

from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, STUDY_METHODS, STUDY_OPTION
from selffl.cli.names import FILE
from selffl.data import DATA_SETS
from selffl.runs.trackers import TRACKERS
from selffl.studies import STUDIES
from selffl.studies.problems import PROBLEMS


def text() -> str:
    """The content of the file."""
    names = {
        "problems": list(PROBLEMS),
        "data_sets": list(DATA_SETS),
        "studies": list(STUDIES),
        "trackers": list(TRACKERS),
        "default_algorithm": DEFAULT_ALGORITHM,
        "study_methods": list(STUDY_METHODS),
        "study_option": list(STUDY_OPTION),
        "algorithms": {name: [field.name for field in fields(make())] for name, make in ALGORITHMS.items()},  # type: ignore[arg-type]
        "personalises": {name: make().personalises for name, make in ALGORITHMS.items()},
        "sources": {name: make().source for name, make in ALGORITHMS.items()},
        "alone": [name for name, make in ALGORITHMS.items() if not make().is_federated],
    }
    return json.dumps(names, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
