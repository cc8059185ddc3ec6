"""Durations as users write them: seconds or a timedelta."""

import math
from datetime import timedelta

from flowfabric.model.errors import error
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.text import shown

Duration = float | timedelta
"""Seconds or a timedelta."""


def milliseconds(given: object, name: str, *, least: int = 0, most: int = MAX_MS, advice: str = "") -> int:
    """Return a duration in milliseconds; one that is out of range is refused, with the advice if it is too short."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    is_finite = isinstance(seconds, int) or (isinstance(seconds, float) and math.isfinite(seconds))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not is_finite:
        raise error("invalid_input", f"{name}: expected seconds or a timedelta, got {shown(given)}")
    if seconds > most / 1000:
        raise error("invalid_input", f"{name}: must be at most {most // 1000} seconds, got {shown(given)}")
    duration = round(seconds * 1000)
    if seconds < 0 or duration < least:
        rule = f"at least {least / 1000} seconds" if least else "0 seconds or more"
        raise error("invalid_input", f"{name}: must be {rule}, got {shown(given)}{advice}")
    return duration
