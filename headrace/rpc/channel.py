"""A gRPC channel as every client has it: quick reconnects, large messages, dead peers noticed."""

from __future__ import annotations

import socket

import grpc

from headrace.rpc.access.bearer import interceptors, token_of
from headrace.rpc.keepalive import CONNECT_SECONDS, keepalive_options
from headrace.rpc.net import Address, resolved
from headrace.rpc.tls import SERVICE_NAME, channel_credentials, tls_of
from headrace.wire.limits import MAX_MESSAGE_BYTES


def connect(address: str) -> grpc.aio.Channel:
    """A lazy channel to `host:port`, or to whichever of `host:port|host:port` answers.

    Encrypted where HEADRACE_TLS_DIR names a folder; raises ConfigError for one without certificates. Calls have the
    token of HEADRACE_TOKEN or HEADRACE_TOKEN_FILE, but never unencrypted to another machine. Retries are
    `headrace.rpc.call`'s: gRPC's own end after five tries.
    """
    target = _target(address)
    options: list[tuple[str, str | int]] = [
        ("grpc.enable_http_proxy", 0),  # a proxy of the environment is for other addresses than a run's
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_frame_size", 1 << 20),
        # A client is back 0.1 s to 0.3 s after its server instead of 5 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_SECONDS * 1000)),  # in truth the time that a connection has
        *keepalive_options(),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    folder, token = tls_of(), token_of()
    with_token = interceptors(token) if token and (folder or _is_of_this_machine(address)) else None
    if folder is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=with_token)
    options += [("grpc.ssl_target_name_override", SERVICE_NAME), ("grpc.default_authority", SERVICE_NAME)]
    return grpc.aio.secure_channel(target, channel_credentials(folder), options=options, interceptors=with_token)


def _is_of_this_machine(address: str) -> bool:
    return all(Address.parse(place).is_loopback for place in address.split("|"))


def _target(address: str) -> str:
    """Resolves several addresses, because gRPC needs numeric ones.

    gRPC tries them in order and stays with the first that answers. All are of one family, the first place's.
    """
    places = [Address.parse(place) for place in address.split("|")]
    if len(places) == 1:
        return address
    family, found = 0, []
    for place in places:
        known = [row for row in resolved(place) if family in (0, row[0])]
        family = family or known[0][0]
        found += [str(Address(row[4][0], place.port)) for row in known[:1]]
    return ("ipv6:" if family == socket.AF_INET6 else "ipv4:") + ",".join(found)
