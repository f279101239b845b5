#!/usr/bin/env bash
# Checks and measures all that runs on a Mac's GPU, in one go, and prints a block to paste into an issue: up to twenty minutes.
#
#   benchmarks/mac.sh [FOLDER]
#   benchmarks/mac.sh --list     the parts and their limits in seconds, on any machine
#
# Needs macOS 13 or later on an M1 or later and what `pip install -e '.[test]'` installs, and no network. The interpreter is .venv's, else
# python3; INTERPRETER names another one, PEERS_INTERPRETER the one that has mlx-lm. That and llama.cpp (llama-batched-bench on the PATH)
# are optional. MINUTES is the time for all (20). Each part has a limit of its own; a part that fails or is cut off is reported and counted, and
# the others continue. What does not fit the Mac's memory is left out. The figures are added to benchmarks/results/mac.jsonl; with a FOLDER,
# those of this run, the block and all that was printed lie there as well. The exit status is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

list=''
if [ "${1:-}" = --list ]; then list=1 && shift; fi
if [ -z "$list" ] && [ "$(uname -sm)" != "Darwin arm64" ]; then
  echo "mac.sh: expected a Mac with Apple's own chip, this is $(uname -sm); benchmarks/gpu.sh is for NVIDIA's, make test for all" >&2
  exit 1
fi
minutes=${MINUTES:-20}
interpreter=${INTERPRETER:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
peers=${PEERS_INTERPRETER:-$interpreter}
log=log figures=mac.jsonl
advice='docs/metal.md, "If a part fails", says what to try'
. benchmarks/parts.sh "${1:-}"

mac() { # mac PART SECONDS OPTIONS...: a part of benchmarks/mac.py
  local name=$1 limit=$2
  shift 2
  part "$name${*:+ $*}" "$limit" "$interpreter" -m benchmarks.mac "$name" --run "$run" --torch-python "$peers" --patience 60 "$@"
}

# in the order of worth, for MINUTES may end anywhere: first what fails where anything is missing, then one figure of each kind
mac environment 100
mac roofs 25
mac selftest 60 # every kernel once in every format, against recorded answers
mac decode 70 --shape llama-3.2-1b --batches 1,16 --prompts 512
# the tests of the kernels, on the GPU instead of the emulator; and of the engine, compared with the CPU
part "kernels' tests" 220 env TESTS_DONE="$work/tests" bash -c "$tests" "$interpreter" -p tests.gpu.attempts -p tests.metal.on_gpu tests/kernels/metal
part "the engine's tests" 140 env TESTS_DONE="$work/tests" bash -c "$tests" "$interpreter" tests/gpu
mac kernels 65
mac decode 75 --shape llama-3.2-1b --batches 1,16 --prompts 512 --weights q4_k_m
mac decode 70 --shape llama-3.1-8b --batches 1,16 --prompts 512 --weights q4_0
part "kernels in use" 20 "$interpreter" main.py kernels --device METAL
mac experts 40 # experts, adapters and recurrent states, op by op
mac decode 45 --shape llama-3.2-1b --batches 1,16 --prompts 512 --weights q8_0
mac decode 45 --shape llama-3.2-1b --batches 1,16 --prompts 512 --weights q4_0
mac peers 80
mac decode 35 --shape qwen3-0.6b --weights q8_0
mac ablation 45
mac decode 35 --shape llama-3.1-8b --batches 1,16 --weights q8_0
mac decode 30 --shape llama-3.1-8b
[ -z "$list" ] || exit 0

echo
echo "---------------- paste from here into an issue ----------------"
"$interpreter" -m benchmarks.mac report --run "$run" --checks "$work/tests" --failed ${failed[@]+"${failed[@]}"} | tee "$work/block"
echo "---------------- to here ----------------"
[ -z "$folder" ] || cp "$work/block" "$folder/block.md"
the_end
