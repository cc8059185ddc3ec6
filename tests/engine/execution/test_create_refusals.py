"""What create refuses, with which code and detail; a refusal writes nothing."""

import itertools
from typing import Any

from engine.state import CREATES, all_cases, claim, items, new, refused
from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, InvalidInputError
from flowfabric.model.execution import Created

UUID = "11111111-2222-3333-4444-555555555555"
LONE_SURROGATE = "half \ud800 a character"

Refusal = tuple[dict[str, Any], str, str]

IDS: list[Refusal] = [
    ({"execution_id": UUID}, "invalid_input", "MissingTag"),
    ({"execution_id": ""}, "invalid_input", "MissingTag"),
    ({"execution_id": 5}, "invalid_input", "MissingTag"),
    ({"execution_id": f"{{fp:1{UUID}"}, "invalid_input", "MissingTag"),
    ({"execution_id": f"{{fp:}}:{UUID}"}, "invalid_input", "InvalidPartitionIndex"),
    ({"execution_id": f"{{fp:-1}}:{UUID}"}, "invalid_input", "InvalidPartitionIndex"),
    ({"execution_id": f"{{fp:07}}:{UUID}"}, "invalid_input", "InvalidPartitionIndex"),
    ({"execution_id": f"{{fp:65536}}:{UUID}"}, "invalid_input", "InvalidPartitionIndex"),
    ({"execution_id": "{fp:7}:nothing"}, "invalid_input", "InvalidUuid"),
    ({"execution_id": f"{{fp:7}}:{UUID}0"}, "invalid_input", "InvalidUuid"),
    ({"execution_id": f"{{fp:256}}:{UUID}"}, "invalid_input", "256 is not below 256"),
    ({"execution_id": f"{{fp:32767}}:{UUID}"}, "invalid_input", "32767 is not below 256"),
    ({"execution_id": f"{{fp:32768}}:{UUID}"}, "invalid_input", "exceeds i16 range"),
    ({"lane_id": ""}, "invalid_input", "lane_id: Empty"),
    ({"lane_id": "x" * 65}, "invalid_input", "lane_id: TooLong(65)"),
    ({"lane_id": "ab\n"}, "invalid_input", "lane_id: NonPrintable(2)"),
    ({"lane_id": "ab\x7f"}, "invalid_input", "lane_id: NonPrintable(2)"),
    ({"lane_id": "lü"}, "invalid_input", "lane_id: NonPrintable(1)"),
    ({"lane_id": "\0"}, "invalid_input", "lane_id: NonPrintable(0)"),
    ({"lane_id": LONE_SURROGATE}, "invalid_input", "lane_id: NonPrintable(5)"),
    ({"lane_id": None}, "invalid_input", "lane_id"),
]

VALUES: list[Refusal] = [
    *(({"priority": wrong}, "invalid_input", "priority") for wrong in (None, "1", 1.5, True)),
    *(({"input_payload": wrong}, "invalid_input", "input_payload") for wrong in (None, "text", 5, [1])),
    *(({"delay_until": wrong}, "invalid_input", "delay_until") for wrong in ("1", 1.5, True, 2**63)),
    *(({"delay_ms": wrong}, "invalid_input", "delay_ms") for wrong in ("1", 1.5, True, -1, 2**53)),
    ({"delay_ms": 1, "delay_until": 1}, "invalid_input", "delay_ms: must be absent if delay_until is given"),
    *(({"execution_deadline_at": wrong}, "invalid_input", "execution_deadline_at") for wrong in ("1", 1.5, 2**63)),
]

TEXTS: list[Refusal] = [
    ({field: wrong}, "invalid_input", field)
    for field in ("namespace", "execution_kind", "creator_identity", "payload_encoding", "idempotency_key")
    for wrong in ("nul \0", LONE_SURROGATE, 5, b"bytes")
] + [
    ({"idempotency_key": "k" * 1025}, "invalid_input", "idempotency_key: must be at most 1024 bytes long in UTF-8"),
    ({"idempotency_key": "ü" * 513}, "invalid_input", "idempotency_key: must be at most 1024 bytes long in UTF-8"),
    ({"namespace": "n" * 1025}, "invalid_input", "namespace: must be at most 1024 bytes long in UTF-8"),
    ({"namespace": None}, "invalid_input", "namespace"),
    ({"namespace": []}, "invalid_input", "namespace"),
    ({"execution_kind": None}, "invalid_input", "execution_kind"),
    ({"creator_identity": None}, "invalid_input", "creator_identity"),
]

_WRONG_KEYS = ["", "Cairn.x", "1cairn.x", "cairn", "cairn.", "cairn..x", ".cairn", "ca-irn.x", "cairn.Foo"]
_WRONG_KEYS += ["cairn.foo bar", "cairn.foo-bar", "cairn.'x", 'cairn."x', "cairn.\\x", "cairn.x\n", "cäirn.x"]

