"""A worker process with wrong options reports one line on stderr and ends with exit code 2."""

from typing import Any

import pytest

from flowfabric import Fabric
from flowfabric.engine.engine import Engine

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lease_ttl": 0}, "lease_ttl: must be at least 0.001 seconds"),
    ({"drain": -1}, "drain: must be 0 seconds or more, got -1"),
    ({"worker_instance_id": "a b"}, "worker_instance_id: "),
    ({"speed": 3}, ""),
]


def test_a_wrong_option_is_one_line_on_stderr_and_exit_code_2(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, text in WRONG:
        with pytest.raises(SystemExit) as ended:
            Fabric(url).run_worker(**options)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"flowfabric: {text}")
        assert next(iter(options)) in line
        assert ended.value.code == 2
