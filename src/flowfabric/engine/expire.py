"""Running out of time: attempts past their timeout and executions past their deadline."""

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import Verdict
from flowfabric.engine.lease import SWEEP_LIMIT
from flowfabric.engine.release import Ending, Releases, retry_pause
from flowfabric.engine.store import Store
from flowfabric.engine.transition import Release
from flowfabric.model.ids import format_execution_id
from flowfabric.model.outcomes import FailureClass
from flowfabric.model.policy import read_stored_policy

SQL = statements_beside(__file__)

ATTEMPT_TIMEOUT = "attempt_timeout"
EXECUTION_DEADLINE = "execution_deadline"


class Expire:
    """What ends, or is tried again, because its time is up."""

    def __init__(self, store: Store, releases: Releases) -> None:
        self._store = store
        self._releases = releases

    async def expire_due(self) -> int:
        """Expire what is past its attempt timeout or deadline, the oldest first; answers how many."""
        since = self._store.due.since

        async def expire(transaction: Transaction) -> tuple[list[Ending], list[Verdict | Locked]]:
            rows = await transaction.fetch(SQL.lock_expired, since=since, limit=SWEEP_LIMIT)
            endings = [_expiry(row) for row in rows]
            return endings, await self._releases.within(transaction, endings) if endings else []

        endings, verdicts = await self._store.transact(expire)
        await self._releases.settle(endings, verdicts)
        return len(endings)


def _expiry(row: Record) -> Ending:
    execution_id = format_execution_id(row["partition_key"], row["execution_id"])
    category = FailureClass.TIMEOUT.value
    if row["past_deadline"]:
        return Ending(execution_id, Release.DEADLINE_EXPIRED, reason=EXECUTION_DEADLINE, category=category)
    delay_ms = retry_pause(read_stored_policy(row["policy"]), row["retry_count"], category)
    move = Release.TIMEOUT_EXPIRED if delay_ms is None else Release.TIMEOUT_RETRY
    return Ending(execution_id, move, reason=ATTEMPT_TIMEOUT, category=category, delay_ms=delay_ms)
