"""A yardstick after Quest (arXiv 2406.10774): the step's own queries against the summaries, before the step attends.

What any predictor could reach with this summary if its guess were perfect and transfers took no time.
"""

from __future__ import annotations

from .lookahead import Lookahead


class Quest(Lookahead):
    """Chooses by the summary's masses of the present step."""

    foreground = True
