"""What the guides list (options, methods, settings) is what the code has, with the same defaults."""

import re

from flowfabric.db.session import session_settings
from test_docs import ROOT, SOURCE

PGBOUNCER_PAGE = (ROOT / "docs" / "pgbouncer.md").read_text(encoding="utf-8")

NOT_REFUSED = {"application_name"}
"""The session settings that PgBouncer passes on."""
OF_HINTS = {"synchronous_commit"}
"""What the connections of hints ask for beside the session settings."""


# Behind PgBouncer.


def asked() -> dict[str, str]:
    settings = session_settings("flowfabric")
    return {name: value for name, value in settings.items() if name not in NOT_REFUSED}


def test_pgbouncer_is_told_to_ignore_what_sessions_ask_for() -> None:
    (ignored,) = re.findall(r"ignore_startup_parameters = (\S+)", PGBOUNCER_PAGE)
    assert sorted(ignored.split(",")) == sorted({*asked(), *OF_HINTS})


def test_the_role_has_the_settings_that_sessions_ask_for() -> None:
    lines = re.findall(r"alter role app in database app set (\w+) = '?(\w+?)'?;", PGBOUNCER_PAGE)
    given = {name: re.sub(r"^(\d+)s$", r"\g<1>000", value) for name, value in lines}
    wanted = {name: re.sub(r"^(\d+)s$", r"\g<1>000", value) for name, value in asked().items()}
    assert given == {name: value for name, value in wanted.items() if not name.startswith("tcp_")}


def test_pgbouncer_is_told_to_keep_more_statements_than_there_are() -> None:
    (kept,) = set(re.findall(r"max_prepared_statements = ([1-9]\d*)", PGBOUNCER_PAGE))
    files = [path for path in SOURCE.rglob("*.sql") if path.parent.name != "bench"]
    count = sum(len(re.findall(r"^-- name: ", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in files)
    assert 100 < count < int(kept)