TAGS: list[Refusal] = [
    *(({"tags": {"app.fine": "yes", key: "x"}}, "invalid_tag_key", f"tag key {key!r} must be") for key in _WRONG_KEYS),
    ({"tags": {5: "x"}}, "invalid_tag_key", "5"),
    *(({"tags": {"app.x": wrong}}, "invalid_input", "tags.app.x") for wrong in ("\0", LONE_SURROGATE, 5, None)),
    ({"tags": ["app.x"]}, "invalid_input", "tags"),
]


def _requiring(tokens: object) -> dict[str, object]:
    return {"policy": {"routing_requirements": {"required_capabilities": tokens}}}


POLICIES: list[Refusal] = [
    ({"policy": "{"}, "invalid_policy_json", "malformed"),
    ({"policy": b"\xff"}, "invalid_policy_json", "malformed"),
    ({"policy": "[]"}, "invalid_policy_json", "policy"),
    ({"policy": 5}, "invalid_policy_json", "policy"),
    ({"policy": {"routing_requirements": []}}, "invalid_policy_json", "routing_requirements:not_object"),
    ({"policy": {"routing_requirements": "gpu"}}, "invalid_policy_json", "routing_requirements:not_object"),
    ({"policy": {"retry_policy": {"max_retries": -1}}}, "invalid_policy_json", "retry_policy.max_retries"),
    ({"policy": {"retry_policy": {"backoff": {"type": "odd"}}}}, "invalid_policy_json", "retry_policy.backoff.type"),
    (_requiring("gpu"), "invalid_capabilities", "required:not_array"),
    (_requiring({"gpu": 1}), "invalid_capabilities", "required:not_array"),
    (_requiring([5]), "invalid_capabilities", "required:non_string_token"),
    (_requiring([LONE_SURROGATE]), "invalid_capabilities", "required:non_string_token"),
    (_requiring(["gpu", ""]), "invalid_capabilities", "required:empty_token"),
    (_requiring(["gpu,cpu"]), "invalid_capabilities", "required:comma_in_token"),
    (_requiring(["g pu"]), "invalid_capabilities", "required:control_or_whitespace"),
    (_requiring(["gpu\x00"]), "invalid_capabilities", "required:control_or_whitespace"),
    (_requiring(["gpu\x7f"]), "invalid_capabilities", "required:control_or_whitespace"),
    (_requiring([f"t{at}" for at in range(257)]), "invalid_capabilities", "required:too_many_tokens"),
    (_requiring(["x" * 4097]), "invalid_capabilities", "required:too_many_bytes"),
    (_requiring(["x" * 2048, "y" * 2048]), "invalid_capabilities", "required:too_many_bytes"),
]

EVERY_CASE = [*IDS, *VALUES, *TEXTS, *TAGS, *POLICIES]


async def test_each_refusal_has_its_code_and_writes_nothing(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        with all_cases() as case:
            for (name, create), (overrides, code, detail) in itertools.product(CREATES.items(), EVERY_CASE):
                with case(f"{name} {overrides!r:.100}"):
                    # Names that are not registered, so that registering them would show.
                    arguments = new(**{"lane_id": "unknown lane", "namespace": "unknown namespace", **overrides})
                    refusal = await refused(create(engine, **arguments), code, detail)
                    assert isinstance(refusal, InvalidInputError)
                    assert not refusal.retryable


async def test_refused_items_are_answered_in_place_and_the_others_created(engine: Engine, rows: Rows) -> None:
    arguments: list[dict[str, Any]] = []
    for overrides, _, _ in EVERY_CASE:
        arguments += [new(), new(**overrides)]
    verdicts = await engine.create_many(items(*arguments))
    for (_, code, detail), good, bad in zip(EVERY_CASE, verdicts[::2], verdicts[1::2], strict=True):
        assert isinstance(good, Created)
        assert isinstance(bad, EngineError)
        assert bad.code == code
        assert detail in str(bad.detail)
    assert len(await rows.of("execution")) == len(EVERY_CASE)


async def test_a_value_just_within_its_limit_is_accepted(engine: Engine) -> None:
    long = _requiring(["x" * 2047, "y" * 2048])
    within: list[dict[str, Any]] = [
        {"lane_id": "x" * 64},
        {"idempotency_key": "k" * 1024},
        {"namespace": "ü" * 512},
        {"tags": {"a.b": "1", "a1_2.x": "2", "app.sub.field": "3", "cairn.session_id": "4", "a._": "5"}},
        _requiring([f"t{at}" for at in range(256)]),
        _requiring([f"t{at}" for at in range(256)] * 2),
        long,
        _requiring(["größe=✓"]),
    ]
    for nth, (lane, create) in enumerate(CREATES.items()):
        for overrides in [*within, {"execution_id": f"{{fp:255}}:{nth}{UUID[1:]}"}]:
            arguments = {"lane_id": f"{lane} within", **overrides}
            assert isinstance(await create(engine, **new(**arguments)), Created), overrides
        made = await create(engine, **new(lane_id=lane, **long))
        assert await claim(engine, lane, capabilities=("x" * 2047,)) == []
        (claimed,) = await claim(engine, lane, capabilities=("x" * 2047, "y" * 2048))
        assert claimed.execution_id == made.execution_id
