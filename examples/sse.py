"""The output of a run as server-sent events, which a browser reads with `EventSource` and resumes by itself."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

from flowfabric import Context, Fabric
from flowfabric.errors import InvalidInputError, NotFoundError
from flowfabric.streams import RunFrame

fabric = Fabric(lane="reports")

PING_SECONDS = 15.0


@fabric.task
async def report(ctx: Context) -> None:
    """Write a text in pieces that contain line ends."""
    for piece in ("# Report\n", "one\n\ntwo\n", "three", " and four"):
        await ctx.stream.write(piece)


def event_of(frame: RunFrame) -> str:
    """Return a frame as an event: its id, and a data line for each line, which browsers join with newlines."""
    lines = re.split(r"\r\n|\r|\n", frame.text)
    return "".join([f"id: {frame.id}\n", *(f"data: {line}\n" for line in lines), "\n"])


async def send_frames(frames: AsyncIterator[RunFrame], writer: asyncio.StreamWriter) -> None:
    """Send each frame as an event, and a comment after a while without one, which fails if the browser is gone."""
    while True:
        try:
            async with asyncio.timeout(PING_SECONDS):
                frame = await anext(frames)
        except TimeoutError:  # a call that is cancelled loses no frame
            writer.write(b": ping\n\n")
        except StopAsyncIteration:
            break
        else:
            writer.write(event_of(frame).encode())
        await writer.drain()
    # A browser connects again when a response ends. The page closes its EventSource at this event.
    writer.write(b"event: end\ndata:\n\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer `GET /<id of a run>` with the frames after the one that the browser has read last, if it says so."""
    head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        run = fabric.run(head.split(" ")[1].removeprefix("/"))
        frames = run.stream(after=headers.get("last-event-id") or None)
        await run.status()
    except InvalidInputError:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    except NotFoundError:  # before 200 is sent; a browser does not connect again then
        writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # the browser has gone away
            await send_frames(frames, writer)
    writer.close()


async def browse(port: int, path: str, *, last: str = "", most: int | None = None) -> tuple[list[str], str]:
    """Read events as a browser does that is closed after some; return their texts and the id of the last one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{path} HTTP/1.1\r\nLast-Event-ID: {last}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    texts: list[str] = []
    while most is None or len(texts) < most:
        lines = (await reader.readuntil(b"\n\n")).decode().splitlines()
        if "event: end" in lines:
            break
        last = lines[0].removeprefix("id: ")
        texts.append("\n".join([line.removeprefix("data: ") for line in lines if line.startswith("data: ")]))
    writer.close()
    return texts, last


async def main() -> None:
    """Serve the frames of a run to a browser that is closed after two of them and comes back."""
    async with fabric, fabric.worker(), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        run = await report.submit()
        first, last = await browse(port, run.plain_id, most=2)
        print(f"before the disconnect: {first}")
        rest, _ = await browse(port, run.plain_id, last=last)
        print(f"after it:              {rest}")


if __name__ == "__main__":
    asyncio.run(main())
