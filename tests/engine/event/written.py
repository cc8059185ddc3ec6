"""For tests of written events: the events of an execution with their JSON decoded."""

import json
from typing import Any, NamedTuple

from fixtures import Rows


class Written(NamedTuple):
    """An event of one execution."""

    kind: str
    outcome: int | None
    namespace_no: int
    instance_tag: str | None
    tags: dict[str, str] | None
    details: dict[str, Any] | None


async def written(rows: Rows, execution_id: str, *kinds: str) -> list[Written]:
    """The events of an execution in order, all or those of these kinds."""
    return [
        Written(
            row["kind"],
            row["outcome"],
            row["namespace_no"],
            row["instance_tag"],
            _decoded(row["tags"]),
            _decoded(row["details"]),
        )
        for row in await rows.events(execution_id)
        if not kinds or row["kind"] in kinds
    ]


def _decoded(text: str | None) -> Any:
    return None if text is None else json.loads(text)
