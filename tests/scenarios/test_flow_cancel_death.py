"""When a process dies while it cancels a flow, another one cancels the members that are left, after the grace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.flow.flows import nothing_owed, owed, submitted_flow
from engine.state import claim
from fixtures import Clock, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.reconcile.loop import Reconciler

from . import flow_process
from .processes import Process, environment_for

GRACE_SECONDS = 30


@pytest.mark.parametrize(("run", "members"), [(flow_process.cancel_header, 700), (flow_process.cancel_flow, 3000)])
async def test_members_that_a_killed_process_has_left_are_cancelled_after_the_grace(
    run: Callable[[str], None],
    members: int,
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    url: str,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    await clock.stop()
    flow = await submitted_flow(given, members)
    held: list[Any] = await claim(engine, limit=5)
    process = Process(run, str(flow.flow_id), log=tmp_path / "log", environment=environment_for(FF_DATABASE_URL=url))
    try:
        await eventually(lambda: (tmp_path / "cancelled").exists())
    finally:
        process.kill()
    left = await owed(rows, flow.flow_id)
    assert left
    if run is flow_process.cancel_header:
        assert len(left) == members
    # Nobody may claim them meanwhile.
    assert await claim(engine) == []
    reconciler = Reconciler(engine)
    await clock.advance(seconds=GRACE_SECONDS - 1)
    await reconciler.catch_up()
    assert await owed(rows, flow.flow_id) == left
    await clock.advance(seconds=1)
    await reconciler.catch_up()
    states = await flow.states(rows)
    assert set(states.values()) == {"cancelled"}
    for execution_id in [run.execution_id for run in held]:
        row = await rows.execution(execution_id)
        assert (row["cancellation_reason"], row["cancelled_by"]) == ("not wanted", "operator_override")
    await nothing_owed(rows)
    assert await engine.find_inconsistencies() == []
