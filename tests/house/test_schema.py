"""The schema in Postgres, in its dump and in Python say the same."""

from enum import StrEnum

import asyncpg
import pytest

from flowfabric.db.dump import SCHEMA_FILE, dump_migrations
from flowfabric.model.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
    WaitpointState,
)

ENUMS: dict[str, type[StrEnum]] = {
    "lifecycle_phase": LifecyclePhase,
    "ownership_state": OwnershipState,
    "eligibility_state": EligibilityState,
    "blocking_reason": BlockingReason,
    "terminal_outcome": TerminalOutcome,
    "attempt_state": AttemptState,
    "public_state": PublicState,
    "attempt_lifecycle": AttemptLifecycle,
    "attempt_type": AttemptType,
    "lane_state": LaneState,
    "waitpoint_state": WaitpointState,
}


@pytest.fixture
async def words(connection: asyncpg.Connection) -> dict[str, list[str]]:
    """The enumerations of the migrated schema, with their words in order."""
    query = """select t.typname, array_agg(e.enumlabel::text order by e.enumsortorder)
                 from pg_enum e join pg_type t on t.oid = e.enumtypid
                where t.typnamespace = 'flowfabric'::regnamespace group by 1"""
    return dict(await connection.fetch(query))


async def test_every_enumeration_is_known_on_both_sides(words: dict[str, list[str]]) -> None:
    assert set(words) == set(ENUMS)


@pytest.mark.parametrize("name", sorted(ENUMS))
async def test_an_enumeration_has_the_same_words_in_python_and_in_postgres(
    words: dict[str, list[str]], name: str
) -> None:
    assert words[name] == [member.value for member in ENUMS[name]]


async def test_the_dump_is_what_the_migrations_lead_to(empty_url: str) -> None:
    assert await dump_migrations(empty_url) == SCHEMA_FILE.read_text(encoding="utf-8"), (
        "run python -m flowfabric.db.dump"
    )
