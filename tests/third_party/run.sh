#!/usr/bin/env bash
# Judges attention modules and functions of released packages, in an environment of their own.
#     bash tests/third_party/run.sh [FOLDER OF THE ENVIRONMENT] [ARGUMENTS OF PYTEST]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/tests/third_party/.venv}
shift || true
cd "$root"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q -c constraints.txt torch==2.13.0 -e .
"$venv/bin/pip" install -q -c constraints.txt --no-deps torch==2.13.0 -r tests/third_party/requirements.txt
export FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE # without its CUDA extension
"$venv/bin/pip" install -q --no-deps --no-build-isolation flash-attn==2.8.3.post2
"$venv/bin/pip" install -q --no-deps --upgrade --target "$venv/fake" fake-flash-attention==2.6.3.post2 # flash-attn's import name
ATTN_SPEC_THIRD_PARTY=1 "$venv/bin/python" -m pytest -q tests/third_party "$@"
