"""The proxy in a separate process, controlled by lines of JSON."""

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
    """Executes the commands of the parent process."""

    def __init__(self, proxy: Proxy, seed: str) -> None:
        self._proxy = proxy
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, command: dict[str, Any]) -> int:
        """Execute a command; return the number of affected connections."""
        match command["do"]:
            case "cut":
                return self._proxy.cut(self._sample(command["share"]))
            case "silence":
                links = self._sample(command["share"])
                if command["seconds"] is not None:
                    self._speak_later(command["seconds"], links)
                return self._proxy.silence(links, [Side(side) for side in command["sides"]])
            case "drop":
                links = self._sample(command["share"])
                for link in links:
                    link.drop_answer()
                return len(links)
            case "refuse":
                self._proxy.refuses = command["on"]
            case "redirect":
                self._proxy.upstream = Upstream.of(command["url"])
        return len(self._proxy.links)

    def _sample(self, share: float) -> list[Link]:
        return [link for link in self._proxy.links if self._random.random() < share]

    def _speak_later(self, seconds: float, links: list[Link]) -> None:
        async def speak() -> None:
            await asyncio.sleep(seconds)
            for link in links:
                link.speak()

        task = asyncio.create_task(speak())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(url: str, seed: str) -> None:
    """Forward until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with Proxy(url) as proxy:
        control = Control(proxy, seed)
        print(json.dumps(proxy.url), flush=True)
        while line := await lines.readline():
            print(json.dumps(control.do(json.loads(line))), flush=True)


class ProxyProcess:
    """The handle of the parent on the proxy process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url
        """The address of the database through the proxy."""

    @classmethod
    async def start(cls, url: str, seed: str) -> "ProxyProcess":
        """Start a proxy in front of a server."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "tests.faults.proxy_process", url, seed)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        return cls(process, json.loads(await process.stdout.readline()))

    async def do(self, command: str, **arguments: object) -> int:
        """Send a command; return the number of affected connections."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        async with asyncio.timeout(30):
            return int(json.loads(await self._process.stdout.readline()))

    async def stop(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


if __name__ == "__main__":
    # Cut clients cause warnings in asyncio that are of no interest here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
