// rows = numbers rounded to blocks of FORMAT, with llama.cpp's searches for the scales (tinyvllm/quant/quantizers.py defines it, bit by bit)
//
//   rows        [N, FILE_ROW_BYTES] uint8   packed rows, as a file has them
//   fault       [1] int32                   set to 1 if a number is not finite or beyond float16's range; else unchanged
//   source      [N, I] SOURCE               float32, float16 or bfloat16 numbers at any address
//   importance  [I] float32                 WEIGHTED: of each column, the mean square of what it is multiplied with; else not read
//   count       [1] int32                   N
//
// I % BLOCK == 0. Unit of work: one row. Sixteen groups of GROUP numbers, each with a scale of its own, are searched at a time, one a lane; a
// block has PARTS groups. Sums are float32, from the first number of a group to its last.
#define WEIGHT FORMAT
#include "format.h"
#include "block_bits.h"
#include "scale_search.h"
#include "thread_team.h"

#define GROUP (FORMAT == Q2_K || FORMAT == Q3_K || FORMAT == Q6_K ? 16 : 32)
#define PARTS (BLOCK / GROUP)
#define BLOCKS (LANES / PARTS)  // of sixteen groups
#define NUMBER_BYTES (SOURCE == F32 ? 4 : 2)

struct groups {  // sixteen of them, column by column
  floats x[GROUP], w[GROUP];
  floats mean_square;  // WEIGHTED: of the row, or of the block
};

struct packed {  // what the blocks of sixteen groups are written from
  uint8_t quants[LANES * GROUP], scales[LANES], minimums[LANES];
  uint16_t scale[LANES], offset[LANES];  // float16, by block
};

static inline float row_mean_square(const uint8_t *row);
static inline ints load_groups(struct groups *g, const uint8_t *row, const float *importance, long first, int present);
static inline void round_groups(struct packed *p, struct groups *g);
static inline void write_block(uint8_t *to, const struct packed *p, int block);

static void quantize(uint8_t *rows, int32_t *fault, const uint8_t *source, const float *importance, const int32_t *count,
                     const struct thread_team *team) {
  for (int n = next_unit(team); n < count[0]; n = next_unit(team)) {
    const uint8_t *row = source + (long)n * I * NUMBER_BYTES;
    uint8_t *to = rows + n * FILE_ROW_BYTES(I);
    struct groups g;
    struct packed p;
    ints bad = {0};
    const float mean_square = WEIGHTED && PARTS == 1 ? row_mean_square(row) : 0;
    for (long first = 0; first < I / GROUP; first += LANES) {
      const int present = I / GROUP - first < LANES ? (int)(I / GROUP - first) : LANES;
      bad |= load_groups(&g, row, importance, first, present);
      g.mean_square = splat(mean_square);
      round_groups(&p, &g);
      for (int b = 0; b < present / PARTS; b++, to += FILE_BLOCK_BYTES) write_block(to, &p, b);
    }
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= bad[i];
    if (any) __atomic_store_n(fault, 1, __ATOMIC_RELAXED);
  }
}

// --- numbers of a row

static inline v16 load_numbers(const uint8_t *from) {  // sixteen, at any address
  _Alignas(64) uint8_t same[64];
  for (int i = 0; i < 4 * NUMBER_BYTES; i++) ((uint32_t *)same)[i] = ((const struct any_word *)(from + 4 * i))->word;
#if SOURCE == F32
  return v16_load((const float *)same);
#elif SOURCE == F16
  return v16_load_f16((const uint16_t *)same);
#else
  return v16_load_bf16((const uint16_t *)same);
#endif
}

static inline float row_mean_square(const uint8_t *row) {
  _Alignas(64) float numbers[LANES];
  float sum = 0;
  for (long i = 0; i < I; i += LANES) {
    v16_store(numbers, load_numbers(row + i * NUMBER_BYTES));
    for (int k = 0; k < LANES; k++) sum += numbers[k] * numbers[k];
  }
  return sum / (float)I;
}

// columns[j][lane] = numbers[lane][j]; `present` lanes, zeros in the others.
static inline void transpose(floats *columns, const float *numbers, int present) {
  for (int j = 0; j < GROUP; j += LANES) {
    w16 block[LANES];
    for (int lane = 0; lane < LANES; lane++)
      block[lane] = lane < present ? w16_load(numbers + lane * GROUP + j) : w16_load(&(const floats){0});
    w16_transpose(block);
    for (int k = 0; k < LANES; k++) v16_store((float *)(columns + j + k), v16_from_w16(block[k]));
  }
}

