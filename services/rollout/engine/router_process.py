"""`python -m services.rollout.engine.router_process`: sglang-router, with its own arguments.

Its own launcher also imports a second router, written in Python, and with it FastAPI, SGLang and torch.
"""

from __future__ import annotations

import argparse

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.engine.router_process")
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()


if __name__ == "__main__":
    main()
