"""An engine of the version that PYTHONPATH names: reads calls from stdin and writes the answers to stdout, one a line.

`python previous_process.py <the value of PYTHONPATH>`, on the database of FF_DATABASE_URL.
"""

import asyncio
import pickle
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import flowfabric
from flowfabric.engine.engine import Engine
from flowfabric.reconcile.loop import Reconciler


async def serve() -> None:
    """Answer calls until stdin ends."""
    async with Engine.connect() as engine:
        reconciler = Reconciler(engine)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            operation, arguments, keywords = pickle.loads(b64decode(line))
            call = reconciler.catch_up if operation == "catch_up" else getattr(engine, operation)
            answer = await call(*arguments, **keywords)
            sys.stdout.buffer.write(b64encode(pickle.dumps(answer)) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    assert Path(flowfabric.__file__).is_relative_to(sys.argv[1]), f"imported {flowfabric.__file__}"
    asyncio.run(serve())
