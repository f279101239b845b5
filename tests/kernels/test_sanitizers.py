"""The CPU kernels under the address, undefined behaviour and thread sanitizers, which must also find what is planted for them.

Each kernel is built with the system's gcc into a small program that reads its arguments from a file, each into memory of exactly that size,
and runs it on three threads.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.calling import call
from tests.kernels.samples import SAMPLES, Call
from tinyvllm.backends.cpu.toolchain import cpu_features, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_source, kernel_text

NAMES = [
    "matmul BF16",
    "matmul Q4_0",
    "matmul FP8_G128",
    "matmul NF4",
    "matmul INT6_G32",
    "norm_gate_up_silu Q4_0",
    "norm_route",
    "experts_gate_up_silu Q4_0",
    "experts_down BF16",
    "norm_qkv_rope_store BF16",
    "norm_head BF16",
    "attention_decode BF16",
    "attention_decode F32",
    "attention_decode BF16 shared",
    "attention_prefill BF16",
    "embed Q4_0",
    "embed BF16 from rows",
    "kv_append BF16",
    "kv_copy",
    "advance",
    "sample",
    "sample greedy",
    "quantize Q5_K",
    "quantize Q3_K",
    "pack Q8_0",
    "matmul with a norm of its outputs",
]
# again for the widest variant of this machine, where a kernel has code of its own for it
WIDEST = next((variant for variant, feature in (("avx512", "avx512f"), ("avx2", "avx2")) if feature in cpu_features()), "plain")
CASES = [(name, "plain") for name in NAMES]
CASES += [(name, WIDEST) for name in NAMES if WIDEST != "plain" and name.startswith(("matmul", "attention", "norm_qkv"))]
if "avx2" in cpu_features():  # many rows of integers take a way of their own
    CASES.append(("matmul INT6_G32", "avx2"))
UNFUSED = "-ffp-contract=off"  # as kernels are compiled: two compilers would choose differently
SANITIZERS = {
    "address": ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
MAIN = """
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int64_t arguments[{count}], sizes[{count}];
static struct thread_pool pools[3];

static void *run(void *number) {{
  long thread = (long)number;
  // planted: every thread counts for itself and does everything
  struct thread_team team = {{(int)thread, 3, &pools[PLANT_RACE ? thread : 0]}};
  if (PLANT_RACE) team.threads = 1;
  entry({actual}, &team);
  return 0;
}}

int main(int n, char **paths) {{
  FILE *in = fopen(paths[1], "rb"), *out = fopen(paths[2], "wb");
  for (int i = 0; i < {count}; i++) {{
    void *at;
    if (fread(&sizes[i], 8, 1, in) != 1) return 2;
    long size = sizes[i] - (i == PLANT_SHORT);  // planted: one byte less than the kernel expects
    if (posix_memalign(&at, 64, size)) return 2;
    if (fread(at, 1, size, in) != size) return 2;
    if (i == PLANT_SHORT) fgetc(in);
    arguments[i] = (int64_t)at;
  }}
  pthread_t workers[3];
  for (long i = 1; i < 3; i++) pthread_create(&workers[i], 0, run, (void *)i);
  run(0);
  for (int i = 1; i < 3; i++) pthread_join(workers[i], 0);
  for (int i = 0; i < {outs}; i++) fwrite((void *)arguments[i], 1, sizes[i], out);
  for (int i = 0; i < {count}; i++) free((void *)arguments[i]);
  return fclose(out);
}}
"""


POOL = """
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

enum { THREADS = 3, LISTS = 300, UNITS = 7 };
static struct shared shared;
static sem_t bells[THREADS];
static long written[UNITS], sums, total;

// every unit is written by one thread, then read by another, and counted by the thread that is alone
static void write_units(const struct thread_team *team) {
  for (int unit = next_unit(team); unit < UNITS; unit = next_unit(team)) written[unit]++;
}
static void read_units(const struct thread_team *team) {
  for (int unit = team->thread; unit < UNITS; unit += team->threads) __atomic_fetch_add(&sums, written[unit], __ATOMIC_RELAXED);
}
static void add_sums(void) { total += sums; }
static void core(long number) { written[number] += number; }

static void *worker(void *number) {
  long thread = (long)number, seen = 0;
  while ((seen = pool_work(&shared, thread, THREADS, seen, thread * 20000)) >= 0) sem_wait(&bells[thread]);
  return 0;
}

static void post(const int64_t *list, long count, long times) {
  unsigned long wake = pool_post(&shared, THREADS, list, count, times);
  for (int thread = 1; thread < THREADS; thread++)
    if (wake >> thread & 1) sem_post(&bells[thread]);
}

