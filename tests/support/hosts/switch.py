"""A switch in user space between network namespaces: it can delay frames, lose some, be slow, and be cut.

The kernel's own (`tc netem`) is not in every kernel, and does it for an interface, not between two hosts. A host is a
TAP device; its number is the last byte of its hardware address.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections import Counter

_SET_INTERFACE = 0x400454CA  # TUNSETIFF, see linux/if_tun.h
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_ARP, _IPV6, _ICMPV6 = b"\x08\x06", b"\x86\xdd", 58
_LONGEST_QUEUE_SECONDS = 0.25
"""What a slow cable has no room for is lost, as in a router."""
_LARGEST_FRAME = 65_536


def hardware_address(host: int) -> str:
    """Of the host's interface."""
    return f"02:00:00:00:00:{host:02x}"


class Switch:
    """Forwards frames in a thread of its own until `close`."""

    def __init__(self) -> None:
        self._taps: dict[int, int] = {}
        self._cut: frozenset[tuple[int, int]] = frozenset()
        """Senders and receivers."""
        self._sent: Counter[tuple[int, int]] = Counter()
        self._delay_seconds = 0.0
        self._loss = 0.0
        self._bytes_per_second: float | None = None
        self._free_at: dict[int, float] = {}
        """When a host's cable has sent what it was given."""
        self._random = random.Random(0)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)

    def add(self, host: int, interface: str) -> None:
        """Makes the TAP device that is the host's; it may be moved to another namespace. Before `start`."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", interface.encode(), _TAP_WITHOUT_HEADER))
        self._taps[host] = tap

    def start(self) -> None:
        self._thread.start()

    def disturb(self, *, delay_seconds: float, loss: float, bits_per_second: float | None = None) -> None:
        """Every frame from now on comes later, or with this probability not at all; hosts send no faster than that."""
        self._delay_seconds, self._loss = delay_seconds, loss
        self._bytes_per_second = None if bits_per_second is None else bits_per_second / 8

    def cut(self, one: int, other: int) -> None:
        """Pulls the cable between two hosts: nothing passes, and nobody is told."""
        self.mute(one, other)
        self.mute(other, one)

    def mute(self, sender: int, receiver: int) -> None:
        """Nothing passes in this direction."""
        self._cut |= {(sender, receiver)}

    def heal(self) -> None:
        """All cables are back."""
        self._cut = frozenset()

    def num_bytes(self, sender: int, receiver: int) -> int:
        """What has passed from one to the other so far."""
        return self._sent[sender, receiver]

    def close(self) -> None:
        """The devices go with it."""
        os.write(self._woken, b".")
        if self._thread.is_alive():
            self._thread.join()
        for handle in (*self._taps.values(), self._wake, self._woken):
            os.close(handle)

    def _forward(self) -> None:
        hosts = {tap: host for host, tap in self._taps.items()}
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            readable, _, _ = select.select([*hosts, self._wake], [], [], wait)
            if self._wake in readable:
                return
            for tap in readable:
                self._take(hosts[tap], os.read(tap, _LARGEST_FRAME))
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, receiver, frame = heapq.heappop(self._due)
                self._give(receiver, frame)

    def _take(self, sender: int, frame: bytes) -> None:
        """A frame to a group is everybody's, as a host's hardware takes what is not its own for nobody's."""
        to_many = frame[0] & 1
        receivers = [host for host in self._taps if host != sender] if to_many else [frame[5]]
        departs = self._departure(sender, len(frame))
        if departs is None:
            return
        for receiver in receivers:
            if receiver not in self._taps or (sender, receiver) in self._cut:
                continue
            if not _finds_hosts(frame) and self._random.random() < self._loss:
                continue
            self._sent[sender, receiver] += len(frame)
            heapq.heappush(self._due, (departs + self._delay_seconds, next(self._order), receiver, frame))

    def _departure(self, sender: int, num_bytes: int) -> float | None:
        """When the frame has left the host's cable; None where it has no room."""
        now = time.monotonic()
        if self._bytes_per_second is None:
            return now
        starts = max(now, self._free_at.get(sender, now))
        if starts - now > _LONGEST_QUEUE_SECONDS:
            return None
        self._free_at[sender] = starts + num_bytes / self._bytes_per_second
        return self._free_at[sender]

    def _give(self, receiver: int, frame: bytes) -> None:
        try:
            os.write(self._taps[receiver], frame)
        except OSError:  # its interface is down, or its queue is full: a frame is lost as on any network
            return


def _finds_hosts(frame: bytes) -> bool:
    """ARP, and IPv6's way of the same: without them nobody would find anybody, so those alone are never lost."""
    return frame[12:14] == _ARP or (frame[12:14] == _IPV6 and frame[20] == _ICMPV6)
