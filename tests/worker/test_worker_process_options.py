"""Wrong options of `run_worker` are told in a line, and the process ends with 2."""

import subprocess
import sys

import pytest

from flowfabric.engine.engine import Engine

PROGRAM = "import sys, flowfabric; flowfabric.Fabric(sys.argv[1]).run_worker({options})"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("lease_ttl_ms=0", "lease_ttl_ms: "),
        ("drain_seconds=-1", "drain_seconds: a number from 0 on, got -1"),
        ("worker_instance_id='a b'", "worker_instance_id: "),
        ("speed=3", ""),
    ],
)
def test_a_wrong_option_is_told_in_a_line(engine: Engine, url: str, options: str, told: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(options=options), url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"flowfabric: {told}")
    assert options.split("=")[0] in line
    assert ended.returncode == 2
