#!/bin/sh
# Deletes what no service loads: pip itself, tests, headers, C sources, debug symbols, and Arrow's Flight and Substrait.
# Libraries in *.libs stay as they are: their wheels have moved their parts, and strip may misalign those.
cd /opt/headrace/lib/python3*/site-packages || exit 1
rm -rf pip pip-* setuptools setuptools-* pkg_resources pyarrow/include pyarrow/libarrow_flight* pyarrow/libarrow_substrait*
find . -depth -type d -name tests -exec rm -rf {} +
find . -type f \( -name '*.[ch]' -o -name '*.a' -o -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' \) -delete
find . -type f -name '*.so*' ! -path '*.libs/*' -exec strip --strip-debug {} +
