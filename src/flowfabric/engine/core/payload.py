"""Where payloads are stored: small ones on the execution's row, large ones in tables of their own."""

from collections.abc import Iterable

INLINE_PAYLOAD_BYTES = 256
"""Longer inputs are stored in execution_input and longer results in execution_result.

The fill factor of executions leaves most of a page free for updates, so large rows would multiply the pages, and
Postgres moves nothing out of a row (TOAST) below 2 kB.
"""


def any_large(payloads: Iterable[bytes | None]) -> bool:
    """Whether a payload is too large for the row."""
    return max(map(len, filter(None, payloads)), default=0) > INLINE_PAYLOAD_BYTES
