#!/usr/bin/env bash
# Checks and measures all that runs on an NVIDIA GPU, in six calls in the order of their worth, each within its minutes on one H100 or H200:
#
#   benchmarks/gpu.sh A|B|C|D|E|F [FOLDER]
#
#   A  7 min  versions; every kernel and format once against recorded answers; tokens of the bundled model with each kind of weights and
#             KV cache, and with drafts; one case of each test of tests/gpu; roofs, one decode of 1B
#   B  9 min  all of tests/gpu, kernels (Hopper's, too), decodes of 1B and 8B in bf16
#   C  9 min  256 requests (captures first, untimed), idle time, the profiler's view, memcheck and racecheck
#   D  9 min  peers, each kernel against tinygrad's code
#   E  8 min  decodes of 1B and 8B in q8_0, q4_0 and q4_k_m; experts, adapters, states; every kernel compiled at the sizes of real models
#   F  5 min  llama.cpp in turn with us, where llama-bench is on the PATH
#
# Needs what `pip install -e .[test,cuda]` installs, or an image with torch and the packages of docs/gpu.md; no network, no C compiler. The
# interpreter is .venv's, else python3; INTERPRETER names another one, TORCH_INTERPRETER the one that has torch and transformers, which are
# optional. MINUTES is another time for the call. Each part has a limit of its own; a part that fails or is cut off is reported and counted,
# and the others continue. With a FOLDER, what was printed and the figures are there as A.log, A.jsonl, ..., twelve files after all calls,
# each written as it is measured, and B to F take A's roofs; without one the figures are added to benchmarks/results/gpu.jsonl. The exit
# status is the number of parts that failed, 2 also where the call is wrong or something is missing.
#
#   benchmarks/gpu.sh --list A            the parts and their limits in seconds
#   benchmarks/gpu.sh --dry [A|B|C|D|E|F]   toy shapes on an emulated GPU that launches nothing: no GPU, no C compiler; without a letter all
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

dry='' list=''
while :; do
  case ${1:-} in
    --dry) dry=1 ;;
    --list) list=1 ;;
    *) break ;;
  esac
  shift
done
letter=${1:-}

dry_run_of_all() { # A fills the cache of compiled kernels; then two at a time
  local logs failed=0
  logs=$(mktemp -d)
  "$0" --dry A || failed=1
  { "$0" --dry B && "$0" --dry E; } >"$logs/BE" 2>&1 & local be=$!
  { "$0" --dry C && "$0" --dry D && "$0" --dry F; } >"$logs/CD" 2>&1 & local cd=$!
  wait "$be" || failed=1
  wait "$cd" || failed=1
  cat "$logs/BE" "$logs/CD"
  rm -r "$logs"
  [ "$failed" -eq 0 ] && echo "dry run: all parts passed in $SECONDS s" || echo "dry run: FAILED; the parts that failed are above"
  exit "$failed"
}

case $letter in
  A) minutes=${MINUTES:-7} ;;
  E) minutes=${MINUTES:-8} ;;
  F) minutes=${MINUTES:-5} ;;
  B | C | D) minutes=${MINUTES:-9} ;;
  *)
    [ -z "$letter" ] && [ -n "$dry" ] && dry_run_of_all
    echo "gpu.sh: expected A, B, C, D, E or F, got '$letter'; A is the first call on a new machine" >&2
    exit 2
    ;;
esac
[ -z "$dry" ] || minutes=60 slower=6 # NVRTC is on two cores of a shared machine then
interpreter=${INTERPRETER:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
torch=${TORCH_INTERPRETER:-$interpreter}
if [ -z "$list" ]; then "$interpreter" benchmarks/gpu_needs.py "$letter" ${dry:+--dry} || exit 2; fi
log=$letter.log figures=$letter.jsonl
advice='docs/gpu.md, "If a part fails", says what each failure means and what to try'
. benchmarks/parts.sh "${2:-}"
[ -n "$folder$list$dry" ] || echo "gpu.sh: no FOLDER: the figures are added to benchmarks/results/gpu.jsonl here, what is printed is kept nowhere"

gpu() { # gpu PART SECONDS OPTIONS...: a part of benchmarks/gpu.py
  local name=$1 limit=$2
  shift 2
  part "$name${*:+ $*}" "$limit" "$interpreter" -m benchmarks.gpu "$name" --run "$run" --torch-python "$torch" \
    ${dry:+--dry} ${folder:+--unrecorded} "$@"
}

[ -n "$dry" ] || export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -m 'long or not long'" # all cases: what is long is so on an emulated GPU

gpu_tests() { # gpu_tests NAME SECONDS WORDS VARIABLES...: pytest with these words, of tests that have not run, with these variables set
  local name=$1 limit=$2
  local -a words
  read -ra words <<<"$3"
  shift 3
  part "$name" "$limit" env TESTS_DONE="$work/tests" ${dry:+TESTS_GPU_DRY=1} "$@" bash -c "$tests" "$interpreter" "${words[@]}"
}

sanitize() { # sanitize TOOL SECONDS: one case of each test at toy shapes under compute-sanitizer, if that is installed
  if [ -z "$list" ] && ! command -v compute-sanitizer >/dev/null; then
    echo "== $1: compute-sanitizer is not on the PATH; left out"
    return
  fi
  part "$1" "$2" env TESTS_EACH=1 TESTS_GPU_TOY=1 compute-sanitizer --tool "$1" --error-exitcode 1 \
    "$interpreter" -m pytest -p no:cacheprovider tests/gpu/test_products.py tests/gpu/test_attention.py
}

roofs() { # those of call A, else measured now
  [ -n "$folder" ] && [ -f "$folder/A.jsonl" ] && grep '"part": "roofs"' "$folder/A.jsonl" >>"$run" || gpu roofs 35
}

case $letter in
  A)
    gpu environment 40
    gpu selftest 70
    gpu_tests "tokens with each feature" 120 tests/gpu/test_features.py
    gpu_tests "one case of each test" 80 tests/gpu TESTS_EACH=1
    gpu roofs 35
    gpu decode 45 --shape llama-3.2-1b
    ;;
  B)
    roofs
    gpu_tests "all tests" 240 "tests/gpu --ignore=tests/gpu/test_features.py" # those are of call A
    gpu kernels 100
    gpu decode 70 --shape llama-3.2-1b --batches 1,64 --prompts 512,4096
    gpu decode 75 --shape llama-3.1-8b
    ;;
  C)
    roofs
    gpu serve 230
    gpu decode 55 --shape qwen3-0.6b --batches 1,8,64
    gpu profile 90 --patience 85
    sanitize memcheck 60
    sanitize racecheck 60
    ;;
  D)
    roofs
    gpu peers 310 --patience 150
    gpu ablation 180
    ;;
  E)
    roofs
    gpu decode 30 --shape llama-3.2-1b --weights q8_0
    gpu decode 30 --shape llama-3.2-1b --weights q4_0
    gpu decode 45 --shape llama-3.2-1b --weights q4_k_m # of a file, which is written first
    gpu decode 40 --shape llama-3.1-8b --weights q8_0
    gpu decode 40 --shape llama-3.1-8b --weights q4_0
    gpu decode 80 --shape llama-3.1-8b --weights q4_k_m
    gpu experts 60
    gpu compile 110
    ;;
  F)
    roofs
    gpu llama 265 --patience 60 --limit 85
    ;;
esac
[ -z "$list" ] || exit 0

echo
"$interpreter" -m benchmarks.gpu table --run "$run" --checks "$work/tests"
the_end