// Returns a mask of the lanes with numbers that cannot be quantized.
static inline ints load_groups(struct groups *g, const uint8_t *row, const float *importance, long first, int present) {
  _Alignas(64) float numbers[LANES * GROUP];
  ints bad = {0};
  for (int i = 0; i < present * GROUP; i += LANES) {
    v16_store(numbers + i, load_numbers(row + (first * GROUP + i) * NUMBER_BYTES));
    bad |= ~(magnitude(*(const floats *)(numbers + i)) <= 65504.0f);
  }
  transpose(g->x, numbers, present);
  if (WEIGHTED) transpose(g->w, importance + first * GROUP, present);
  return bad;
}

// --- from lanes of groups to lanes of blocks, and back

static inline void by_block(floats *columns, floats groups) {  // columns[part][block]
  for (int part = 0; part < PARTS; part++) {
    columns[part] = (floats){0};
    for (int b = 0; b < BLOCKS; b++) columns[part][b] = groups[b * PARTS + part];
  }
}

static inline floats by_group(const floats *columns) {
  floats groups;
  for (int part = 0; part < PARTS; part++)
    for (int b = 0; b < BLOCKS; b++) groups[b * PARTS + part] = columns[part][b];
  return groups;
}

static inline void store_bytes(uint8_t *to, floats numbers) {
  const ints whole = __builtin_convertvector(numbers, ints);
  for (int i = 0; i < LANES; i++) to[i] = (uint8_t)whole[i];
}

static inline void store_quants(struct packed *p, const floats *quants) {
  for (int j = 0; j < GROUP; j++) {
    const ints whole = __builtin_convertvector(quants[j], ints);
    for (int lane = 0; lane < LANES; lane++) p->quants[lane * GROUP + j] = (uint8_t)whole[lane];
  }
}

// The quants by the scale as stored, `zero` added; those of the search where the scale is 0.
static inline void requantize(const floats *x, floats scale, floats minimum, floats *quants, float low, float high, float zero) {
  for (int j = 0; j < GROUP; j++) {
    const floats again = rounded(divided(x[j] + minimum, scale), low, high) + zero;
    quants[j] = pick(scale == 0.0f, quants[j], again);
  }
}

// importance * sqrt(mean square + x^2), where a factor multiplies the mean square of the block; with PARTS of 1, that of the row.
static inline void weigh(struct groups *g, float factor) {
  if (PARTS > 1) {
    floats sums[GROUP], columns[PARTS], total = {0};
    for (int j = 0; j < GROUP; j++) sums[j] = g->x[j] * g->x[j];
    for (int part = 0; part < PARTS; part++)  // in the order of the block's numbers, across its groups
      for (int j = 0; j < GROUP; j++)
        for (int b = 0; b < BLOCKS; b++) total[b] += sums[j][b * PARTS + part];
    for (int part = 0; part < PARTS; part++) columns[part] = factor * total / 256.0f;
    g->mean_square = by_group(columns);
  }
  for (int j = 0; j < GROUP; j++) g->w[j] = g->w[j] * square_root(g->mean_square + g->x[j] * g->x[j]);
}

static inline floats weight_sums(const struct groups *g) {
  floats sum = {0};
  for (int j = 0; j < GROUP; j++) sum += g->w[j];
  return sum;
}

// --- formats of 32 with one scale

