import itertools
import re
import shlex
import threading
import time
import urllib.parse
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model import ids
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.ids import (
    BudgetId,
    ExecutionId,
    FlowId,
    LaneId,
    PartitionFamily,
    PartitionKey,
    Partitions,
    QuotaPolicyId,
    WorkerInstanceId,
)
from model.cases import for_each

UUID = "550e8400-e29b-41d4-a716-446655440000"
V7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def test_a_canonical_execution_id_is_returned_as_it_is() -> None:
    text = f"{{fp:42}}:{UUID}"
    assert ids.partition_text(ExecutionId(text)) == "{fp:42}"
    assert ids.id_prefix(42) + UUID == ids.format_execution_id(42, UUID) == text
    assert ids.parse_execution_id(text) is text


def test_an_upper_case_uuid_is_read_as_lower_case() -> None:
    assert ids.parse_execution_id(f"{{fp:42}}:{UUID.upper()}") == f"{{fp:42}}:{UUID}"


def test_parsing_does_not_check_the_partition_count() -> None:
    assert ids.parse_execution_id(f"{{fp:65535}}:{UUID}") == f"{{fp:65535}}:{UUID}"


@for_each(
    "value, reason",
    [
        (UUID, "MissingTag"),
        ("", "MissingTag"),
        (None, "MissingTag"),
        (7, "MissingTag"),
        (f"{{fp:7:{UUID}", "MissingTag"),
        (f"fp:7:{UUID}", "MissingTag"),
        (f"{{b:7}}:{UUID}", "MissingTag"),
        (f"{{fp:}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:x}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:-1}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:+1}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp: 1}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:007}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:65536}}:{UUID}", "InvalidPartitionIndex"),
        (f"{{fp:١}}:{UUID}", "InvalidPartitionIndex"),
        ("{fp:7}:", "InvalidUuid"),
        ("{fp:7}:not-a-uuid", "InvalidUuid"),
        (f"{{fp:7}}:{UUID}\n", "InvalidUuid"),
        (f"{{fp:7}}:{UUID.replace('-', '')}", "InvalidUuid"),
        (f"{{fp:7}}:{{{UUID}}}", "InvalidUuid"),
        (f"{{fp:7}}:{UUID[:-1]}\0", "InvalidUuid"),
        (f"FP7-{UUID}", "MissingTag"),
        (f"7-{UUID}", "MissingTag"),
        ("fp7", "MissingTag"),
        (f"fp7:{UUID}", "MissingTag"),
        (f"fp-{UUID}", "InvalidPartitionIndex"),
        (f"fp07-{UUID}", "InvalidPartitionIndex"),
        (f"fp+7-{UUID}", "InvalidPartitionIndex"),
        (f"fp65536-{UUID}", "InvalidPartitionIndex"),
        ("fp7-", "InvalidUuid"),
        (f"fp7-{UUID}\n", "InvalidUuid"),
        (f"fp7-{UUID.replace('-', '')}", "InvalidUuid"),
        (f"fp7--{UUID}", "InvalidUuid"),
    ],
)
def test_a_malformed_execution_id_is_rejected_with_the_fault(value: object, reason: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ids.parse_execution_id(value)
    assert refused.value.code == "invalid_input"
    assert refused.value.detail == (
        f"{reason}: {value!r} is not an execution id; write {{fp:<number>}}:<uuid> or fp<number>-<uuid>"
    )


def test_the_plain_form_is_read_as_the_canonical_one() -> None:
    assert ids.parse_execution_id(f"fp42-{UUID}") == f"{{fp:42}}:{UUID}"
    assert ids.parse_execution_id(f"fp0-{UUID.upper()}") == f"{{fp:0}}:{UUID}"
    assert ids.parse_execution_id(f"fp65535-{UUID}") == f"{{fp:65535}}:{UUID}"


@for_each("form", ["{{fp:42}}:{}", "fp42-{}"])
@for_each("uuid_text", [UUID, UUID.upper()])
def test_either_form_is_converted_to_the_plain_form(form: str, uuid_text: str) -> None:
    assert ids.plain_id(form.format(uuid_text)) == f"fp42-{UUID}"


def test_only_an_execution_id_has_a_plain_form() -> None:
    with pytest.raises(InvalidInputError, match="MissingTag: 'x' is not an execution id"):
        ids.plain_id("x")


@given(st.integers(0, 65535), st.uuids())
def test_the_plain_form_needs_no_quoting_and_parses_to_the_id(partition: int, value: uuid.UUID) -> None:
    made = ids.format_execution_id(partition, value)
    plain = ids.plain_id(made)
    assert urllib.parse.quote(plain, safe="") == shlex.quote(plain) == plain
    assert ids.parse_execution_id(plain) == made
    assert ids.parse_execution_id(f"fp{partition}-{str(value).upper()}") == made


@given(st.from_regex(r"fp[0-9]{0,6}-?[0-9a-fA-F-]{0,40}", fullmatch=True))
def test_text_like_a_plain_form_is_one_or_is_rejected(text: str) -> None:
    try:
        parsed = ids.parse_execution_id(text)
    except InvalidInputError:
        return
    assert ids.plain_id(parsed) == text.lower()


def test_an_error_shortens_a_huge_value() -> None:
    with pytest.raises(InvalidInputError) as refused:
        ids.parse_execution_id("x" * 1_000_000)
    assert len(str(refused.value)) < 350


@given(st.integers(0, 65535), st.uuids())
def test_an_execution_id_survives_splitting_and_rebuilding(partition: int, value: uuid.UUID) -> None:
    made = ids.format_execution_id(partition, value)
    assert ids.parse_execution_id(made) == made
    assert ids.split_execution_id(made) == (partition, str(value))
    assert ids.format_execution_id(*ids.split_execution_id(made)) == made


@given(st.text())
def test_any_text_is_an_execution_id_or_is_rejected(text: str) -> None:
    try:
        parsed = ids.parse_execution_id(text)
    except InvalidInputError:
        return
    assert ids.format_execution_id(*ids.split_execution_id(parsed)) == parsed


def test_a_partition_this_deployment_does_not_have_is_rejected() -> None:
    assert ids.check_partition(ExecutionId(f"{{fp:255}}:{UUID}"), 256) == 255
    with pytest.raises(InvalidInputError, match="invalid_input") as refused:
        ids.check_partition(ExecutionId(f"{{fp:256}}:{UUID}"), 256)
    assert "i16" not in str(refused.value)
    with pytest.raises(InvalidInputError, match="exceeds i16 range"):
        ids.check_partition(ExecutionId(f"{{fp:32768}}:{UUID}"), 256)
    assert ids.check_partition(ExecutionId(f"{{fp:32767}}:{UUID}"), 32768) == 32767


def test_the_checksum_is_crc_16_xmodem() -> None:
    assert ids.lane_partition(LaneId("123456789"), 32_768) == 0x31C3


@for_each(
    "lane, crc, partition",
    [("default", 0xD656, 86), ("workers-a", 0x2EC1, 193), ("workers-b", 0x1EA2, 162)],
)
def test_a_lane_has_the_partition_of_its_checksum(lane: str, crc: int, partition: int) -> None:
    assert ids.lane_partition(LaneId(lane), 32_768) == crc % 32_768
    assert ids.lane_partition(LaneId(lane), 256) == partition


@for_each(
    "flow, crc, of_256, of_32",
    [
        ("00000000-0000-0000-0000-000000000000", 0, 0, 0),
        ("550e8400-e29b-41d4-a716-446655440000", 0x9018, 24, 24),
        ("11111111-2222-3333-4444-555555555555", 0x45B5, 181, 21),
    ],
)
def test_flows_budgets_and_quotas_hash_the_bytes_of_their_uuid(flow: str, crc: int, of_256: int, of_32: int) -> None:
    value = uuid.UUID(flow)
    assert ids.flow_partition(FlowId(value), 32_768) == crc % 32_768
    assert ids.flow_partition(FlowId(value), 256) == of_256
    assert ids.budget_partition(BudgetId(value), 32) == of_32
    assert ids.quota_partition(QuotaPolicyId(value), 32) == of_32


def test_a_worker_has_the_partition_of_its_fnv_hash() -> None:
    assert ids.fnv1a_64(b"worker-a") == 0x2490EEC5902763FD
    assert ids.worker_partition(WorkerInstanceId("worker-a")) == 253
    assert ids.log_digest("worker-a") == "b4b78d38"


@given(st.uuids())
def test_the_checksum_equals_a_bitwise_implementation(value: uuid.UUID) -> None:
    crc = 0
    for byte in value.bytes:
        crc ^= byte << 8
        for _ in range(8):
            crc = ((crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    assert ids.flow_partition(FlowId(value), 32_768) == crc % 32_768


def test_the_default_counts_are_256_flow_and_32_budget_and_quota_partitions() -> None:
    assert (Partitions().flow, Partitions().budget, Partitions().quota) == (256, 32, 32)


@for_each("family", ["flow", "budget", "quota"])
@for_each("count", [0, -1, 32769, True, 2.0, "8", None])
def test_a_partition_count_outside_1_to_32768_is_rejected(family: str, count: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"num_{family}_partitions"):
        Partitions(**{family: count})


def test_the_limits_of_partition_counts_are_inclusive() -> None:
    assert Partitions(flow=1, budget=32768, quota=1).budget == 32768


def test_executions_of_a_flow_share_its_partition() -> None:
    flow = uuid.UUID(UUID)
    minted = ids.mint_for_flow(flow, Partitions())
    assert ids.split_execution_id(minted)[0] == 24
    assert ids.parse_execution_id(minted) is minted
    fixed = ids.deterministic_for_flow(flow, uuid.UUID(int=1), Partitions())
    assert fixed == "{fp:24}:00000000-0000-0000-0000-000000000001"
    assert fixed == ids.deterministic_for_flow(UUID, uuid.UUID(int=1), Partitions())


def test_executions_outside_a_flow_are_assigned_by_the_solo_function() -> None:
    lane = "default"
    assert ids.split_execution_id(ids.mint_solo(lane, Partitions()))[0] == 86
    spread = Partitions(solo=lambda _lane, count: count - 1)
    assert ids.split_execution_id(ids.mint_solo(lane, spread))[0] == 255
    fixed = ids.deterministic_solo(lane, uuid.UUID(int=1), Partitions())
    assert fixed == "{fp:86}:00000000-0000-0000-0000-000000000001"
    assert fixed == ids.deterministic_solo(lane, str(uuid.UUID(int=1)), Partitions())
    with pytest.raises(InvalidInputError, match="lane_id: Empty"):
        ids.mint_solo("", Partitions())
    with pytest.raises(InvalidInputError, match="uuid: must be a UUID"):
        ids.deterministic_solo(lane, "1", Partitions())


def test_minted_uuids_are_version_7_with_the_current_time() -> None:
    before = time.time_ns() // 1_000_000
    texts = ids.mint_uuid_texts(10)
    after = time.time_ns() // 1_000_000
    assert all(V7.fullmatch(text) for text in texts)
    for value in map(uuid.UUID, texts):
        assert value.version == 7
        assert before <= value.int >> 80 <= after + 1


def test_minted_uuids_increase_from_batch_to_batch() -> None:
    minted = [*ids.mint_uuid_texts(5_000), *ids.mint_uuid_texts(1), *ids.mint_uuid_texts(5_000)]
    assert all(before < after for before, after in itertools.pairwise(minted))


def test_minted_uuids_increase_even_if_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids.uuid7()
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000_000_000_000)
    assert before < ids.uuid7() < ids.uuid7()


def test_threads_never_mint_the_same_uuid() -> None:
    minted: list[str] = []
    threads = [
        threading.Thread(target=lambda: minted.extend(text for _ in range(50) for text in ids.mint_uuid_texts(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({text[:18] for text in minted}) == 4000


def test_minting_zero_uuids_returns_an_empty_list() -> None:
    assert ids.mint_uuid_texts(0) == []


@for_each(
    "text, family, index",
    [
        ("{fp:0}", PartitionFamily.FLOW, 0),
        ("{b:31}", PartitionFamily.BUDGET, 31),
        ("{q:65535}", PartitionFamily.QUOTA, 65535),
    ],
)
def test_a_partition_key_survives_parsing_and_printing(text: str, family: PartitionFamily, index: int) -> None:
    key = ids.parse_partition_key(text)
    assert key == PartitionKey(family=family, index=index)
    assert str(key) == text


@for_each(
    "value, reason",
    [
        ("", "MissingBraces"),
        (None, "MissingBraces"),
        ("{", "MissingBraces"),
        ("fp:1", "MissingBraces"),
        ("{fp:1", "MissingBraces"),
        ("{}", "MalformedBody"),
        ("{fp}", "MalformedBody"),
        ("{p:1}", "UnknownFamilyPrefix(p)"),
        ("{:1}", "UnknownFamilyPrefix()"),
        ("{\ud800:1}", "UnknownFamilyPrefix(\\ud800)"),
        ("{fp:}", "InvalidIndex()"),
        ("{fp:x}", "InvalidIndex(x)"),
        ("{b:65536}", "InvalidIndex(65536)"),
        ("{q:-1}", "InvalidIndex(-1)"),
    ],
)
def test_a_malformed_partition_key_is_rejected_with_the_fault(value: object, reason: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ids.parse_partition_key(value)
    assert refused.value.code == "invalid_input"
    assert str(refused.value.detail).startswith(f"{reason}: ")


@for_each("lane", ["default", "a", "a b~", "x" * 64])
def test_a_lane_id_is_printable_ascii(lane: str) -> None:
    assert ids.check_lane_id(lane) == lane


@for_each(
    "lane, reason",
    [
        ("", "Empty"),
        ("x" * 65, "TooLong(65)"),
        ("é" * 33, "TooLong(66)"),
        ("ab\n", "NonPrintable(2)"),
        ("\x7f", "NonPrintable(0)"),
        ("aé", "NonPrintable(1)"),
        ("a\ud800", "NonPrintable(1)"),
    ],
)
def test_any_other_lane_id_is_rejected_with_the_fault(lane: object, reason: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ids.check_lane_id(lane)
    assert refused.value.code == "invalid_input"
    rule = f"must be 1 to 64 printable ASCII characters, got {lane!r}"
    assert refused.value.detail == f"lane_id: {reason}: {rule}"


def test_a_lane_id_must_be_text() -> None:
    for lane in (None, ["default"]):
        with pytest.raises(InvalidInputError, match="invalid_input: lane_id: must be text, got "):
            ids.check_lane_id(lane)


@for_each("worker", ["w", "worker-1@host:8", "wörker", "x" * 256])
def test_a_worker_id_is_text_without_spaces(worker: str) -> None:
    assert ids.check_worker_id(worker, "worker_id") == worker


@for_each(
    "worker",
    ["", " ", "a b", "a\tb", "a\u00a0b", "a\u2003b", "a\x00b", "a\x85b", "x" * 257, "é" * 129, "\ud800", None, 3],
)
def test_any_other_worker_id_is_rejected_with_its_field(worker: object) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: worker_instance_id: "):
        ids.check_worker_id(worker, "worker_instance_id")


def test_a_uuid_is_accepted_as_uuid_and_as_text() -> None:
    value = uuid.UUID(UUID)
    assert ids.parse_uuid(value, "flow_id") is value
    assert ids.parse_uuid(UUID, "flow_id") == value
    assert ids.parse_uuid(UUID.upper(), "flow_id") == value
    assert ids.parse_uuid(value.hex, "flow_id") == value


@for_each("value", ["", "x", UUID + "0", "_" + UUID[1:], " " + UUID[1:], b"x" * 16, 5, None])
def test_any_other_uuid_is_rejected_with_its_field(value: object) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: flow_id: must be a UUID"):
        ids.parse_uuid(value, "flow_id")
