"""When a process dies in the middle of a cascade, another one takes it to the same end."""

from pathlib import Path

from engine.flow.driving import DrivenFlow
from fixtures import Clock, Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.loop import Reconciler

from . import flow_process
from .processes import Process, environment_for


async def test_a_cascade_of_a_process_that_was_killed_after_its_first_hop_ends_like_any_other(
    engine: Engine, rows: Rows, clock: Clock, url: str, tmp_path: Path, eventually: Eventually
) -> None:
    async def submit() -> DrivenFlow:
        groups = {"e": {"kind": "any_of", "on_satisfied": "let_run"}}
        return await DrivenFlow.submit(engine, rows, "a b c d e f", "a>b b>c c>d c>e f>e", groups=groups)

    await clock.stop()
    undisturbed, flow = await submit(), await submit()
    await undisturbed.fail("a")
    process = Process(
        flow_process.fail_member, flow.id("a"), log=tmp_path / "log", environment=environment_for(FF_DATABASE_URL=url)
    )
    try:
        await eventually(lambda: (tmp_path / "settled").exists())
    finally:
        process.kill()
    assert await flow.states() == {
        "a": "failed",
        "b": "skipped",
        "c": "waiting_children",
        "d": "waiting_children",
        "e": "waiting_children",
        "f": "waiting",
    }
    await clock.advance(ms=1_001)
    await Reconciler(engine).catch_up()
    await parts_of(engine).cascade.drain()
    assert await flow.states() == await undisturbed.states()
    for name in "bcde":
        assert await flow.counts(name) == await undisturbed.counts(name)
        assert await flow.outcomes(name) == await undisturbed.outcomes(name)
    kept = ("live_count", "failed_count", "derived_state")
    ((stored,), (expected,)) = [await rows.of("flow", flow_id=each.flow_id) for each in (flow, undisturbed)]
    assert [stored[name] for name in kept] == [expected[name] for name in kept]
    assert await rows.of("cascade_entry") == []
    assert await engine.find_inconsistencies() == []
