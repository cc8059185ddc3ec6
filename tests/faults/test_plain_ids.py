"""Every operation accepts the plain form of an execution id, and returns the canonical form."""

import base64
import re

import msgspec
import pytest

from fixtures import Engines
from flowfabric import Fabric
from flowfabric.engine.engine import Engine
from flowfabric.model.grant import ResumeGrant, ResumeToken
from flowfabric.model.ids import ExecutionId, LaneId, plain_id
from flowfabric.model.lease import ExpiredLeaseCursor
from flowfabric.worker.callback import SignalFields, verify_and_deliver

from .operation import Operation
from .operations import OPERATIONS
from .preparations import resume_granted, suspended
from .scene import LEASE_MS, WORKER, Scene

_PLAIN = re.compile(r"fp[0-9]+-")


async def call(scene: Scene, engine: Engine, operation: Operation, *, is_plain: bool) -> tuple[object, list[str]]:
    """Call an operation with the plain or the canonical id of its subject; return its answer and the rows it leaves."""
    subject = await scene.subject(lane_id="plain" if is_plain else "canonical")
    await operation.prepare(subject)
    canonical = subject.execution_id
    if is_plain:
        subject.execution_id = ExecutionId(plain_id(canonical))
    answer = await operation.call(engine, subject)
    subject.execution_id = canonical
    rows = await scene.snapshot(subject)
    await scene.clean_up(subject)
    return answer, rows


async def test_an_operation_does_the_same_with_the_plain_form_of_an_id(
    scene: Scene, engines: Engines, subtests: pytest.Subtests
) -> None:
    engine, other = await engines(), await engines()
    for title, operation in OPERATIONS.items():
        # A subscription takes no id.
        if title.startswith("subscribe_"):
            continue
        with subtests.test(title):
            answer, rows = await call(scene, engine, operation, is_plain=False)
            plain_answer, plain_rows = await call(scene, other, operation, is_plain=True)
            assert type(plain_answer) is type(answer)
            assert plain_rows == rows
            assert not _PLAIN.search(repr(plain_answer))


async def test_a_stored_handle_with_a_plain_id_is_read_with_the_canonical_id(scene: Scene, engines: Engines) -> None:
    engine: Engine = await engines()
    subject = await scene.subject(lane_id="plain")
    await OPERATIONS["complete"].prepare(subject)
    handle = subject.handle
    stored = msgspec.structs.replace(handle, execution_id=ExecutionId(plain_id(handle.execution_id))).to_json()
    assert type(handle).from_json(stored) == handle
    await engine.complete(type(handle).from_json(stored), b"x")


async def test_a_resume_grant_may_contain_a_plain_id(scene: Scene, engines: Engines) -> None:
    engine: Engine = await engines()
    subject = await scene.subject(lane_id="plain")
    await resume_granted(subject)
    grant = subject.grant.grant
    named = ResumeGrant(
        execution_id=ExecutionId(plain_id(grant.execution_id)),
        partition_key=grant.partition_key,
        grant_key=grant.grant_key,
        expires_at_ms=grant.expires_at_ms,
        lane_id=LaneId(subject.lane_id),
    )
    claimed = await engine.claim_from_resume_grant(ResumeToken(grant=named, **WORKER, lease_ttl_ms=LEASE_MS))
    assert claimed is not None
    assert claimed.execution_id == subject.execution_id


async def test_a_page_of_expired_leases_may_follow_a_plain_id(scene: Scene, engines: Engines) -> None:
    engine: Engine = await engines()
    for _ in range(3):
        await OPERATIONS["mark_lease_expired_if_due"].prepare(await scene.subject(lane_id="plain"))
    whole = (await engine.list_expired_leases()).entries
    first = (await engine.list_expired_leases(limit=1)).cursor
    assert first is not None
    plain = ExpiredLeaseCursor(first.expires_at_ms, ExecutionId(plain_id(first.execution_id)))
    assert (await engine.list_expired_leases(after=plain)).entries == whole[1:]


async def test_a_list_cursor_with_a_plain_id_leads_to_the_same_page(scene: Scene, engines: Engines) -> None:
    engine: Engine = await engines()
    for _ in range(3):
        await OPERATIONS["list_suspended"].prepare(await scene.subject(lane_id="plain"))
    whole = (await engine.list_suspended()).entries
    first = await engine.list_suspended(limit=1)
    (entry,) = first.entries
    # No operation returns such a cursor, but a user may build one.
    made = msgspec.json.encode((entry.suspended_at_ms, plain_id(entry.execution_id)))
    cursor = base64.urlsafe_b64encode(made).decode().rstrip("=")
    assert (await engine.list_suspended(cursor=cursor)).entries == whole[1:]


async def test_a_run_is_found_by_its_plain_id(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> str:
        return "done"

    async with fabric, fabric.worker():
        submitted = await job.submit()
        found = job.run(plain_id(submitted.id))
        assert (found.id, await found.result(timeout=60)) == (submitted.id, "done")


async def test_a_callback_may_contain_a_plain_id(scene: Scene, engines: Engines) -> None:
    engine: Engine = await engines()
    subject = await scene.subject(lane_id="plain")
    await suspended(subject)
    signal: SignalFields = {"signal_name": "ready"}
    await verify_and_deliver(
        engine, plain_id(subject.execution_id), subject.wait.waitpoint_id, subject.wait.waitpoint_token, signal
    )
    assert await engine.read_execution_state(subject.execution_id) == "resumable"
