"""Values at the edges of every field type of protobuf."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

_INTS = (0, 1, 2, 3, -1, 1000, 1001, 10_001, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1)
_FLOATS = (
    *(0.0, -0.0, 0.5, 1.0, -1.0, float("nan"), float("inf"), float("-inf")),
    *(1e308, -1e308, 5e-324, 1e-320, 1e6, 1e7),
)

STRINGS = (
    *("", "a", "\0", "a\0b", "a\nb", "\x7f\x1b[31m", "\u202egnp.exe", "\ufffe\U0010ffff", "é" * 300, "../../x"),
    *("/../../etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "//", "s/0", "%s%n%x{0}", "0"),
    *("-1", "²", "٣", "9" * 19, "9" * 5000, "a" * 128, "a" * 513, "a" * 1024, "null", "[]", "{}", "{"),
    *('{"a": NaN}', '{"a": 1e999}', '{"rm_type": ["math"]}', '{"rm_type": {"a": 1}}'),
    *('{"rm_type": "no such scorer"}', '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}"),
    *('{"a":' * 200 + "1" + "}" * 200, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 100_000, "{{ x }}{% for"),
    *("127.0.0.1:1", "unix:/tmp/x", "[::1]:0"),
)
LARGE_STRING = "z" * (1 << 20)
BYTES = (
    *(b"", b"\0", b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\x12\x20" + bytes(32), b"\x1e\x20" + bytes(32)),
    *(bytes(32), bytes(4096)),
)
LARGE_BYTES = bytes(1 << 20)
COUNTS = (0, 2, 17, 1001, 4097, 10_001, 65_537)
"""How often a repeated field may come: around the limits that the protocol names."""

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def edges(field: FieldDescriptor) -> tuple[object, ...]:
    """What a scalar field may hold that its owner did not think of."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return BYTES if field.type == FieldDescriptor.TYPE_BYTES else STRINGS
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return (False, True)
    low, high = _RANGES[field.cpp_type]
    return tuple(value for value in (*_INTS, low, high, high - 1) if low <= value <= high)