int main(void) {
  const int64_t list[] = {(int64_t)write_units, TEAM, 0, 0, 1, (int64_t)read_units, TEAM, 0, 0, 1, (int64_t)add_sums, ALONE, 0, 0, 1,
                          (int64_t)add_sums, ALONE, 0, 0, 1, (int64_t)core, CORES, 1, 0, 3, 0};
  pthread_t workers[THREADS];
  for (long thread = 1; thread < THREADS; thread++) {
    sem_init(&bells[thread], 0, 0);
    pthread_create(&workers[thread], 0, worker, (void *)thread);
  }
  for (int i = 0; i < LISTS; i++) {
    int64_t *copy = malloc(sizeof list);  // a list may go as soon as it has run
    for (unsigned j = 0; j < sizeof list / 8; j++) copy[j] = list[j];
    post(copy, 5, 1 + i % 2);
    uint64_t marks[6] = {0};
    pool_go(&shared, THREADS, i % 3 ? 0 : marks);
    for (int j = 1; i % 3 == 0 && j < 6; j++) if (marks[j] < marks[j - 1] || !marks[j]) return 4;
    free(copy);
    for (volatile int wait = i % 5 * 20000; wait > 0;) wait--;  // sometimes long enough for the workers to fall asleep
  }
  post(list, 0, -1);
  for (int thread = 1; thread < THREADS; thread++) pthread_join(workers[thread], 0);
  // after n lists a unit holds n, and what the cores added: 0, 1 or 2 each time
  long runs = LISTS + LISTS / 2, expected = 0, sum = 0;
  for (long n = 1; n <= runs; n++) sum += UNITS * n + 3 * (n - 1), expected += 2 * sum;
  return total == expected ? 0 : 3;
}
"""


def built(text: str, path: Path, sanitizer: str, *flags: str) -> Path:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc, whose sanitizers this test runs")
    # -O0: with optimisation gcc takes a minute for what it inlines here, and every access is there to be looked at
    command = [gcc, "-x", "c", "-O0", "-g", "-w", "-pthread", UNFUSED, *flags, *SANITIZERS[sanitizer], "-", "-o", str(path), "-lm"]
    done = subprocess.run(command, input=text.encode(), capture_output=True)
    if b"cannot find" in done.stderr:
        pytest.skip(f"gcc has no library for the sanitizer: {done.stderr.decode().splitlines()[0]}")
    assert done.returncode == 0, done.stderr.decode()
    return path


def program(kernel: Kernel, sanitizer: str, folder: Path, race: int = 0, short: int = -1) -> Path:
    count = kernel.outs + kernel.ins
    actual = ", ".join(f"arguments[{i}]" for i in range(count))
    text = kernel_text(kernel) + MAIN.format(count=count, outs=kernel.outs, actual=actual)
    flags = (*target_flags(kernel.target), f"-DPLANT_RACE={race}", f"-DPLANT_SHORT={short}")
    return built(text, folder / f"{kernel.name}-{sanitizer}", sanitizer, *flags)


def run(path: Path, arrays: list[np.ndarray] | tuple = ()) -> tuple[int, str, bytes]:
    """Exit status, what the sanitizer said, the bytes of what the kernel wrote."""
    given, written = path.with_suffix(".in"), path.with_suffix(".out")
    given.write_bytes(b"".join(np.int64(a.nbytes).tobytes() + a.tobytes() for a in arrays))
    # without a fixed layout of memory the thread sanitizer of older compilers may not find room for its own
    command = [*(["setarch", "-R"] if shutil.which("setarch") else []), str(path), str(given), str(written)]
    done = subprocess.run(command, capture_output=True, timeout=300, text=True, errors="replace")
    return done.returncode, done.stderr, written.read_bytes() if written.exists() else b""


@functools.cache
def sample(name: str, target: str = "plain") -> Call:
    return SAMPLES[name](target)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name, target", CASES)
def test_a_kernel_is_clean(name: str, target: str, sanitizer: str, tmp_path: Path) -> None:
    kernel, arrays = sample(name, target)
    status, said, written = run(program(kernel, sanitizer, tmp_path), arrays)
    assert status == 0, said
    fresh = [a.copy() for a in arrays]
    call(kernel, *fresh)
    assert written[: fresh[0].nbytes] == fresh[0].tobytes(), "it did something else than it does without the sanitizer"


@pytest.mark.parametrize("name", ["kv_copy", "matmul BF16"])
def test_a_planted_overflow_is_found(name: str, tmp_path: Path) -> None:
    kernel, arrays = sample(name)
    status, said, _ = run(program(kernel, "address", tmp_path, short=0), arrays)
    assert status != 0 and "heap-buffer-overflow" in said


@pytest.mark.parametrize("name", ["kv_copy", "matmul BF16"])
def test_a_planted_race_is_found(name: str, tmp_path: Path) -> None:
    kernel, arrays = sample(name)
    status, said, _ = run(program(kernel, "thread", tmp_path, race=1), arrays)
    assert status != 0 and "data race" in said


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_thread_pool_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """Lists one after the other on three threads, whose workers sometimes sleep: every kernel sees all that the one before it wrote."""
    text = kernel_source("cpu", "thread_pool") + POOL
    status, said, _ = run(built(text, tmp_path / "pool", sanitizer))
    assert status == 0, said


def test_a_race_between_kernels_is_found(tmp_path: Path) -> None:
    """Two kernels with no barrier between them: what the threads write in one they read in the other."""
    source = kernel_source("cpu", "thread_pool")
    text = source.replace("    if (kind != ALONE ||", "    if (kind != TEAM ||") + POOL
    assert source + POOL != text
    status, said, _ = run(built(text, tmp_path / "pool", "thread"))
    assert status != 0 and "data race" in said
