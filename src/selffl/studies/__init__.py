"""The paper's figures and tables, and what goes beyond them, one study each, by the names the command line uses."""

from selffl.studies.adapters import ADAPTERS
from selffl.studies.attacks import ATTACKS_STUDY
from selffl.studies.audio import AUDIO
from selffl.studies.auto import BEYOND
from selffl.studies.convergence import CONVERGENCE
from selffl.studies.images import DEMO, IMAGES
from selffl.studies.limits import LIMITS
from selffl.studies.multilevel import MULTILEVEL
from selffl.studies.newcomers import NEWCOMERS
from selffl.studies.published_tables import PUBLISHED
from selffl.studies.regimes import REGIMES
from selffl.studies.result import Study, StudyResult
from selffl.studies.sums import SUMS
from selffl.studies.synthetic import SYNTHETIC
from selffl.studies.text import TEXT

STUDIES: dict[str, Study] = {
    study.id: study
    for study in (
        LIMITS,
        CONVERGENCE,
        *SYNTHETIC,
        *IMAGES,
        *TEXT,
        *AUDIO,
        *SUMS,
        *BEYOND,
        *REGIMES,
        NEWCOMERS,
        MULTILEVEL,
        ATTACKS_STUDY,
        *PUBLISHED,
        *ADAPTERS,
    )
}

__all__ = ["DEMO", "STUDIES", "Study", "StudyResult"]
