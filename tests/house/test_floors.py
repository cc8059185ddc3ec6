"""An upper floor imports the floors below it, never sideways or up."""

import sys
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[2]


def test_the_floors_hold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    configure()
    holds = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert holds, capsys.readouterr().out
