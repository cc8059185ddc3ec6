"""A layer imports only the layers below it."""

import sys
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[2]


def test_no_import_breaks_the_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    configure()
    is_kept = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert is_kept, capsys.readouterr().out
