"""The proxy in a process of its own, told what to do by lines of JSON."""

import asyncio
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

from .proxy import Link, Proxy, Side, Upstream

ROOT = Path(__file__).parents[2]


class Control:
    """Carries out what the parent says; its answer is the number of connections concerned."""

    def __init__(self, proxy: Proxy, seed: str) -> None:
        self._proxy = proxy
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, command: dict[str, Any]) -> int:
        """One command."""
        match command["do"]:
            case "cut":
                return self._proxy.cut(self._some(command["share"]))
            case "silence":
                links = self._some(command["share"])
                if command["seconds"] is not None:
                    self._later(command["seconds"], links)
                return self._proxy.silence(links, [Side(side) for side in command["sides"]])
            case "drop":
                links = self._some(command["share"])
                for link in links:
                    link.drop_answer()
                return len(links)
            case "refuse":
                self._proxy.refuses = command["on"]
            case "lead":
                self._proxy.upstream = Upstream.of(command["url"])
            case "reopen":
                self._proxy.refuses = False
        return len(self._proxy.links)

    def _some(self, share: float) -> list[Link]:
        return [link for link in self._proxy.links if self._chance.random() < share]

    def _later(self, seconds: float, links: list[Link]) -> None:
        async def speak() -> None:
            await asyncio.sleep(seconds)
            for link in links:
                link.speak()

        task = asyncio.create_task(speak())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(url: str, seed: str) -> None:
    """Forward until the parent closes its end."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with Proxy(url) as proxy:
        control = Control(proxy, seed)
        print(json.dumps(proxy.url), flush=True)
        while line := await lines.readline():
            print(json.dumps(control.do(json.loads(line))), flush=True)


class ProxyProcess:
    """The proxy as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url
        """The address of the database through the proxy."""

    @classmethod
    async def start(cls, url: str, seed: str) -> "ProxyProcess":
        """Start it in front of a server."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "tests.faults.proxy_process", url, seed)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        return cls(process, json.loads(await process.stdout.readline()))

    async def do(self, what: str, **arguments: object) -> int:
        """Have it do something; the number of connections concerned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        async with asyncio.timeout(30):
            return int(json.loads(await self._process.stdout.readline()))

    async def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


if __name__ == "__main__":
    # A client that is gone before it was answered is nothing to warn of here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