#if FORMAT == Q8_0
static inline void round_groups(struct packed *p, struct groups *g) {  // half away from zero
  const floats scale = magnitude(largest(g->x, GROUP)) / 127.0f, inverse = divided(splat(1), scale);
  for (int j = 0; j < GROUP; j++) {
    const floats scaled = g->x[j] * inverse, size = magnitude(scaled);
    floats whole = __builtin_convertvector(__builtin_convertvector(size, ints), floats);
    whole += pick(size - whole >= 0.5f, splat(1), splat(0));
    g->x[j] = pick(scaled < 0.0f, -whole, whole);
  }
  store_quants(p, g->x);
  halves_of(scale, p->scale);
}
#elif FORMAT == Q4_0 || FORMAT == Q5_0
#define LEVELS (FORMAT == Q4_0 ? 8 : 16)
static inline void round_groups(struct packed *p, struct groups *g) {
  floats quants[GROUP], scale;
  if (WEIGHTED) {
    weigh(g, 1);
    scale = signed_scale(g->x, g->w, GROUP, LEVELS, quants);
  } else {
    scale = largest(g->x, GROUP) / -(float)LEVELS;
    const floats inverse = divided(splat(1), scale);
    for (int j = 0; j < GROUP; j++) quants[j] = smaller(g->x[j] * inverse + (LEVELS + 0.5f), splat(2 * LEVELS - 1));
  }
  store_quants(p, quants);
  halves_of(scale, p->scale);
}
#elif FORMAT == Q4_1 || FORMAT == Q5_1
#define TOP (FORMAT == Q4_1 ? 15 : 31)
static inline void round_groups(struct packed *p, struct groups *g) {
  floats quants[GROUP], scale, offset;
  if (WEIGHTED) {
    weigh(g, 1);
    scale = scale_and_minimum(g->x, g->w, GROUP, TOP, -0.9f, 0.05f, 36, 0, &offset, quants);
    offset = -offset;
  } else {
    floats high = offset = g->x[0];
    for (int j = 1; j < GROUP; j++) offset = smaller(offset, g->x[j]), high = larger(high, g->x[j]);
    scale = (high - offset) / (float)TOP;
    const floats inverse = divided(splat(1), scale);
    for (int j = 0; j < GROUP; j++) quants[j] = smaller((g->x[j] - offset) * inverse + 0.5f, splat(TOP));
  }
  store_quants(p, quants);
  halves_of(scale, p->scale);
  halves_of(offset, p->offset);
}
#elif FORMAT == MXFP4
static inline void round_groups(struct packed *p, struct groups *g) {  // halfway, the smaller magnitude
  const floats peak = magnitude(largest(g->x, GROUP));
  ints exponent = ((ints)peak >> 23) - 2;
  exponent &= exponent > 0;
  const floats power = (floats)((254 - exponent) << 23);  // half of what makes the values whole, which may be 2^128
  for (int j = 0; j < GROUP; j++) {
    const floats scaled = g->x[j] * power * 2.0f, size = magnitude(scaled);
    const float middles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
    ints index = {0};
    for (int i = 0; i < 7; i++) index -= size > middles[i];
    index |= (scaled < 0.0f) & (index > 0) & 8;
    g->x[j] = __builtin_convertvector(index, floats);
  }
  store_quants(p, g->x);
  store_bytes(p->scales, __builtin_convertvector(exponent, floats));
}
#elif FORMAT == IQ4_NL
static const float NUMBERS[16] = IQ4_NUMBERS;
static inline void round_groups(struct packed *p, struct groups *g) {
  floats sum = {0};
  for (int j = 0; j < GROUP; j++) sum += g->x[j] * g->x[j];
  g->mean_square = sum * (2.0f / GROUP);
  if (WEIGHTED) weigh(g, 1);
  else
    for (int j = 0; j < GROUP; j++) g->w[j] = g->x[j] * g->x[j];
  const floats scale = table_scale(g->x, g->w, GROUP, NUMBERS), inverse = divided(splat(1), scale);
  for (int j = 0; j < GROUP; j++) g->x[j] = nearest_index(inverse * g->x[j], NUMBERS);
  store_quants(p, g->x);
  halves_of(scale, p->scale);
}

