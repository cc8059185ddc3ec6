"""Wrong options of `run_worker` are told in a line, and the process ends with 2."""

import subprocess
import sys

import pytest

from flowfabric.engine.engine import Engine

PROGRAM = "import sys, flowfabric; flowfabric.Fabric(sys.argv[1]).run_worker({options})"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("lease_ttl=0", "lease_ttl: must be at least 0.001 seconds"),
        ("drain=-1", "drain: must be 0 seconds or more, got -1"),
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
