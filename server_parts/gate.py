"""What stands before the application: the host asked for, the key, a body's size, and the time to send it in."""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Callable

from server_parts.protocol import RequestError

log = logging.getLogger("samebits.http")
DISCARD_FACTOR = 8  # of a body that is too large, so many limits are read and dropped, so that the client sees the 413


def host_name(header: bytes) -> str:
    """The name in a Host header: no port, no brackets, lower case. "" if it is none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:\d*)?", header.decode("latin-1"))
    return match[1].strip("[]").lower() if match else ""


class Gate:
    """ASGI middleware in front of everything. `api_key` None lets everyone in, `allowed_hosts` empty any host;
    `body_timeout` is in seconds.

    The key guards /v1/ alone: the page, /health, /metrics and the schema tell nothing of anybody's requests. The host
    guards all: a web page whose name was made to resolve to this machine calls us by that name, and is refused.
    """

    def __init__(self, app: Callable, api_key: str | None, max_body_bytes: int, body_timeout: float,
                 allowed_hosts: tuple[str, ...] = ()):
        self.app, self.max_body_bytes, self.body_timeout = app, max_body_bytes, body_timeout
        self.allowed_hosts = {name.strip("[]").lower() for name in allowed_hosts}
        self.expected = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if self.allowed_hosts and (host := host_name(headers.get(b"host", b""))) not in self.allowed_hosts:
            return await self._refuse(RequestError(421, f"this server does not answer for the host {host!r}; "
                                                   "--allowed-host adds one", code="host_not_allowed"), send)
        is_guarded = self.expected is not None and scope["path"].startswith("/v1/") and scope["method"] != "OPTIONS"
        if is_guarded and not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return await self._refuse(RequestError(401, "wrong or missing API key: send it as a bearer token",
                                                   code="invalid_api_key"), send)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            await self._discard(receive, int(length))
            return await self._refuse(self._too_large(), send)
        await self.app(scope, self._limited(receive), send)

    def _limited(self, receive: Callable) -> Callable:
        """`receive` that counts the body's bytes and time; past its end it only waits for the client to go."""
        size, is_whole, deadline = 0, False, time.monotonic() + self.body_timeout

        async def limited() -> dict:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise RequestError(408, f"the body did not come within {self.body_timeout:g} seconds") from None
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if size > self.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")

    async def _discard(self, receive: Callable, length: int) -> None:
        async def read() -> None:
            while (await receive()).get("more_body", False):
                pass

        if length <= DISCARD_FACTOR * self.max_body_bytes:
            try:
                await asyncio.wait_for(read(), self.body_timeout)
            except asyncio.TimeoutError:
                pass

    @staticmethod
    async def _refuse(error: RequestError, send: Callable) -> None:
        log.info("refused", extra={"fields": {"status": error.status, "param": error.param, "code": error.code}})
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                   (b"connection", b"close")] + [(b"www-authenticate", b"Bearer")] * (error.status == 401)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