// --- blocks of 256: the scales of parts are integers times one float16
#elif FORMAT == IQ4_XS
static const float NUMBERS[16] = IQ4_NUMBERS;
static inline void round_groups(struct packed *p, struct groups *g) {
  if (WEIGHTED) weigh(g, 2);
  else
    for (int j = 0; j < GROUP; j++) g->w[j] = g->x[j] * g->x[j];
  floats scales[PARTS], products[PARTS], stored[PARTS];
  by_block(scales, table_scale(g->x, g->w, GROUP, NUMBERS));
  const floats d = -largest(scales, PARTS) / 32.0f, inverse = divided(splat(1), d);
  for (int part = 0; part < PARTS; part++) {
    const floats whole = rounded(inverse * scales[part], -32, 31);
    products[part] = d * whole, stored[part] = whole + 32.0f;
  }
  const floats inverses = divided(splat(1), by_group(products));
  for (int j = 0; j < GROUP; j++) g->x[j] = nearest_index(inverses * g->x[j], NUMBERS);
  store_quants(p, g->x);
  store_bytes(p->scales, by_group(stored));
  halves_of(d, p->scale);
}
#elif FORMAT == Q2_K || FORMAT == Q4_K || FORMAT == Q5_K
#define TOP (FORMAT == Q2_K ? 3 : FORMAT == Q4_K ? 15 : 31)
#define SCALES_TOP (FORMAT == Q2_K ? 15 : 63)
// The float16 of a block, the parts' integers, and the parts' scales as stored.
static inline floats round_scales(floats groups, const floats *sums, uint16_t *halves, uint8_t *bytes) {
  floats columns[PARTS], whole[PARTS], best;
  by_block(columns, groups);
  if (WEIGHTED) best = positive_scale(columns, sums, PARTS, SCALES_TOP, whole);
  else {
    floats peak = {0};
    for (int part = 0; part < PARTS; part++) peak = larger(columns[part], peak);  // of two zeros the positive one
    const floats inverse = divided(splat(SCALES_TOP), peak);
    for (int part = 0; part < PARTS; part++) whole[part] = rounded(inverse * columns[part], 0, SCALES_TOP);
    best = peak / (float)SCALES_TOP;
  }
  store_bytes(bytes, by_group(whole));
  const floats stored = halves_of(best, halves);
  for (int part = 0; part < PARTS; part++) whole[part] = stored * whole[part];
  return by_group(whole);
}

static inline floats search(struct groups *g, floats *minimum, floats *quants) {
  if (WEIGHTED) {
    weigh(g, FORMAT == Q2_K ? 1 : 2);
    return scale_and_minimum(g->x, g->w, GROUP, TOP, -0.9f, 0.05f, 36, 0, minimum, quants);
  }
  floats mean = {0};
  if (FORMAT != Q2_K) {
    for (int j = 0; j < GROUP; j++) mean += g->x[j] * g->x[j];
    mean = square_root(mean / (float)GROUP);
  }
  for (int j = 0; j < GROUP; j++) g->w[j] = mean + magnitude(g->x[j]);
  if (FORMAT == Q4_K) return scale_and_minimum(g->x, g->w, GROUP, TOP, -1.0f, 0.1f, 20, 0, minimum, quants);
  return scale_and_minimum(g->x, g->w, GROUP, TOP, -0.5f, 0.1f, 15, FORMAT == Q2_K, minimum, quants);
}

static inline void round_groups(struct packed *p, struct groups *g) {
  floats quants[GROUP], minimum, sums[PARTS];
  const floats scale = search(g, &minimum, quants);
  by_block(sums, weight_sums(g));
  const floats scales = round_scales(scale, sums, p->scale, p->scales);
  const floats minimums = round_scales(minimum, sums, p->offset, p->minimums);
  requantize(g->x, scales, minimums, quants, 0, TOP, 0);
  store_quants(p, quants);
}
#elif FORMAT == Q3_K || FORMAT == Q6_K
#define LEVELS (FORMAT == Q3_K ? 4 : 32)
// The float16 of a block such that its scale of largest magnitude becomes -levels; the parts' integers.
static inline floats peak_scale(const floats *scales, const int levels, floats *whole) {
  const floats inverse = divided(splat(-levels), largest(scales, PARTS));
  for (int part = 0; part < PARTS; part++) whole[part] = rounded(inverse * scales[part], -levels, levels - 1);
  return divided(splat(1), inverse);
}

