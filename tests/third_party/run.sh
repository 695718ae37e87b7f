#!/usr/bin/env bash
# Judges attention modules of released packages, in an environment of their own.
#     bash tests/third_party/run.sh [FOLDER OF THE ENVIRONMENT] [ARGUMENTS OF PYTEST]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/tests/third_party/.venv}
shift || true
cd "$root"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q -c constraints.txt torch==2.13.0 -e .
"$venv/bin/pip" install -q -c constraints.txt --no-deps torch==2.13.0 -r tests/third_party/requirements.txt
ATTN_SPEC_THIRD_PARTY=1 "$venv/bin/python" -m pytest -q tests/third_party "$@"
