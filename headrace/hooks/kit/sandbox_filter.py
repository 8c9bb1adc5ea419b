"""A seccomp filter for programs of the policy, as the kernel reads it.

It refuses calls that make namespaces or mounts, that take memory which no process is seen to have, and that look into
other processes. Everything else is bounded by the sandbox itself.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWUTS, NEWIPC, NEWCGROUP; all zero for a thread or a fork."""
_OTHER_NUMBERS = 0x40000000
"""Where the numbers of x32 begin, a second table of the same calls."""
_CLONE3 = 435
_OF_ALL = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring, open_tree, move_mount, fsopen to fspick, pidfd_getfd, mount_setattr, memfd_secret."""
_OF_MACHINE = {
    # unshare, setns, mount, umount2, pivot_root, memfd_create, shmget, msgget, mq_open, ptrace, process_vm_readv and
    # writev, perf_event_open, bpf, userfaultfd, open_by_handle_at, add_key, request_key, keyctl; then clone.
    "x86_64": (
        0xC000003E,
        (272, 308, 165, 166, 155, 319, 29, 68, 240, 101, 310, 311, 298, 321, 323, 304, 248, 249, 250),
        56,
    ),
    "aarch64": (
        0xC00000B7,
        (97, 268, 40, 39, 41, 279, 194, 186, 180, 117, 270, 271, 241, 280, 282, 265, 217, 218, 219),
        220,
    ),
}


def filter_of_calls(machine: str | None = None) -> bytes:
    """Returns instructions of 8 bytes each; none for a machine whose numbers are not known here."""
    known = _OF_MACHINE.get(machine or platform.machine())
    if known is None:
        return b""
    architecture, refused, clone = known
    refusal, missing = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS  # without clone3, libraries use clone
    program = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, refusal)),
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _OTHER_NUMBERS), (_RETURN, 0, 0, refusal)),
        *((_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, missing)),
    ]
    for number in (*refused, *_OF_ALL):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refusal)]
    program += [
        *((_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT)),
        *((_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, refusal), (_RETURN, 0, 0, _ALLOW)),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
