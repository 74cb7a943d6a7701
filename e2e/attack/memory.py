"""Clients that announce much and send little, or send heads without end: what they cost in memory, and whom they hold up.

    e2e/attack/memory.py [--connections 10000] [--idle 0] [--short]

For each attack: opens the connections, holds them, and prints the gateway's resident memory before, at most, and a minute
after they are gone; meanwhile another client asks one thing after another, and its p99 is printed beside what it was before.
"""

import argparse
import asyncio
import contextlib
import resource
import statistics
import sys
import time

from arena import Arena, chat

GROWN_MAX_MIB, AT_MOST_MIB, SLOWER_MAX = 30, 200, 1.2
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

ATTACKS = {
    # name: (share of --connections, what each of them sends)
    "announce 1 MB": (1.0, REQUEST + b"content-length: 1000000\r\n\r\n{"),
    "announce 64 MB": (1.0, REQUEST + b"content-length: 64000000\r\n\r\n{"),
    "chunks that do not come": (1.0, REQUEST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"),
    "half of 100 KB": (0.2, REQUEST + b"content-length: 100000\r\n\r\n" + b"[" * 50_000),
    "250 KB of head": (0.05, REQUEST + b"x-long: " + b"a" * 250_000),
    "60 KB of head": (0.2, REQUEST + b"x-long: " + b"a" * 60_000),
    "nothing": (1.0, b""),
    "4 MB, whole": (0.01, REQUEST + b"content-length: 4000000\r\n\r\n" + b'{"model": "' + b"x" * 3_999_987 + b'"}'),
}


async def open_and_send(port, text, opened):
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        writer.write(text)
        await asyncio.wait_for(writer.drain(), 30)
    except (OSError, TimeoutError):
        pass


async def ask(port, times, wanted):
    """Times of that many requests, one after another on one connection, in ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = chat("hello")
    request = REQUEST + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(wanted):
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head[:200]
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        times.append(1000 * (time.perf_counter() - began))
    writer.close()


def p99(times):
    return statistics.quantiles(times, n=100)[98] if len(times) > 1 else 0.0


async def attack(arena, name, text, connections, idle, wait_s, asked):
    before_ms, during_ms = [], []
    await ask(arena.port, before_ms, asked)
    bystanders = []
    for begin in range(0, idle, 500):
        await asyncio.gather(*(open_and_send(arena.port, b"", bystanders) for _ in range(min(500, idle - begin))))
    with arena.watch() as rss:
        opened = []
        for begin in range(0, connections, 250):
            await asyncio.gather(
                *(open_and_send(arena.port, text, opened) for _ in range(min(250, connections - begin)))
            )
        await ask(arena.port, during_ms, asked)
        rss.look()
        for writer in [*opened, *bystanders]:
            writer.transport.abort()
        most = rss.most
        until = time.monotonic() + wait_s
        while time.monotonic() < until and rss.now() - rss.before > GROWN_MAX_MIB:
            await asyncio.sleep(0.5)
        after = rss.now()
    slower = p99(during_ms) / p99(before_ms)
    print(
        f"| {name} | {connections} + {idle} | {rss.before:.0f} | {most:.0f} | {after:.0f} "
        f"| {p99(before_ms):.2f} | {p99(during_ms):.2f} | {slower:.2f} |",
        flush=True,
    )
    wrong = [f"{name}: {after - rss.before:.0f} MiB are not given back"] if after - rss.before > GROWN_MAX_MIB else []
    if name.startswith("announce") and most > AT_MOST_MIB:
        wrong.append(f"{name}: {most:.0f} MiB")
    return wrong


async def all_of(arguments):
    wrong = []
    print("| attack | connections + idle | RSS MiB before | at most | after | p99 ms before | during | times |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (share, text) in ATTACKS.items():
        if arguments.only and arguments.only not in name:
            continue
        with Arena(arguments.set) as arena:
            connections = max(1, int(share * arguments.connections))
            wrong += await attack(arena, name, text, connections, arguments.idle, arguments.wait, arguments.asked)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--asked", type=int, default=1000, help="requests of the other client, before and during")
    parser.add_argument("--wait", type=float, default=60, help="seconds that memory has to be given back")
    parser.add_argument("--only", help="attacks whose name has this")
    parser.add_argument("--set", action="append", default=[], help="a setting of the gateway")
    arguments = parser.parse_args()
    wanted, hard = arguments.connections + arguments.idle + 1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        # More than the hard limit is root's to give.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
    return asyncio.run(all_of(arguments))


if __name__ == "__main__":
    sys.exit(main())
