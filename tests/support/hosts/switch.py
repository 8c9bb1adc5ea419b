"""A switch in user space between network namespaces, for kernels without one.

A host is a TAP device; its number is the last byte of its hardware address.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time

_SET_INTERFACE = 0x400454CA  # TUNSETIFF, see linux/if_tun.h
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LARGEST_FRAME = 65_536


def hardware_address(host: int) -> str:
    """Of the host's interface."""
    return f"02:00:00:00:00:{host:02x}"


class Switch:
    """Forwards frames in a thread of its own until `close`."""

    def __init__(self, bits_per_second: float | None = None) -> None:
        """`bits_per_second`: of all hosts together; None: as fast as it can."""
        self._rate = bits_per_second
        self._free_at = 0.0
        self._taps: dict[int, int] = {}
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)

    def add(self, host: int, interface: str) -> None:
        """Makes the TAP device that is the host's; it may be moved to another namespace. Before `start`."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", interface.encode(), _TAP_WITHOUT_HEADER))
        self._taps[host] = tap

    def start(self) -> None:
        self._thread.start()

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
            readable, _, _ = select.select([*hosts, self._wake], [], [])
            if self._wake in readable:
                return
            for tap in readable:
                self._take(hosts[tap], os.read(tap, _LARGEST_FRAME))

    def _take(self, sender: int, frame: bytes) -> None:
        """A frame to a group is everybody's, as a host's hardware takes what is not its own for nobody's."""
        if self._rate is not None:
            now = time.monotonic()
            if self._free_at > now:
                time.sleep(self._free_at - now)
            self._free_at = max(now, self._free_at) + 8 * len(frame) / self._rate
        to_many = frame[0] & 1
        receivers = [host for host in self._taps if host != sender] if to_many else [frame[5]]
        for receiver in receivers:
            if receiver in self._taps:
                self._give(receiver, frame)

    def _give(self, receiver: int, frame: bytes) -> None:
        try:
            os.write(self._taps[receiver], frame)
        except OSError:  # its interface is down, or its queue is full: a frame is lost as on any network
            return
