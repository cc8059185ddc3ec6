"""What a caller submits."""

from collections.abc import Mapping

import msgspec

from flowfabric.model.policy import ExecutionPolicy


class NewExecution(msgspec.Struct, kw_only=True):
    """An execution to be created, as one of many; the fields are the arguments of create_execution."""

    namespace: str
    lane_id: str
    execution_kind: str
    input_payload: bytes
    priority: int
    creator_identity: str
    execution_id: str | None = None
    payload_encoding: str | None = None
    idempotency_key: str | None = None
    tags: Mapping[str, str] | None = None
    policy: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None
