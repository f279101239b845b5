#!/usr/bin/env bash
# Builds, checks and measures all that runs on an NVIDIA GPU, in one go, and prints one table: under nine minutes on one H100 or H200.
#
#   benchmarks/gpu.sh [FOLDER]
#
# Needs what `pip install -e .[test,cuda]` installs, and no network. The interpreter is .venv's, else python3; INTERPRETER names another one,
# TORCH_INTERPRETER the one that has torch and transformers, which are optional. MINUTES is the time for all (9). Each part has a limit of its
# own; a part that fails or is cut off is reported and counted, and the others continue. The figures are added to benchmarks/results/gpu.jsonl; with
# a FOLDER, those of this run and all that was printed lie there as well. The exit status is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

minutes=${MINUTES:-9}
interpreter=${INTERPRETER:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
torch=${TORCH_INTERPRETER:-$interpreter}
. benchmarks/parts.sh

gpu() { # gpu PART SECONDS OPTIONS...: a part of benchmarks/gpu.py
  local name=$1 limit=$2
  shift 2
  part "$name $*" "$limit" "$interpreter" -m benchmarks.gpu "$name" --run "$run" --torch-python "$torch" "$@"
}

gpu environment 75
part correctness 160 env TESTS_DONE="$work/tests" bash -c "$tests" "$interpreter" tests/gpu
gpu roofs 60
gpu kernels 60
gpu decode 75 --shape llama-3.2-1b --batches 1,64 --prompts 512,4096
gpu decode 90 --shape llama-3.1-8b
gpu decode 40 --shape llama-3.2-1b --weights q8_0
gpu decode 40 --shape llama-3.2-1b --weights q4_0
gpu serve 120
gpu peers 155 --patience 75
gpu ablation 75

echo
"$interpreter" -m benchmarks.gpu table --run "$run"
the_end gpu.jsonl
