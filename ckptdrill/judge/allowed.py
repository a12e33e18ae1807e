"""What a restored run may differ by, and from which launches that is known.

Rows that judge by a band (first updates, loss, the next save) are given one of these: the runs that
the band is measured from, and what speaks for or against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptdrill.judge.trajectory import Trajectory


@dataclass(frozen=True)
class Allowed:
    """`repeats` are further runs of the source, `control` an uninterrupted one at the target: their
    distance from the reference times `safety` is the band, of which the control's part is never
    more than the row's ceiling. `noisy` says why the reference does not reproduce itself,
    `unmeasured` which planned run did not record every compared step.
    """

    repeats: Sequence[Trajectory] = ()
    control: Trajectory | None = None
    safety: float = 3.0
    noisy: str | None = None
    unmeasured: str | None = None
    loss_ceiling: float = math.inf
    update_ceiling: float = math.inf
