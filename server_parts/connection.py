"""A client's connection: uvicorn's HTTP/1.1, with bounds on how slowly the other end may write and read.

uvicorn waits for ever for the head of a request, and for a reader to take what was written. The body's own limit is the
gate's, which knows what a body is.
"""

import asyncio
import json
import logging
from functools import partial

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from server_parts.protocol import RequestError

log = logging.getLogger("samebits.http")
LEAST_READ = 1 << 16  # bytes of a large answer that a reader takes in each `send_timeout`: slow, but alive


class Connection(H11Protocol):
    """header_timeout: seconds from a connection's start, or a request's first byte, to the end of its head.
    send_timeout: seconds in which what was written is read, or `LEAST_READ` bytes of it; beyond it the connection is
    cut, and with it its request."""

    def __init__(self, *args, header_timeout: float, send_timeout: float, **options):
        super().__init__(*args, **options)
        self.header_timeout, self.send_timeout = header_timeout, send_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.set_write_buffer_limits(high=0)  # writing is paused until the system has taken all of it
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer:
                timer.cancel()
        super().connection_lost(error)

    def _watch_head(self) -> None:
        """A head is awaited before a request, and after an answer that did not wait for its body's end."""
        is_awaited = self.conn.their_state is h11.IDLE or (
            self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY)
        if is_awaited and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout, self._give_up_on_head)
        elif not is_awaited and self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_on_head(self) -> None:
        self._refuse(RequestError(408, f"the request's head did not come within {self.header_timeout:g} seconds"))

    def send_400_response(self, message: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(RequestError(400, message))

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        log.info("refused", extra={"fields": {"status": error.status, "param": error.param, "code": error.code}})
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way, or was given
            body = json.dumps(error.body()).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))),
                       ("connection", "close")]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body),
                          h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._read_timer.cancel()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.send_timeout, self._give_up_on_reader)

    def _give_up_on_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() >= LEAST_READ:
            return self._watch_reader()
        log.info("cut off", extra={"fields": {"reason": "slow reader", "unread_bytes": self._unread}})
        self.transport.abort()


def uvicorn_config(app, header_timeout: float, send_timeout: float, **options) -> uvicorn.Config:
    """How uvicorn serves the application. Its own log of requests is off: ours says more, and no prompts."""
    connection = partial(Connection, header_timeout=header_timeout, send_timeout=send_timeout)
    return uvicorn.Config(app, http=connection, ws="none", log_config=None, access_log=False, server_header=False,
                          **options)
