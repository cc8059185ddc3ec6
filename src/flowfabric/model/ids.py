"""Id types: parsing, formatting and minting them, and the partition each id belongs to."""

import os
import re
import threading
import time
import uuid
from binascii import crc_hqx
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import NewType

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import check_text, has_space_or_control, shorten, shown

ExecutionId = NewType("ExecutionId", str)
LaneId = NewType("LaneId", str)
WorkerId = NewType("WorkerId", str)
WorkerInstanceId = NewType("WorkerInstanceId", str)
Namespace = NewType("Namespace", str)

FlowId = NewType("FlowId", uuid.UUID)
BudgetId = NewType("BudgetId", uuid.UUID)
QuotaPolicyId = NewType("QuotaPolicyId", uuid.UUID)
LeaseId = NewType("LeaseId", uuid.UUID)
AttemptId = NewType("AttemptId", uuid.UUID)
SignalId = NewType("SignalId", uuid.UUID)
WaitpointId = NewType("WaitpointId", uuid.UUID)
SuspensionId = NewType("SuspensionId", uuid.UUID)
EdgeId = NewType("EdgeId", uuid.UUID)

MAX_PARTITION_COUNT = 32768
MAX_LANE_BYTES = 64
MAX_WORKER_BYTES = 256
WORKER_PARTITIONS = 256

ID_FORMAT = "{fp:%d}:%s"
INDEX_PART, KEY_PART, UUID_PART = slice(4, -38), slice(-37), slice(-36, None)
"""The canonical text of an execution id and the positions of its parts.

For hot loops over batches; elsewhere use the functions below.
"""

_MAX_INDEX = 65535
_MAX_STORED_INDEX = 32767
_INDEX = re.compile(r"0|[1-9][0-9]{0,4}")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_HYPHENATED = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_CANONICAL_EXECUTION_ID = re.compile(r"\{fp:(?:0|[1-9][0-9]{0,3})\}:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")


def parse_execution_id(value: object) -> ExecutionId:
    """Return the canonical text of an execution id given in its canonical or plain form."""
    if type(value) is str and _CANONICAL_EXECUTION_ID.fullmatch(value):
        return ExecutionId(value)
    index, tag_end, uuid_text = "", "", ""
    if isinstance(value, str) and value.startswith("{fp:"):
        index, tag_end, uuid_text = value[4:].partition("}:")
    elif isinstance(value, str) and value.startswith("fp") and ":" not in value:
        index, tag_end, uuid_text = value[2:].partition("-")
    if not tag_end:
        raise _invalid_execution_id("MissingTag", value)
    if not _INDEX.fullmatch(index) or int(index) > _MAX_INDEX:
        raise _invalid_execution_id("InvalidPartitionIndex", value)
    if not _HYPHENATED.fullmatch(uuid_text):
        raise _invalid_execution_id("InvalidUuid", value)
    return format_execution_id(int(index), uuid_text.lower())


def plain_id(execution_id: ExecutionId | str) -> str:
    """Return the plain form of an execution id, `fp105-<uuid>`, which needs no quoting in URLs, shells and file names.

    Every operation accepts this form and answers with the canonical one.
    """
    partition, uuid_text = split_execution_id(parse_execution_id(execution_id))
    return f"fp{partition}-{uuid_text}"


def split_execution_id(execution_id: ExecutionId) -> tuple[int, str]:
    """Return the partition index and the UUID text of a parsed execution id."""
    return int(execution_id[INDEX_PART]), execution_id[UUID_PART]


def row_key(execution_id: ExecutionId) -> tuple[int, str]:
    """Return the partition index and the UUID text of a parsed execution id, as rows are keyed.

    A partition index that the column cannot hold is rejected.
    """
    check_storable(execution_id)
    return split_execution_id(execution_id)


def check_storable(execution_id: ExecutionId) -> None:
    """Reject a parsed execution id whose partition index the column cannot hold."""
    partition = int(execution_id[INDEX_PART])
    if partition > _MAX_STORED_INDEX:
        raise error(
            "invalid_input",
            f"execution_id: partition index {partition} exceeds i16 range; it must be at most {_MAX_STORED_INDEX}",
        )


def format_execution_id(partition: int, uuid: uuid.UUID | str) -> ExecutionId:
    """Return the execution id of a partition index and a UUID (or its canonical text)."""
    return ExecutionId(ID_FORMAT % (partition, uuid))


def id_prefix(partition: int) -> str:
    """Return the part of an execution id before the UUID."""
    return ID_FORMAT % (partition, "")


def partition_text(execution_id: ExecutionId) -> str:
    """Return the partition key at the start of an execution id."""
    return execution_id[KEY_PART]


