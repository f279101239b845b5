#!/bin/bash
# Builds the image of the Containerfile and tries it where neither a registry nor a container runtime can be used. As root, in the root of
# the repository:
#   bash tests/image.sh [FOLDER]
# The base is Debian 13 with its Python 3.13 (debootstrap), as python:3.13-slim is. buildah builds. Then the image's files run as its user,
# read-only but for /cache and /tmp, without rights, in mount, process, IPC and host name namespaces of their own: a request must be
# answered, and SIGTERM end it with 0. Needs debootstrap, buildah, podman, catatonit and curl, 4 GB and ten minutes.
# Ends with 75 where the packages of the base cannot be fetched. `make test-image` runs it.
set -euo pipefail
folder=$(realpath "${1:-$(mktemp -d)}")
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
store=(--root "$folder/store" --storage-driver vfs)
export BUILDAH_ISOLATION=chroot

if [ ! -L "$folder/base/usr/local/bin/python" ]; then
  debootstrap --variant=minbase --include=ca-certificates,python3.13,python3.13-venv trixie "$folder/base" || exit 75
  ln -s /usr/bin/python3.13 "$folder/base/usr/local/bin/python"
fi
tar -C "$folder/base" -c . | podman "${store[@]}" import - python:3.13-slim
# the host's certificates and pip settings, where packages come from a mirror
shared=(-v /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro)
[ ! -e /etc/pip.conf ] || shared+=(-v /etc/pip.conf:/etc/pip.conf:ro)
buildah "${store[@]}" bud --layers --network host --pull-never --format docker "${shared[@]}" -f docs/deploy/Containerfile -t tinyvllm .

container=$(buildah "${store[@]}" from --pull-never localhost/tinyvllm)
root=$(buildah "${store[@]}" mount "$container")
setting() { buildah "${store[@]}" inspect --type image --format "$1" localhost/tinyvllm; }
user=$(setting '{{.OCIv1.Config.User}}')
mapfile -t environment < <(setting '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' | grep .)
mapfile -t command < <(setting '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' | grep .)
cache=$folder/cache && rm -rf "$cache" && install --directory --owner="${user%:*}" --group="${user#*:}" "$cache" && touch "$root/catatonit"
started='set -e; mount --make-rprivate /; mount --bind "$ROOT" "$ROOT"; mount -t proc proc "$ROOT/proc"; mount --bind /dev "$ROOT/dev";
  mount -t tmpfs tmpfs "$ROOT/tmp"; mount --bind "$CACHE" "$ROOT/cache"; mount --bind "$(command -v catatonit)" "$ROOT/catatonit";
  mount -o remount,ro,bind "$ROOT"; exec chroot "$ROOT" setpriv --reuid "${USER_IDS%:*}" --regid "${USER_IDS#*:}" --clear-groups
  --no-new-privs --bounding-set=-all --inh-caps=-all env -i -C /cache "$@"'
ROOT=$root CACHE=$cache USER_IDS=$user unshare --mount --pid --ipc --uts --fork bash -c "${started//$'\n'/ }" run "${environment[@]}" \
  TINYVLLM_ARG_HOST=127.0.0.1 TINYVLLM_ARG_PORT=$port /catatonit -- "${command[@]}" &
outside=$!
for _ in $(seq 300); do curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && break; kill -0 $outside; sleep 1; done
curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header "content-type: application/json" \
  --data '{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}' && echo
kill -TERM "$(pgrep --parent $outside)"
wait $outside && echo "ended with 0"