static inline void round_groups(struct packed *p, struct groups *g) {
  floats quants[GROUP], scales[PARTS], whole[PARTS], sums[PARTS], best;
  if (FORMAT == Q3_K && WEIGHTED) weigh(g, 2);
  if (FORMAT == Q6_K && !WEIGHTED)
    for (int j = 0; j < GROUP; j++) g->w[j] = g->x[j] * g->x[j];
  const int refined = FORMAT == Q3_K && !WEIGHTED;
  by_block(scales, refined ? refined_scale(g->x, GROUP, LEVELS, quants) : signed_scale(g->x, g->w, GROUP, LEVELS, quants));
  if (FORMAT == Q3_K && WEIGHTED) {
    by_block(sums, weight_sums(g));
    best = signed_scale(scales, sums, PARTS, 32, whole);
    for (int part = 0; part < PARTS; part++) whole[part] -= 32.0f;
  } else {
    ints empty = {0};
    if (FORMAT == Q6_K) empty = magnitude(largest(scales, PARTS)) < TINY;
    for (int part = 0; part < PARTS; part++) scales[part] = pick(empty, splat(0), scales[part]);
    best = peak_scale(scales, FORMAT == Q3_K ? 32 : 128, whole);
    for (int part = 0; part < PARTS; part++) sums[part] = (floats)empty;
    for (int j = 0; FORMAT == Q6_K && j < GROUP; j++) quants[j] = pick((ints)by_group(sums), splat(0), quants[j]);
  }
  const floats stored = halves_of(best, p->scale);
  for (int part = 0; part < PARTS; part++) scales[part] = stored * whole[part];
  requantize(g->x, by_group(scales), splat(0), quants, -LEVELS, LEVELS - 1, LEVELS);
  store_quants(p, quants);
  // stored in Q3_K with 32 added; 0 where the search found no scale at all
  for (int part = 0; part < PARTS; part++)
    if (FORMAT == Q3_K) whole[part] += pick((best != 0.0f) | -WEIGHTED, splat(32), splat(0));
  store_bytes(p->scales, by_group(whole));
}
#endif

// --- a block of a file

static inline void write_block(uint8_t *to, const struct packed *p, int block) {
  const uint8_t *quants = p->quants + block * BLOCK, *scales = p->scales + block * PARTS, *minimums = p->minimums + block * PARTS;
  const uint16_t scale = p->scale[block], offset = p->offset[block];
#if FORMAT == Q8_0
  to = put_half(to, scale);
  for (int i = 0; i < BLOCK; i++) to[i] = quants[i];
#elif FORMAT == Q4_0 || FORMAT == IQ4_NL
  put_planes(put_half(to, scale), quants, 1, 16, 4, 0, 15);
#elif FORMAT == Q5_0
  put_planes(put_fifth_bits(put_half(to, scale), quants), quants, 1, 16, 4, 0, 15);
#elif FORMAT == Q4_1
  put_planes(put_half(put_half(to, scale), offset), quants, 1, 16, 4, 0, 15);
#elif FORMAT == Q5_1
  put_planes(put_fifth_bits(put_half(put_half(to, scale), offset), quants), quants, 1, 16, 4, 0, 15);
#elif FORMAT == MXFP4
  *to++ = scales[0];
  put_planes(to, quants, 1, 16, 4, 0, 15);
#elif FORMAT == IQ4_XS
  to = put_planes(put_half(to, scale), scales, 2, 1, 2, 4, 3);
  put_planes(put_planes(to, scales, 4, 1, 4, 0, 15), quants, 8, 16, 4, 0, 15);
#elif FORMAT == Q2_K
  for (int i = 0; i < PARTS; i++) *to++ = (uint8_t)(scales[i] | minimums[i] << 4);
  put_half(put_half(put_planes(to, quants, 2, 32, 2, 0, 3), scale), offset);
#elif FORMAT == Q4_K
  put_planes(put_six_bit_pairs(put_half(put_half(to, scale), offset), scales, minimums), quants, 4, 32, 4, 0, 15);
#elif FORMAT == Q5_K
  to = put_six_bit_pairs(put_half(put_half(to, scale), offset), scales, minimums);
  put_planes(put_planes(to, quants, 1, 32, 1, 4, 1), quants, 4, 32, 4, 0, 15);
#elif FORMAT == Q3_K
  to = put_planes(put_planes(to, quants, 1, 32, 1, 2, 1), quants, 2, 32, 2, 0, 3);
  put_half(put_planes(put_planes(to, scales, 1, 8, 4, 0, 15), scales, 1, 4, 2, 4, 3), scale);
#elif FORMAT == Q6_K
  to = put_planes(put_planes(to, quants, 2, 64, 4, 0, 15), quants, 2, 32, 2, 4, 3);
  for (int i = 0; i < PARTS; i++) *to++ = scales[i];
  put_half(to, scale);
#endif
  (void)scales, (void)minimums, (void)scale, (void)offset;
}
