"""`python fake_service.py --address HOST:PORT [...]`: health, a child process, and the ways to go wrong."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path

from headrace.rpc.server import RpcServer


async def serve(args: argparse.Namespace) -> int:
    server = RpcServer("fake", args.address, [])
    await server.start()
    if args.exit_when is not None:
        while not args.exit_when.exists():
            await asyncio.sleep(0.01)
        args.exit_when.unlink()
        if args.last_words:
            print(args.last_words, file=sys.stderr)
        return int(args.exit_code)
    await server.run_until_signal()
    if args.slow_to_end:
        await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--children", type=Path, required=True, help="where the child's process id goes")
    parser.add_argument("--exit-when", type=Path, help="this file is there; it is removed")
    parser.add_argument("--exit-code", default=0)
    parser.add_argument("--last-words", help="print this before the exit")
    parser.add_argument("--slow-to-end", action="store_true", help="never, by itself")
    parser.add_argument("--broken", help="print this and fail before serving")
    args = parser.parse_args()
    if args.broken:
        sys.exit(args.broken)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    args.children.open("a").write(f"{child.pid}\n")
    sys.exit(asyncio.run(serve(args)))
