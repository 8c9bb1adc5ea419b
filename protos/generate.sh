#!/usr/bin/env bash
# Writes headrace/api/ from protos/. Run by `make protos`, which sets up the pinned generator first.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: generate.sh PYTHON-WITH-GRPCIO-TOOLS [OUT-DIR]}
out=${2:-.}
PATH="$(dirname "$python"):$PATH"
mkdir -p "$out/headrace/api"
find "$out/headrace/api" -name '*_pb2*.py*' -delete
"$python" -m grpc_tools.protoc -Iprotos --python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    --grpc_python_out="$out" $(find protos/headrace -name '*.proto' | sort)
# A *_pb2_grpc.py (and .pyi) is made for sample.proto too; it has no service.
rm -f "$out"/headrace/api/sample/v1/sample_pb2_grpc.py*
find "$out/headrace/api" -type d -exec touch {}/__init__.py \;
