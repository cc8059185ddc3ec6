"""A row that a trigger of the user refuses fails its own item of a batch, and none of the others."""

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from engine.state import claim, items, new
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId

pytestmark = pytest.mark.usefixtures("consistent_rows")

BAD_AT, COUNT = 41, 100

RefuseRows = Callable[[str], Awaitable[None]]


@pytest.fixture
def refuse_rows(connection: asyncpg.Connection) -> RefuseRows:
    """Refuse executions with the input `refused` when they are inserted, or when they end."""

    async def refuse(when: str) -> None:
        await connection.execute(
            f"""create function refuse() returns trigger language plpgsql as
                $$begin raise exception 'not this one'; end$$;
                create trigger refused before {when} on execution for each row
                  when (new.input_payload = 'refused' and (new.lifecycle_phase = 'terminal' or '{when}' = 'insert'))
                  execute function refuse()"""
        )

    return refuse


def inputs() -> list[bytes]:
    """The inputs of a hundred executions, one of which is refused."""
    return [b"refused" if at == BAD_AT else b"{}" for at in range(COUNT)]


def check(answers: list[object]) -> None:
    """Check that one answer is the error of the trigger, and that the others are none."""
    refused = answers.pop(BAD_AT)
    assert isinstance(refused, EngineError)
    assert (refused.code, "not this one" in str(refused.detail)) == ("protocol", True)
    assert [answer for answer in answers if isinstance(answer, Exception)] == []


async def created(engine: Engine) -> list[ExecutionId]:
    """A hundred executions in the order of their inputs."""
    made = await engine.create_many(items(*(new(input_payload=each) for each in inputs())))
    return [one.execution_id for one in made]  # type: ignore[union-attr]


async def test_of_a_hundred_cancelled_executions_99_end(engine: Engine, refuse_rows: RefuseRows) -> None:
    await refuse_rows("update")
    execution_ids = await created(engine)
    check([*await parts_of(engine).cancel_many.cancel(execution_ids, reason="x")])


@pytest.mark.parametrize("is_one_call", [True, False])
async def test_of_a_hundred_completed_executions_99_end(
    engine: Engine, refuse_rows: RefuseRows, *, is_one_call: bool
) -> None:
    await refuse_rows("update")
    execution_ids = await created(engine)
    handles = {run.execution_id: run.handle for run in await claim(engine, limit=COUNT)}
    held = [handles[each] for each in execution_ids]
    if is_one_call:
        check([*await engine.complete_many([(handle, b"done") for handle in held])])
    else:
        check(await asyncio.gather(*(engine.complete(handle, b"done") for handle in held), return_exceptions=True))


@pytest.mark.parametrize("is_one_call", [True, False])
async def test_of_a_hundred_submitted_executions_99_are_stored(
    engine: Engine, refuse_rows: RefuseRows, *, is_one_call: bool
) -> None:
    await refuse_rows("insert")
    submitted = [new(input_payload=each) for each in inputs()]
    if is_one_call:
        check([*await engine.create_many(items(*submitted))])
    else:
        check(await asyncio.gather(*(engine.create_execution(**each) for each in submitted), return_exceptions=True))
