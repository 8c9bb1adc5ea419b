#!/bin/sh
# Deletes what no service loads: pip itself, tests, headers, and Arrow's Flight and Substrait.
cd /opt/headrace/lib/python3*/site-packages || exit 1
rm -rf pip pip-* setuptools setuptools-* pkg_resources pyarrow/include pyarrow/libarrow_flight* pyarrow/libarrow_substrait*
find . -depth -type d -name tests -exec rm -rf {} +
