"""Lists of flows: filters, order, pages and what a page costs."""

from typing import Any

import pytest

from engine.flow.graphs import BuiltFlow
from engine.state import all_cases, refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.read import flow_listing
from flowfabric.model.flow import FlowEntry, FlowState, FlowStatus, status_of_flow


async def listed(engine: Engine, **filters: Any) -> list[FlowEntry]:
    """Every flow of all pages of two."""
    found: list[FlowEntry] = []
    cursor = None
    while True:
        page = await engine.list_flows(**{"limit": 2, "cursor": cursor, **filters})
        found += page.flows
        if (cursor := page.next_cursor) is None:
            return found


@pytest.fixture
async def flows(given: Given, rows: Rows, clock: Clock) -> dict[str, BuiltFlow]:
    """Flows with every status in two namespaces, the newest last; two of them have the same time."""
    found = {}
    for name, namespace in {"active": "tests", "completed": "tests", "failed": "other", "cancelled": "other"}.items():
        found[name] = await BuiltFlow.create(given, rows, namespace=namespace)
        if name != "failed":
            await clock.advance(seconds=1)
    await found["active"].member()
    completed = found["completed"]
    await completed.add(await given.completed(execution_id=completed.mint(), lane_id="completed"))
    failed = found["failed"]
    await failed.add(await given.failed(execution_id=failed.mint(), lane_id="failed"))
    cancelled = found["cancelled"]
    await given.engine.cancel_flow_header(flow_id=cancelled.flow_id, reason="x", cancellation_policy="flow_only")
    for name in ("active", "failed"):
        await given.engine.set_flow_tag(found[name].flow_id, "app.customer", "acme")
    await given.engine.set_flow_tag(cancelled.flow_id, "app.customer", "other")
    return found


async def test_flows_are_listed_newest_first_with_their_status(
    engine: Engine, flows: dict[str, BuiltFlow], clock: Clock
) -> None:
    names = {flow.flow_id: name for name, flow in flows.items()}
    created = {name: (await flow.row())["created_at"] for name, flow in flows.items()}
    # Flows of one time are in the order of their ids.
    order = sorted(flows, key=lambda name: (created[name], flows[name].flow_id), reverse=True)
    found = await listed(engine)
    assert [names[entry.flow_id] for entry in found] == order
    assert [entry.status for entry in found] == order
    assert {names[entry.flow_id]: entry.namespace for entry in found}["failed"] == "other"
    assert all(entry.flow_kind == "dag" for entry in found)
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"namespace": "tests"}, {"active", "completed"}),
        ({"namespace": ["tests", "other", "none"]}, set(order)),
        ({"namespace": "none"}, set()),
        ({"namespace": []}, set()),
        ({"status": "cancelled"}, {"cancelled"}),
        ({"status": FlowStatus.ACTIVE}, {"active"}),
        ({"status": ["failed", "completed"]}, {"failed", "completed"}),
        ({"status": []}, set()),
        ({"namespace": "other", "status": "failed"}, {"failed"}),
        ({"tag": ("app.customer", "acme")}, {"active", "failed"}),
        ({"tag": ("app.customer", "acme"), "status": "failed"}, {"failed"}),
        ({"tag": ("app.customer", "acme"), "namespace": "tests"}, {"active"}),
        ({"tag": ("app.customer", "none")}, set()),
        ({"created_after": created["completed"]}, {"completed", "failed", "cancelled"}),
        ({"created_before": created["completed"]}, {"active"}),
        ({"created_after": created["active"], "created_before": created["failed"]}, {"active", "completed"}),
        ({"created_after": 2**62}, set()),
    ]
    with all_cases() as case:
        for filters, expected in cases:
            with case(str(filters)):
                matching = [names[entry.flow_id] for entry in await listed(engine, **filters)]
                assert matching == [name for name in order if name in expected]


async def test_a_tag_of_many_flows_is_found_by_reading_flows_in_order(
    engine: Engine, flows: dict[str, BuiltFlow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_listing, "FIRST_CAP", 1)
    monkeypatch.setattr(flow_listing, "LONGEST_READ", 2)
    monkeypatch.setattr(flow_listing, "GROWTH", 1)
    names = {flow.flow_id: name for name, flow in flows.items()}
    for filters, expected in (
        ({}, {"active", "failed"}),
        ({"status": "failed"}, {"failed"}),
        ({"namespace": "tests"}, {"active"}),
    ):
        found = await listed(engine, tag=("app.customer", "acme"), **filters)
        assert {names[entry.flow_id] for entry in found} == expected
        assert len(found) == len(expected)


async def test_a_page_stays_valid_when_flows_are_added(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    for _ in range(5):
        await BuiltFlow.create(given, rows)
    expected = [entry.flow_id for entry in (await engine.list_flows()).flows]
    first = await engine.list_flows(limit=2)
    await clock.advance(seconds=1)
    await BuiltFlow.create(given, rows)
    rest = await engine.list_flows(cursor=first.next_cursor, limit=3)
    assert [entry.flow_id for entry in (*first.flows, *rest.flows)] == expected
    assert rest.next_cursor is None
    empty = await engine.list_flows(limit=0)
    assert (list(empty.flows), empty.next_cursor) == ([], None)


async def test_bad_filters_of_flows_are_refused(engine: Engine) -> None:
    with all_cases() as case:
        for code, word, filters in (
            ("invalid_input", "status: expected one of active, completed, failed, cancelled,", {"status": "open"}),
            ("invalid_input", "cancelled, got 'unknown'", {"status": ["active", "unknown"]}),
            ("invalid_input", "cursor", {"cursor": "nonsense"}),
            ("invalid_input", "cursor", {"cursor": 7}),
            ("invalid_input", "limit", {"limit": -1}),
            ("invalid_input", "created_after", {"created_after": "yesterday"}),
            ("invalid_input", "tag", {"tag": "app.customer"}),
            ("invalid_tag_key", "customer", {"tag": ("customer", "acme")}),
        ):
            with case(str(filters)):
                await refused(engine.list_flows(**filters), code, word)


def test_every_pair_of_states_has_a_status_and_others_are_unknown() -> None:
    statuses = {status_of_flow(own, derived) for own in FlowState for derived in FlowState}
    assert statuses == set(FlowStatus) - {FlowStatus.UNKNOWN}
    assert status_of_flow("open", "cancelled") is FlowStatus.CANCELLED
    assert status_of_flow("open", "of a newer version") is FlowStatus.UNKNOWN
