"""`ff migrate`: applies, prints and checks migrations, and fails with one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowfabric.cli.main import app
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import load_migrations, render_sql
from flowfabric.version import __version__

NEWEST = load_migrations()[-1].number


@pytest.fixture
def ff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """The command, with a home that does not exist and no other variable."""
    for name in [name for name in os.environ if name.startswith("FF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FF_HOME", str(tmp_path / "home"))
    return CliRunner()


def test_the_version_is_printed(ff: CliRunner) -> None:
    result = ff.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"flowfabric {__version__}\n")


def test_migrate_and_check_report_in_text_and_in_json(
    ff: CliRunner, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", empty_url)
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", "ab" * 32)

    result = ff.invoke(app, ["migrate", "--schema", "shown", "--check"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ff: schema shown is empty")
    assert "run `ff migrate`" in result.stderr
    result = ff.invoke(app, ["migrate", "--schema", "shown", "--check", "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["runs"], answer["verdict"], len(answer["pending"])) == (1, False, "behind", NEWEST)

    result = ff.invoke(app, ["migrate", "--schema", "shown"])
    assert result.exit_code == 0, result.output
    assert "applied to shown" in result.stdout
    assert "0001" in result.stdout
    result = ff.invoke(app, ["migrate", "--schema", "shown"])
    assert (result.exit_code, result.stdout) == (0, "schema shown is up to date\n")

    result = ff.invoke(app, ["migrate", "--schema", "shown", "--check"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("up to date\n")
    result = ff.invoke(app, ["migrate", "--schema", "shown", "--check", "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["runs"], answer["verdict"], answer["pending"]) == (0, True, "current", [])


def test_sql_is_printed_without_a_database(ff: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", "postgresql://127.0.0.1:1/nowhere")
    result = ff.invoke(app, ["migrate", "--sql", "--schema", "printed"])
    assert (result.exit_code, result.stdout) == (0, render_sql(load_migrations(), "printed"))
    result = ff.invoke(app, ["migrate", "--sql", "--after", str(NEWEST)])
    assert result.exit_code == 0
    assert "create" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--schema", "a-b"], 2, "--schema: 'a-b' is not a schema name"),
        (["--database-url", "mysql://host/db"], 2, "--database-url: must begin with postgresql://"),
        (
            ["--database-url", "postgresql://u:pw@host:99999/db"],
            2,
            "--database-url: has an invalid port: use 1 to 65535",
        ),
        (
            ["--database-url", "postgresql://u:p@w@host/db"],
            2,
            "--database-url: has more than one @ before the host: write an @ of the user or the password as %40",
        ),
        (
            ["--database-url", "postgresql://u:p@s/w@host/db"],
            2,
            "--database-url: has an @ after the host: write special characters of the password as %XX, / as %2F",
        ),
        (["--after", "1"], 2, "--after 1 has no effect without --sql: leave it out, or add --sql"),
        (["--check", "--after", "0"], 2, "--after 0 has no effect without --sql: leave it out, or add --sql"),
        (["--sql", "--check"], 2, "--sql cannot be combined with --check or --json: "),
        (
            ["--database-url", "postgresql://127.0.0.1:1/nowhere"],
            1,
            "no server answers at 127.0.0.1:1 (database nowhere)",
        ),
    ],
)
def test_a_failure_is_one_line_on_stderr(ff: CliRunner, arguments: list[str], code: int, reason: str) -> None:
    result = ff.invoke(app, ["migrate", *arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"ff: {reason}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FF_SCHEMA", "a-b"),
        ("FF_DATABASE_URL", "postgresql://u:pw@host:99999/db"),
        ("FF_DATABASE_URL", "postgresql://u:pw@host:abc/db"),
        ("FF_DATABASE_URL", "postgresql://u:pw@[::1/db"),
    ],
)
def test_an_invalid_setting_is_one_line_that_names_its_variable(
    ff: CliRunner, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = ff.invoke(app, ["migrate"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"ff: {variable}")
    assert result.stderr.count("\n") == 1
    assert "pw" not in result.stderr


def test_check_does_not_create_a_server(ff: CliRunner, tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = ff.invoke(app, ["migrate", "--check"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"ff: there is no embedded server at {Embedded.data_of(home)}: run `ff migrate` to create one,"
        " or set FF_DATABASE_URL\n"
    )
    result = ff.invoke(app, ["migrate", "--check", "--json"])
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["runs"], answer["verdict"], len(answer["pending"])) == (False, "behind", NEWEST)
    assert not home.exists()
    assert not Embedded.data_of(home).exists()


def test_the_installed_command_migrates_a_home_and_leaves_no_server_running(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("ff")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
    data = Embedded.data_of(tmp_path / "home")
    try:
        done = subprocess.run(
            [command, "migrate", "--json"],
            env={**environment, "FF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        answer = json.loads(done.stdout)
        assert answer["schema"] == "flowfabric"
        assert [one["number"] for one in answer["applied"]] == list(range(1, NEWEST + 1))
        assert (data / "PG_VERSION").exists()
        assert not (data / "postmaster.pid").exists()
    finally:
        shutil.rmtree(data.parent, ignore_errors=True)
