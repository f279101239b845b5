// The machine's roofs, measured by loops that do nothing else: bytes read, and multiply-adds in registers, by all threads at once.
//
// Compiled for the machine itself (-march=native). Every function starts when all threads have come (`gate` counts them), and writes when
// it started and when it ended: a thread that was kept waiting in between must not look fast, so only all threads' times together count.
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef uint64_t words __attribute__((vector_size(BYTES), aligned(BYTES)));
typedef float floats __attribute__((vector_size(BYTES), aligned(BYTES)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct span {
  double start, end; // seconds on the clock that all threads share
};

static double begin(int *gate, int threads) {
  __atomic_add_fetch(gate, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) < threads) {
  }
  return now();
}

// Reads `bytes` (a multiple of 1024) `passes` times as four streams: hardware prefetchers stop at the end of a page, more streams hide that.
void read_bytes(const char *from, size_t bytes, int passes, int *gate, int threads, struct span *span, uint64_t *sink) {
  span->start = begin(gate, threads);
  words a = {0}, b = a, c = a, d = a;
  size_t part = bytes / 4;
  for (int pass = 0; pass < passes; pass++)
    for (size_t i = 0; i < part; i += BYTES) {
      for (int s = 0; s < 4; s++) __builtin_prefetch(from + s * part + i + 1024, 0, 3);
      a |= *(const words *)(from + i);
      b |= *(const words *)(from + part + i);
      c |= *(const words *)(from + 2 * part + i);
      d |= *(const words *)(from + 3 * part + i);
    }
  a |= b | c | d;
  *sink = a[0] | a[1];
  span->end = now();
}

#define CHAINS 16 // enough to hide the latency of a multiply-add on two ports

// `rounds` times 16 vectors of float32 multiply-adds; 2 operations a lane.
void f32_flops(long rounds, int *gate, int threads, struct span *span, float *sink, double *done) {
  span->start = begin(gate, threads);
  floats acc[CHAINS], x, y;
  for (int i = 0; i < CHAINS; i++) acc[i] = (floats){0} + (float)i;
  x = (floats){0} + 1e-3f;
  y = (floats){0} + 1e-3f;
  __asm__ volatile("" : "+m"(x), "+m"(y));
  floats xr = x, yr = y;
  for (long r = 0; r < rounds; r++)
#pragma clang loop unroll(full)
    for (int i = 0; i < CHAINS; i++) acc[i] = acc[i] * xr + yr;
  span->end = now();
  for (int i = 1; i < CHAINS; i++) acc[0] += acc[i];
  *sink = acc[0][0];
  *done = 2.0 * rounds * CHAINS * (BYTES / 4);
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
// Four tiles of ordinary numbers: zeros need less power, and were multiplied a fifth faster and more.
static void load_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1};
  _Alignas(64) uint16_t numbers[512];
  uint32_t state = 1;
  for (int i = 0; i < 512; i++) state = state * 1664525 + 1013904223, numbers[i] = (uint16_t)(0x3c00 + (state >> 16 & 0x83ff));
  for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.bytes[i] = 64;
  _tile_loadconfig(&shapes);
  _tile_loadd(4, numbers, 64);
  _tile_loadd(5, numbers, 64);
  _tile_loadd(6, numbers, 64);
  _tile_loadd(7, numbers, 64);
}
#else
#define HAS_TILES 0
#endif

// The same by tiles, where the system has granted them; `done` is 0 where the processor has none. A product is 16 x 16 sums over `columns`.
#if HAS_TILES
#define TILE_LOOP(name, product, columns)                                                              \
  void name(long rounds, int *gate, int threads, struct span *span, float *sink, double *done) {       \
    load_tiles();                                                                                      \
    span->start = begin(gate, threads);                                                                \
    for (long r = 0; r < rounds / 16; r++) {                                                           \
      product(0, 4, 6);                                                                                \
      product(1, 4, 7);                                                                                \
      product(2, 5, 6);                                                                                \
      product(3, 5, 7);                                                                                \
    }                                                                                                  \
    span->end = now();                                                                                 \
    _tile_release();                                                                                   \
    *sink = 0, *done = 2.0 * (rounds / 16) * 4 * 16 * 16 * columns;                                    \
  }
#else
#define TILE_LOOP(name, product, columns)                                                              \
  void name(long rounds, int *gate, int threads, struct span *span, float *sink, double *done) {       \
    (void)rounds, (void)gate, (void)threads, (void)span;                                               \
    *sink = 0, *done = 0;                                                                              \
  }
#endif
TILE_LOOP(bf16_tile_flops, _tile_dpbf16ps, 32)
TILE_LOOP(int8_tile_ops, _tile_dpbsud, 64)

// The same with the processor's own dot product of bfloat16 pairs (4 operations a float32 lane); `done` is 0 where it has none.
void bf16_flops(long rounds, int *gate, int threads, struct span *span, float *sink, double *done) {
#if defined(__AVX512BF16__)
  span->start = begin(gate, threads);
  __m512 acc[CHAINS];
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3a80), y = x;
  for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_setzero_ps();
  for (long r = 0; r < rounds; r++)
#pragma clang loop unroll(full)
    for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
  span->end = now();
  for (int i = 1; i < CHAINS; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  *sink = acc[0][0];
  *done = 4.0 * rounds * CHAINS * 16;
#else
  (void)rounds, (void)gate, (void)threads, (void)span, (void)sink;
  *done = 0;
#endif
}

// The same with dot products of four bytes (8 operations an int32 lane); `done` is 0 where there are none.
void int8_ops(long rounds, int *gate, int threads, struct span *span, float *sink, double *done) {
#if defined(__AVX512VNNI__)
  span->start = begin(gate, threads);
  __m512i acc[CHAINS], x = _mm512_set1_epi8(1), y = x;
  for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_setzero_si512();
  for (long r = 0; r < rounds; r++)
#pragma clang loop unroll(full)
    for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_dpbusd_epi32(acc[i], x, y);
  span->end = now();
  for (int i = 1; i < CHAINS; i++) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
  *sink = (float)_mm512_reduce_add_epi32(acc[0]);
  *done = 8.0 * rounds * CHAINS * 16;
#else
  (void)rounds, (void)gate, (void)threads, (void)span, (void)sink;
  *done = 0;
#endif
}
