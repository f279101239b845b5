#!/usr/bin/env bash
# benchmarks/gpu.sh --dry as on a GPU machine's image: Python 3.12 or later with numpy 2.5, NVRTC of CUDA 13 as torch's wheels bring it, and no
# C compiler. Makes an environment of its own below .venv, which it uses again until pyproject.toml changes.
#
# DRY_PYTHON names the interpreter. Without one: a Python of 3.12 or later on the PATH or of pyenv, else python3, and then numpy is what that
# one gets. Kernels stay compiled in that environment, unless TINYVLLM_CACHE names another folder.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ]; then
  echo "gpu_dry: skipped: NVRTC's wheels are for Linux, this is $(uname -s)"
  exit 0
fi

is_at_least() { "$2" -c "import sys; sys.exit(sys.version_info < (3, $1))" 2>/dev/null; }

python=${DRY_PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 python3; do
    if is_at_least 12 "$candidate"; then python=$candidate && break; fi
  done
fi
python=${python:-python3}
numpy='numpy>=2.5'
if ! is_at_least 12 "$python"; then
  echo "gpu_dry: no Python of 3.12 or later here, so numpy 2.5 is not tried: this is $("$python" -V); DRY_PYTHON names another one"
  numpy=numpy
fi

folder=.venv/gpu-dry
if [ ! -f "$folder/made" ] || [ pyproject.toml -nt "$folder/made" ]; then
  "$python" -m venv --clear "$folder"
  "$folder/bin/python" - "$numpy" <<'EOF'
import subprocess, sys, tomllib

wanted = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
wanted += [sys.argv[1], "pytest>=8", "hypothesis", "gguf>=0.10", *(f"nvidia-cuda-{part}==13.0.*" for part in ("nvrtc", "runtime", "cccl"))]
sys.exit(subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]).returncode)
EOF
  touch "$folder/made"
fi
export TINYVLLM_CACHE=${TINYVLLM_CACHE:-$PWD/$folder/cache}
INTERPRETER=$PWD/$folder/bin/python exec benchmarks/gpu.sh --dry "$@"