def check_partition(execution_id: ExecutionId, count: int) -> int:
    """Return the partition index of a parsed execution id; reject one that this deployment does not have."""
    partition, _ = row_key(execution_id)
    if partition < count:
        return partition
    raise error(
        "invalid_input",
        f"execution_id: partition index {partition} is not below {count}, the number of partitions of this deployment;"
        " leave out execution_id, or mint one with flowfabric.ids",
    )


def _invalid_execution_id(reason: str, value: object) -> EngineError:
    return error(
        "invalid_input",
        f"{reason}: {shown(value)} is not an execution id; write {{fp:<number>}}:<uuid> or fp<number>-<uuid>",
    )


def _invalid_partition_key(reason: str, value: object) -> EngineError:
    return error(
        "invalid_input",
        f"{shorten(reason)}: {shown(value)} is not a partition key; write {{fp:<number>}}, {{b:<number>}} or "
        "{q:<number>}",
    )


def fnv1a_64(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash."""
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return digest


def log_digest(text: str) -> str:
    """Return eight hex digits that identify a text in logs."""
    digest = fnv1a_64(text.encode())
    return f"{(digest ^ (digest >> 32)) & 0xFFFFFFFF:08x}"


def flow_partition(flow_id: FlowId, count: int) -> int:
    """Return the partition index of a flow and of every execution in it."""
    return crc_hqx(flow_id.bytes, 0) % count


@lru_cache(maxsize=4096)
def lane_partition(lane_id: LaneId, count: int) -> int:
    """Return the partition index of an execution outside any flow."""
    return crc_hqx(lane_id.encode(), 0) % count


def budget_partition(budget_id: BudgetId, count: int) -> int:
    """Return the partition index of a budget."""
    return crc_hqx(budget_id.bytes, 0) % count


def quota_partition(quota_policy_id: QuotaPolicyId, count: int) -> int:
    """Return the partition index of a quota policy."""
    return crc_hqx(quota_policy_id.bytes, 0) % count


@lru_cache(maxsize=4096)
def worker_partition(worker_instance_id: WorkerInstanceId) -> int:
    """Return the partition index of a worker registry entry."""
    return fnv1a_64(worker_instance_id.encode()) % WORKER_PARTITIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """The number of logical partitions of a deployment, and how executions outside any flow are assigned to one."""

    flow: int = 256
    budget: int = 32
    quota: int = 32
    solo: Callable[[LaneId, int], int] = field(default=lane_partition, repr=False)

    def __post_init__(self) -> None:
        """Reject counts outside 1 to 32768."""
        for family in ("flow", "budget", "quota"):
            count = getattr(self, family)
            if type(count) is not int or not 1 <= count <= MAX_PARTITION_COUNT:
                raise error(
                    "invalid_input",
                    f"num_{family}_partitions: must be a whole number from 1 to {MAX_PARTITION_COUNT}, "
                    f"got {shown(count)}",
                )

    def of_lane(self, lane_id: LaneId) -> int:
        """Return the partition index of an execution on this lane that is outside any flow."""
        return self.solo(lane_id, self.flow)


class PartitionFamily(StrEnum):
    """What kind of object a partition key routes; executions share the partitions of flows."""

    FLOW = "fp"
    BUDGET = "b"
    QUOTA = "q"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionKey:
    """A partition as callers see it: `{fp:N}`, `{b:N}` or `{q:N}`."""

    family: PartitionFamily
    index: int

    def __str__(self) -> str:
        """Return the wire text."""
        return f"{{{self.family}:{self.index}}}"


def parse_partition_key(value: object) -> PartitionKey:
    """Return the partition key that a wire text encodes."""
    if not isinstance(value, str) or len(value) < 2 or value[0] != "{" or value[-1] != "}":
        raise _invalid_partition_key("MissingBraces", value)
    prefix, colon, index = value[1:-1].partition(":")
    if not colon:
        raise _invalid_partition_key("MalformedBody", value)
    if prefix not in set(PartitionFamily):
        raise _invalid_partition_key(f"UnknownFamilyPrefix({prefix})", value)
    if not _INDEX.fullmatch(index) or int(index) > _MAX_INDEX:
        raise _invalid_partition_key(f"InvalidIndex({index})", value)
    return PartitionKey(family=PartitionFamily(prefix), index=int(index))


def mint_for_flow(flow_id: uuid.UUID | str, partitions: Partitions) -> ExecutionId:
    """Mint the id of an execution that joins a flow."""
    return deterministic_for_flow(flow_id, uuid7(), partitions)


def mint_solo(lane_id: str, partitions: Partitions) -> ExecutionId:
    """Mint the id of an execution outside any flow."""
    return deterministic_solo(lane_id, uuid7(), partitions)


def deterministic_for_flow(flow_id: uuid.UUID | str, uuid: uuid.UUID | str, partitions: Partitions) -> ExecutionId:
    """Return the id of a flow member with the given UUID; the same arguments return the same id."""
    flow = FlowId(parse_uuid(flow_id, "flow_id"))
    return format_execution_id(flow_partition(flow, partitions.flow), parse_uuid(uuid, "uuid"))


def deterministic_solo(lane_id: str, uuid: uuid.UUID | str, partitions: Partitions) -> ExecutionId:
    """Return the id of an execution outside any flow with the given UUID; the same arguments return the same id."""
    return format_execution_id(partitions.of_lane(check_lane_id(lane_id)), parse_uuid(uuid, "uuid"))


_RANDOM = 2**60 - 1
# The digits after the version digit and before the random part, by tick within the millisecond.
_TICKS = tuple(f"{tick:03x}-8" for tick in range(4096))
_tick_lock = threading.Lock()
_last_tick = 0


def _reserve_ticks(count: int) -> int:
    # A tick is 1/4096 ms: 48 bits of milliseconds and the 12 bits after the version. No two ids share a tick, so
    # ids increase strictly within the process even if the clock stands still or steps back.
    global _last_tick
    now = time.time_ns() * 4096 // 1_000_000
    with _tick_lock:
        first = now if now > _last_tick else _last_tick + 1
        _last_tick = first + count - 1
    return first


def mint_uuid_texts(count: int) -> list[str]:
    """Mint increasing UUIDv7s as canonical texts, reading the clock and the random source once."""
    first = _reserve_ticks(count)
    random = os.urandom(8 * count).hex()
    minted: list[str] = []
    while (done := len(minted)) < count:
        millisecond, tick = divmod(first + done, 4096)
        head = f"{millisecond >> 16:08x}-{millisecond & 0xFFFF:04x}-7"
        ticks = _TICKS[tick : tick + count - done]
        places = range(16 * done, 16 * (done + len(ticks)), 16)
        minted += [
            f"{head}{text}{random[at : at + 3]}-{random[at + 3 : at + 15]}"
            for text, at in zip(ticks, places, strict=True)
        ]
    return minted


def uuid7() -> uuid.UUID:
    """Mint a UUIDv7 greater than every one this process minted before."""
    tick = _reserve_ticks(1)
    random = int.from_bytes(os.urandom(8), "big") & _RANDOM
    return uuid.UUID(int=(tick >> 12) << 80 | 7 << 76 | (tick & 0xFFF) << 64 | 8 << 60 | random)


def check_lane_id(value: object, field: str = "lane_id") -> LaneId:
    """Return the value if it is a lane id: 1 to 64 printable ASCII characters."""
    if not isinstance(value, str):
        raise error("invalid_input", f"{field}: must be text, got {shown(value)}")
    return _check_lane_text(value, field)


@lru_cache(maxsize=4096)
def _check_lane_text(value: str, field: str) -> LaneId:
    data = value.encode("utf-8", "surrogatepass")
    if not data:
        raise _invalid_lane(field, "Empty", value)
    if len(data) > MAX_LANE_BYTES:
        raise _invalid_lane(field, f"TooLong({len(data)})", value)
    for index, byte in enumerate(data):
        if not 0x20 <= byte <= 0x7E:
            raise _invalid_lane(field, f"NonPrintable({index})", value)
    return LaneId(value)


def _invalid_lane(field: str, reason: str, value: str) -> EngineError:
    return error(
        "invalid_input",
        f"{field}: {reason}: must be 1 to {MAX_LANE_BYTES} printable ASCII characters, got {shown(value)}",
    )


def check_worker_id(value: object, field: str) -> str:
    """Return the value if it is a worker id: 1 to 256 bytes without whitespace or control characters."""
    if not isinstance(value, str):
        raise error("invalid_input", f"{field}: must be text, got {shown(value)}")
    return _check_worker_text(value, field)


@lru_cache(maxsize=4096)
def _check_worker_text(value: str, field: str) -> str:
    check_text(value, field)
    if not value:
        raise error("invalid_input", f"{field}: must not be empty")
    if (size := len(value.encode())) > MAX_WORKER_BYTES:
        raise error("invalid_input", f"{field}: must be at most {MAX_WORKER_BYTES} bytes long in UTF-8, got {size}")
    if has_space_or_control(value):
        raise error("invalid_input", f"{field}: must not contain whitespace or control characters, got {shown(value)}")
    return value


def parse_uuid(value: object, field: str) -> uuid.UUID:
    """Return a UUID given as a UUID or as text."""
    if isinstance(value, uuid.UUID):
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return uuid.UUID(value)
    raise error("invalid_input", f"{field}: must be a UUID, got {shown(value)}")
