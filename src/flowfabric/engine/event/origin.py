"""The server that the transaction ids of events come from: after a restore it is another one."""

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)


async def keep_origin(store: Store) -> bool:
    """Record this server as the origin of new events; return whether the events were restored from another one.

    Any number of processes may call it at the same time.
    """
    ((is_current,),) = await store.fetch(SQL.read_is_current_origin)
    if is_current:
        return False

    async def record(transaction: Transaction) -> bool:
        await transaction.fetch(SQL.lock_events)
        rows = await transaction.fetch(SQL.insert_origin)
        return bool(rows) and rows[0]["generation"] > 1

    return await store.transact(record)
