"""A process that prints the hint its forked child sends: `python forked_hints.py URL`."""

import asyncio
import os
import sys

from flowfabric.db.database import Database
from flowfabric.db.notify import EVERYTHING, Hints

WORD = "from-the-child"
hints = Hints(Database(sys.argv[1], "flowfabric", 1))
heard: list[str] = []
told, tell = os.pipe()
child = os.fork()


async def send() -> None:
    """Send a hint once the parent listens."""
    os.read(told, 1)
    hints.send("work", WORD)
    await hints.close()


async def listen() -> None:
    """Listen until the child has been heard."""
    is_heard = asyncio.Event()

    def hear(words: list[str]) -> None:
        if EVERYTHING not in words:
            heard.extend(words)
            is_heard.set()

    hints.subscribe("work", hear)
    await hints.listen()
    os.write(tell, b"1")
    async with asyncio.timeout(60):
        await is_heard.wait()
    await hints.close()


if child == 0:
    asyncio.run(send())
    os._exit(0)
asyncio.run(listen())
os.waitpid(child, 0)
print(heard)
