#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most eight minutes: verifies every fused implementation on CUDA, times
# them all, compares our clock with Triton's do_bench. Writes gpu_check.json (or the file that is named) and its log.
#
#     benchmarks/gpu_check.sh [OUT.json]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check.json}
python=${PYTHON:-python}
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} timeout --signal=INT --kill-after=10 475 \
  "$python" benchmarks/gpu_check.py --out "$out" 2>&1 | tee "${out%.json}.log"
exit "${PIPESTATUS[0]}"
