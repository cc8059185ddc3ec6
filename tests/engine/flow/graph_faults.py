"""Faults of random flows: a process that dies between any two statements of a call, and rows that others lock."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from flowfabric.db.database import Database, Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import Statement

Answer = TypeVar("Answer")

CRASHES = ("before a statement", "cut before a statement", "answer lost")
"""How a process crashes: before a statement or a commit, in both forms, or behind a commit."""

LOCKS = {
    "child": "select from execution where execution_id = $1 for update",
    "member": "select from execution where execution_id = $1 for update",
    "group": "select from edge_group where downstream_id = $1 for update",
    "flow": "select from flow where flow_id = $1 for update",
}
"""What another session locks: a member with dependencies, any member, the dependencies of a member, or the flow."""


SHARES = 60
"""In how many shares a call is divided, in one of which it crashes."""


@dataclass(frozen=True)
class Fault:
    """What happens during a call: a crash in one of SHARES shares of it, and a lock on a row until the call ends.

    The number of a lock chooses among the rows of its kind.
    """

    crash: tuple[str, int] | None = None
    lock: tuple[str, int] | None = None

    def point(self, length: int) -> tuple[str, int] | None:
        """At which statement or commit a call crashes that has about this many statements; others have more or less."""
        if self.crash is None:
            return None
        form, share = self.crash
        # A transaction has about four statements.
        return form, 1 + share * (length if form != "answer lost" else (length + 3) // 4) // SHARES


NO_FAULT = Fault()


class Crashes:
    """Lets the process of an engine die at a statement or behind a commit: from then on, its calls fail."""

    def __init__(self, database: Database) -> None:
        self._fetch, self._transact = database.fetch, database.transact
        self._form, self._nth = "", 0
        self._counts: Counter[bool] | None = None
        """How many statements (false) and commits (true) the watched call has sent."""
        self.has_crashed = False
        self.cut: int | None = None
        """The server process of the connection that was cut."""
        database.fetch = self._guarded_fetch  # type: ignore[method-assign]
        database.transact = self._guarded_transact  # type: ignore[method-assign]

    @property
    def statements(self) -> int:
        """How many statements and commits the watched call was about to send."""
        return 0 if self._counts is None else self._counts[False]

    @contextmanager
    def watch(self, crash: tuple[str, int] | None) -> Iterator[None]:
        """Count the statements of a call and crash at one of them; the process lives again at the end."""
        (self._form, self._nth), self._counts, self.has_crashed = crash or ("", 0), Counter(), False
        try:
            yield
        finally:
            self._counts, self.has_crashed = None, False

    def reach(self, transaction: Transaction | None = None, *, is_committed: bool = False) -> None:
        """Count a statement or a commit that is about to be sent, or was committed, and crash if it is the one."""
        if self.has_crashed:
            raise StoreFault("transport", "the process has crashed")
        if self._counts is None:
            return
        self._counts[is_committed] += 1
        if self._counts[is_committed] != self._nth or is_committed is not (self._form == "answer lost"):
            return
        self.has_crashed = True
        if self._form == "cut before a statement" and transaction is not None:
            self.cut = transaction.connection.get_server_pid()
            transaction.connection.terminate()
        else:
            raise StoreFault("transport", f"crashed: {self._form}", outcome_unknown=is_committed)

    async def _guarded_fetch(self, statement: Statement, values: Any, **options: Any) -> list[Record]:
        self.reach()
        rows = await self._fetch(statement, values, **options)
        self.reach(is_committed=True)
        return rows

    async def _guarded_transact(self, work: Callable[[Transaction], Awaitable[Answer]]) -> Answer:
        async def counted(transaction: Transaction) -> Answer:
            answer = await work(_Counted(transaction, self))
            self.reach(transaction)
            return answer

        if self.has_crashed:
            self.reach()
        answer = await self._transact(counted)
        self.reach(is_committed=True)
        return answer


class _Counted(Transaction):
    """A transaction whose statements are counted."""

    __slots__ = ("crashes",)

    def __init__(self, transaction: Transaction, crashes: Crashes) -> None:
        super().__init__(transaction.connection)
        self.crashes = crashes

    async def fetch(self, statement: Statement, **values: object) -> list[Record]:
        self.crashes.reach(self)
        return await super().fetch(statement, **values)
