#!/usr/bin/env bash
# Builds, checks and measures all that runs on an NVIDIA GPU, in one go, and prints one table: under nine minutes on one H100 or H200.
#
#   benchmarks/gpu.sh [FOLDER]
#
# Needs what `pip install -e .[test,cuda]` installs, and no network. The interpreter is .venv's, else python3; INTERPRETER names another one,
# TORCH_INTERPRETER the one that has torch and transformers, which are optional. MINUTES is the time for all (9). Each part has a limit of its
# own; a part that fails or is cut off is told and counted, and the others go on. The figures are added to benchmarks/results/gpu.jsonl; with
# a FOLDER, those of this run and all that was printed lie there as well. The exit status is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

folder=${1:-}
minutes=${MINUTES:-9}
interpreter=${INTERPRETER:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
torch=${TORCH_INTERPRETER:-$interpreter}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "$folder" ]; then mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && exec > >(tee "$folder/log") 2>&1; fi
export PYTHONUNBUFFERED=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
run=$work/run.jsonl
: >"$run"
failed=()

# part NAME SECONDS COMMAND...: run a command within its time, and within what is left of all the time
part() {
  local name=$1 limit=$2 left=$((minutes * 60 - SECONDS)) begin=$SECONDS status
  shift 2
  if [ "$left" -lt 10 ]; then
    echo "== $name: no time left"
    failed+=("$name")
    return
  fi
  echo
  echo "== $name (at $begin s, at most $((limit < left ? limit : left)) s)"
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@"
  status=$?
  if [ "$status" -ne 0 ]; then
    failed+=("$name")
    [ "$status" -eq 124 ] || [ "$status" -eq 137 ] && echo "== $name: cut off after $((SECONDS - begin)) s" || echo "== $name: exit status $status"
  else
    echo "== $name: $((SECONDS - begin)) s"
  fi
}

gpu() { # gpu PART SECONDS OPTIONS...: a part of benchmarks/gpu.py
  local name=$1 limit=$2
  shift 2
  part "$name $*" "$limit" "$interpreter" -m benchmarks.gpu "$name" --run "$run" --torch-python "$torch" "$@"
}

gpu environment 75
# A kernel that goes wrong, or never ends, takes its process with it: the tests that are left run in another one, until there are none (5).
part correctness 160 env TESTS_DONE="$work/tests" bash -c '
  worst=0
  for attempt in 1 2 3 4 5 6 7 8; do
    "$0" -m pytest --maxfail=30 -p no:cacheprovider tests/gpu
    status=$?
    [ "$status" -eq 5 ] && break
    [ "$status" -gt "$worst" ] && worst=$status
    [ "$status" -eq 4 ] && break
    [ "$status" -eq 0 ] || echo "the last test of this process: $(tail -n 1 "$TESTS_DONE")"
  done
  exit "$worst"' "$interpreter"
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
[ -z "$folder" ] || cp "$run" "$folder/gpu.jsonl"
echo
echo "$SECONDS s; ${#failed[@]} parts failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
exit "${#failed[@]}"
