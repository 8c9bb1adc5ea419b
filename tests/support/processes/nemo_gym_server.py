"""Serves a resource server of NeMo Gym at a socket that it inherits: `nemo_gym_server.py mcqa DESCRIPTOR`.

It is the server's own application. Its own start would begin a cluster of Ray beside it.
"""

from __future__ import annotations

import importlib
import inspect
import socket
import sys
from typing import Any

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig


def defined_in(module: Any, base: type) -> Any:
    """The one class of this kind that the module defines."""
    classes = inspect.getmembers(module, inspect.isclass)
    (found,) = (each for _, each in classes if issubclass(each, base) and each.__module__ == module.__name__)
    return found


if __name__ == "__main__":
    name, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    module = importlib.import_module(f"resources_servers.{name}.app")
    at = dict(zip(("host", "port"), listener.getsockname(), strict=True))
    config = defined_in(module, BaseResourcesServerConfig)(**at, name=name, entrypoint="app.py", domain="other")
    client = ServerClient(head_server_config=BaseServerConfig(**at), global_config_dict=DictConfig({}))
    server = defined_in(module, SimpleResourcesServer)(config=config, server_client=client)
    uvicorn.Server(uvicorn.Config(server.setup_webserver())).run(sockets=[listener])
