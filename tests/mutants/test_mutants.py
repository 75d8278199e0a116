"""The runner of mutants on a made-up function: what a test notices, what it does not, and what none runs."""

import sys
import types
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from mutations import code_of, mutants_of

SOURCE = '''
class Box:
    """What is not changed: "text", numbers of classes, defaults."""

    size = 3

    def grown(self, by=1):
        """Larger."""
        if by < 0:
            raise ValueError(f"by is {by}; expected 0 or more.")
        return self.size + by
'''


def test_a_mutant_differs_in_one_place_of_one_function(tmp_path):
    path = tmp_path / "made_up.py"
    path.write_text(SOURCE, encoding="utf-8")
    mutants = mutants_of(path)
    assert [mutant.change for mutant in mutants] == [
        "by < 0 → by <= 0",
        "0 → 1",
        "raise ValueError(f'by is {by}; expected 0 or more.') → pass",
        "return self.size + by → return None",
        "self.size + by → self.size - by",
    ]
    assert [(mutant.function, list(mutant.lines)) for mutant in mutants[1:3]] == [
        ("Box.grown", [9]),
        ("Box.grown", [10]),
    ]
    module = types.ModuleType("made_up")
    exec(compile(SOURCE, path, "exec"), module.__dict__)
    found = []
    for mutant in mutants:
        module.Box.grown.__code__ = code_of(mutant)
        answers = []
        for by in (-1, 0, 2):
            try:
                answers.append(module.Box().grown(by))
            except ValueError:
                answers.append("refused")
        found.append(answers)
    assert found == [
        ["refused", "refused", 5], ["refused", "refused", 5], [2, 3, 5], ["refused", None, None], ["refused", 3, 1],
    ]  # fmt: skip
