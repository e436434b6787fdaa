"""A small HTTP/1.1 client: one request, its answer in pieces as they come. Standard library only, and cheap enough to
time a server that sends thousands of pieces a second."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LIMIT = 1 << 24  # bytes of a line: an event of a stream may carry many tokens


class Refused(Exception):
    """The server said no. `status` is its HTTP status, the message the start of what it sent."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Client:
    """base_url is as OpenAI's clients take it, with its /v1. `sending`: how many requests are opened and
    written at once (any number may wait for answers): of thousands the first should be with the server while the last
    is not yet written. A client belongs to one event loop."""

    base_url: str
    api_key: str | None = None
    sending: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(16), compare=False, repr=False)

    async def _send(self, method: str, path: str, body: dict | None) -> tuple[
            int, dict, asyncio.StreamReader, asyncio.StreamWriter]:
        """(status, headers, where the body comes from, what to close in the end)."""
        url = urlsplit(self.base_url.rstrip("/") + path)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        async with self.sending:
            content = b"" if body is None else json.dumps(body).encode()
            head = [f"{method} {url.path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}", "Connection: close",
                    "Content-Type: application/json", f"Content-Length: {len(content)}"]
            if self.api_key:
                head.append(f"Authorization: Bearer {self.api_key}")
            reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure, limit=LIMIT)
            writer.write("\r\n".join(head + ["", ""]).encode() + content)
        try:
            await writer.drain()
            line = await reader.readuntil(b"\r\n")
            if not (found := re.match(rb"HTTP/1\.[01] (\d{3})\b", line)):
                raise ConnectionError(f"no HTTP answer: {line[:60]!r}")
            status = int(found[1])
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            return status, headers, reader, writer
        except BaseException:
            writer.close()
            raise

    async def pieces(self, method: str, path: str, body: dict | None = None) -> AsyncIterator[bytes]:
        """The body of the answer. Raises Refused for any status but 200, OSError or EOFError if the answer is cut."""
        status, headers, reader, writer = await self._send(method, path, body)
        try:
            if status != 200:
                raise Refused(status, (await reader.read(2000)).decode("utf-8", "replace")[:300])
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
            elif "content-length" in headers:
                yield await reader.readexactly(int(headers["content-length"]))
            else:
                yield await reader.read()
        finally:
            writer.close()

    async def fetch(self, method: str, path: str, body: dict | None = None) -> dict:
        return json.loads(b"".join([piece async for piece in self.pieces(method, path, body)]))

    async def events(self, path: str, body: dict) -> AsyncIterator[tuple[float, dict]]:
        """A streamed answer: (when it came, the event), by time.perf_counter. Raises Refused for an error within."""
        rest = b""
        async for piece in self.pieces("POST", path, body):
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise Refused(200, str(event["error"])[:300])
                    yield now, event
