# What gpu.sh and mac.sh share: parts with a time of their own each, of which one that fails is counted and the others continue.
# To be sourced at the top of the repository, with `minutes` for all parts, `interpreter`, and $1, the folder for what is printed, or nothing.
# `log` names another file in the folder. `list` prints parts and limits and runs nothing; `slower` is a factor of all limits.
# Bash 3.2, macOS's, reads it; there is no timeout(1) there.

folder=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "$folder" ]; then mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && exec > >(tee "$folder/${log:-log}") 2>&1; fi
export PYTHONUNBUFFERED=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
run=$work/run.jsonl
: >"$run"
failed=()

# within SECONDS COMMAND...: 124 and an end to all its processes, if it takes longer
within() {
  "$interpreter" -c '
import os, signal, subprocess, sys
child = subprocess.Popen(sys.argv[2:], start_new_session=True)
try:
    status = child.wait(float(sys.argv[1]))
    sys.exit(status if status >= 0 else 128 - status)
except (subprocess.TimeoutExpired, KeyboardInterrupt):
    os.killpg(child.pid, signal.SIGKILL)
    sys.exit(124)
' "$@"
}

# part NAME SECONDS COMMAND...: run a command within its time, and within what is left of all the time
part() {
  local name=$1 limit=$(($2 * ${slower:-1})) left=$((minutes * 60 - SECONDS)) begin=$SECONDS status
  shift 2
  if [ -n "${list:-}" ]; then
    echo "$limit $name"
    return
  fi
  if [ "$left" -lt 10 ]; then
    echo "== $name: no time left"
    failed+=("$name: no time left")
    return
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  echo
  echo "== $name (at $begin s, at most $limit s)"
  within "$limit" "$@"
  status=$?
  if [ "$status" -eq 0 ]; then
    echo "== $name: $((SECONDS - begin)) s"
    return
  fi
  failed+=("$name")
  [ "$status" -eq 124 ] && echo "== $name: cut off after $((SECONDS - begin)) s" || echo "== $name: exit status $status"
}

# $tests, for bash -c with an interpreter and words for pytest: another process continues where one breaks the device, until no test is left (5)
tests='
  worst=0
  for attempt in 1 2 3 4 5 6 7 8; do
    "$0" -m pytest --maxfail=30 -p no:cacheprovider "$@"
    status=$?
    [ "$status" -eq 5 ] && break
    [ "$status" -gt "$worst" ] && worst=$status
    [ "$status" -eq 4 ] && break
    [ "$status" -eq 0 ] || echo "the last test of this process: $(tail -n 1 "$TESTS_DONE")"
  done
  exit "$worst"'

# the_end FILE: what the run has collected under that name in the folder, and how many parts failed
the_end() {
  [ -z "$folder" ] || cp "$run" "$folder/$1"
  echo
  echo "$SECONDS s; ${#failed[@]} parts failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
  exit "${#failed[@]}"
}
