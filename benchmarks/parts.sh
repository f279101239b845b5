# What gpu.sh and mac.sh share: parts with a time of their own each, of which one that fails is counted and the others continue.
# To be sourced at the top of the repository, with `minutes` for all parts, `interpreter`, and $1, the folder for what is printed, or nothing.
# `log` and `figures` name the folder's files. `list` prints parts and limits and runs nothing; `slower` is a factor of all limits.
# Bash 3.2, macOS's, reads it; there is no timeout(1) there.

folder=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run=$work/run.jsonl # figures are there as soon as they are measured
if [ -n "$folder" ]; then
  mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 2
  run=$folder/$figures
  mkfifo "$work/out"
  tee "$folder/$log" <"$work/out" &
  tee=$!
  exec >"$work/out" 2>&1
fi
export PYTHONUNBUFFERED=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
: >"$run"
failed=()

# within SECONDS COMMAND...: 124 and an end to all its processes, if it takes longer, or if this one is ended
within() {
  "$interpreter" -c '
import os, signal, subprocess, sys
for name in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.default_int_handler)
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
    failed+=("$name (no time left)")
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
  if [ "$status" -eq 124 ]; then
    echo "== $name: cut off after $((SECONDS - begin)) s"
    failed+=("$name (cut off)")
  else
    echo "== $name: exit status $status after $((SECONDS - begin)) s; the error is above"
    failed+=("$name")
  fi
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

# the_end: how many parts failed, and which
the_end() {
  echo
  echo "$SECONDS s; ${#failed[@]} parts failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
  [ "${#failed[@]}" -eq 0 ] || echo "${advice:-}"
  if [ -n "$folder" ]; then
    exec >&- 2>&-
    wait "$tee" # the log is whole when this script ends
  fi
  exit "${#failed[@]}"
}
