"""Reads from a certificate what gRPC does not tell: its DER (RFC 5280, 4.1), without a library.

gRPC has verified the certificate before: the authority signed what is read here.
"""

from __future__ import annotations

import binascii
import datetime
import ssl

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEFORE_VALIDITY = 3
"""The serial number, the signature's algorithm, the issuer."""
_LONG_AGO = datetime.datetime.min.replace(tzinfo=datetime.UTC)


def valid_from(pem: bytes) -> datetime.datetime:
    """Returns when its validity begins; for an unreadable one a date before all others, so that callers refuse it."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem.decode())
        _, certificate, _ = _element(der)
        _, rest, _ = _element(certificate)
        tag, _, after = _element(rest)
        rest = after if tag == _VERSION else rest
        for _ in range(_BEFORE_VALIDITY):
            _, _, rest = _element(rest)
        tag, validity, _ = _element(rest)
        if tag != _SEQUENCE:
            return _LONG_AGO
        tag, text, _ = _element(validity)
        return _time(tag, text.decode())
    except (ValueError, IndexError, binascii.Error):
        return _LONG_AGO


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The tag and content of the first element, and what follows. Raises ValueError or IndexError for half of one."""
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    if start + length > len(data):
        raise ValueError("it ends before its content")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, text: str) -> datetime.datetime:
    if tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif tag != _GENERALIZED_TIME:
        return _LONG_AGO
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)
