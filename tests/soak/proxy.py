"""A TCP proxy before the S3 server that is slow, delays, fails, hangs and recovers. One thread with one event loop."""

from __future__ import annotations

import asyncio
import threading
import time

BLOCK = 16 << 10
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>an outage of the soak</Message></Error>"
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
    len(SLOW_DOWN),
    SLOW_DOWN,
)

#: Ways to be: `ok` passes at the rate, `delay` a quarter of it and late, `fail` breaks connections, `busy` answers 503,
#: `hang` accepts and passes nothing on until it is something else again.
MODES = ("ok", "delay", "fail", "busy", "hang")


class Proxy:
    """Listens on a free port of loopback from `start` on."""

    def __init__(self, upstream: int, rate: float):
        self.upstream, self.rate = upstream, rate
        self.mode, self.port = "ok", 0
        self.outages = 0
        self.free_at = 0.0
        self.loop = asyncio.new_event_loop()
        self.open: set[asyncio.StreamWriter] = set()

    def start(self) -> None:
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait()

    def be(self, mode: str) -> None:
        """From now on."""
        self.outages += mode != "ok" and self.mode == "ok"
        self.mode = mode
        if mode in ("fail", "busy"):
            self.loop.call_soon_threadsafe(self._break_all)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self.loop.run_forever()

    def _break_all(self) -> None:
        for writer in list(self.open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            await self._gate()
            if self.mode == "fail":
                writer.transport.abort()
            elif self.mode == "busy":
                await reader.read(BLOCK)
                writer.write(BUSY)
                await writer.drain()
            else:
                there, back = await asyncio.open_connection("127.0.0.1", self.upstream)
                self.open.add(back)
                await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
                self.open.discard(back)
        except OSError:
            pass
        finally:
            self.open.discard(writer)
            writer.close()

    async def _gate(self) -> None:
        while self.mode == "hang":
            await asyncio.sleep(0.05)
        if self.mode == "delay":
            await asyncio.sleep(0.5)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while block := await reader.read(BLOCK):
                await self._gate()
                await self._pace(len(block))
                writer.write(block)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def _pace(self, count: int) -> None:
        """All connections share the rate, both ways."""
        rate = self.rate / 4 if self.mode == "delay" else self.rate
        self.free_at = max(self.free_at, time.monotonic()) + count / rate
        await asyncio.sleep(self.free_at - time.monotonic())
