"""Times as a manifest writes them: UTC, sortable as text, exact to the microsecond."""

from __future__ import annotations

from datetime import UTC, datetime

_FORM = "%Y-%m-%dT%H:%M:%S.%fZ"


def utc(time: datetime) -> str:
    """`2026-11-30T00:05:12.123456Z`."""
    return time.astimezone(UTC).strftime(_FORM)


def utc_of_ns(time_ns: int) -> str:
    """The same for nanoseconds since 1970, cut to microseconds."""
    whole = datetime.fromtimestamp(time_ns // 10**9, UTC)
    return utc(whole.replace(microsecond=time_ns // 1000 % 10**6))


def ns_of_utc(time: str | None) -> int | None:
    """Nanoseconds since 1970 of a time as `utc` writes it; None for anything else."""
    try:
        parsed = datetime.strptime(time or "", _FORM).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(parsed.replace(microsecond=0).timestamp()) * 10**9 + parsed.microsecond * 1000
