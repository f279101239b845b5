// Searches for the scales of sixteen groups of n numbers, one a lane. tinyvllm/quant/search.py is the definition, with the names used here,
// and gives the same bits. Each returns the scale and sets the quants.
#pragma once
#include "group_lanes.h"

#define TINY 1e-15f  // a group whose numbers are all smaller is a group of zeros
#define MAX_GROUP 32

struct sums {  // of w x q and of w q q
  floats products, squares;
};

// `weighted` is w x.
INLINE void add_fit(struct sums *s, floats weighted, floats w, floats q) {
  s->products += weighted * q;
  s->squares += w * q * q;
}

INLINE struct sums fit(const floats *x, const floats *w, const int n, floats inverse, const float low, const float high) {
  struct sums s = {{0}, {0}};
  for (int j = 0; j < n; j++) add_fit(&s, w[j] * x[j], w[j], rounded(inverse * x[j], low, high));
  return s;
}

// The best scale so far, of a search for the largest products^2 / squares.
struct candidate {
  floats scale, inverse, score;
};

INLINE struct candidate first_candidate(struct sums s, floats inverse) {
  const floats scale = divided(s.products, s.squares);
  return (struct candidate){scale, inverse, scale * s.products};
}

INLINE void consider(struct candidate *best, struct sums s, floats inverse) {
  const ints better = (s.squares > 0.0f) & (s.products * s.products > best->score * s.squares);
  const floats scale = divided(s.products, s.squares);
  best->scale = pick(better, scale, best->scale);
  best->inverse = pick(better, inverse, best->inverse);
  best->score = pick(better, scale * s.products, best->score);
}

INLINE floats signed_scale(const floats *x, const floats *w, const int n, const int levels, floats *quants) {
  const floats peak = largest(x, n);
  const ints empty = magnitude(peak) < TINY;
  const floats first = divided(splat(-levels), peak);
  struct candidate best = first_candidate(fit(x, w, n, first, -levels, levels - 1), first);
  for (int step = -9; step <= 9; step++) {
    if (step == 0) continue;
    const floats inverse = divided(splat(-((float)levels + 0.1f * (float)step)), peak);
    consider(&best, fit(x, w, n, inverse, -levels, levels - 1), inverse);
  }
  for (int j = 0; j < n; j++) quants[j] = pick(empty, splat(0), rounded(best.inverse * x[j], -levels, levels - 1) + (float)levels);
  return pick(empty, splat(0), best.scale);
}

// Moves each quant to where the others' scale puts it, if that lowers the error.
INLINE void descend(const floats *x, const floats *w, const int n, floats *quants, struct sums *s, const float low, const float high) {
  for (int j = 0; j < n; j++) {
    const floats q = quants[j], weighted = w[j] * x[j];
    const floats rest = s->products - weighted * q, rest_squares = s->squares - w[j] * q * q;
    const floats moved = rounded(divided(x[j] * rest_squares, rest), low, high);
    const floats with_moved = rest + weighted * moved, with_squares = rest_squares + w[j] * moved * moved;
    const ints better = (rest > 0.0f) & (moved != q) & (with_squares > 0.0f) &
                        (with_moved * with_moved * s->squares > s->products * s->products * with_squares);
    quants[j] = pick(better, moved, q);
    s->products = pick(better, with_moved, s->products);
    s->squares = pick(better, with_squares, s->squares);
  }
}

INLINE floats scale_of(struct sums s, ints empty) { return pick(empty | ~(s.squares > 0.0f), splat(0), divided(s.products, s.squares)); }

INLINE floats refined_scale(const floats *x, const int n, const int levels, floats *quants) {
  const floats peak = largest(x, n), inverse = divided(splat(-levels), peak);
  const ints empty = magnitude(peak) < TINY;
  floats w[MAX_GROUP];
  struct sums s = {{0}, {0}};
  for (int j = 0; j < n; j++) {
    w[j] = x[j] * x[j];
    quants[j] = rounded(inverse * x[j], -levels, levels - 1);
    add_fit(&s, w[j] * x[j], w[j], quants[j]);
  }
  for (int i = 0; i < 5; i++) descend(x, w, n, quants, &s, -levels, levels - 1);
  for (int j = 0; j < n; j++) quants[j] = pick(empty, splat(0), quants[j] + (float)levels);
  return scale_of(s, empty);
}

struct line {  // x = scale * quant + low
  floats scale, low;
};

INLINE floats line_error(const floats *x, const floats *w, const int n, const floats *quants, struct line line, const int absolute) {
  floats error = {0};
  for (int j = 0; j < n; j++) {
    const floats difference = line.scale * quants[j] + line.low - x[j];
    if (absolute) error += w[j] * magnitude(difference);
    else error += w[j] * (difference * difference);
  }
  return error;
}

// Tries steps + 1 inverse scales from top + first on; the minimum, which is subtracted, is set.
INLINE floats scale_and_minimum(const floats *x, const floats *w, const int n, const float top, const float first, const float step,
                                const int steps, const int absolute, floats *minimum, floats *quants) {
  floats low = x[0], high = x[0], sum_w = {0}, sum_x = {0};
  for (int j = 0; j < n; j++) {
    low = smaller(low, x[j]), high = larger(high, x[j]);
    sum_w += w[j], sum_x += w[j] * x[j];
  }
  low = pick(low < 0.0f, low, splat(0));
  const ints empty = high == low;
  floats best_inverse = divided(splat(top), high - low), best_low = low;
  for (int j = 0; j < n; j++) quants[j] = rounded(best_inverse * (x[j] - low), 0, top);
  struct line best = {divided(splat(1), best_inverse), low};
  floats error = line_error(x, w, n, quants, best, absolute);
  for (int i = 0; i <= steps; i++) {
    const floats inverse = divided(splat(first + step * (float)i + top), high - best.low);
    floats sum_l = {0}, sum_l2 = {0}, sum_xl = {0};
    for (int j = 0; j < n; j++) {
      const floats q = rounded(inverse * (x[j] - best.low), 0, top), weighted = w[j] * q;
      sum_l += weighted, sum_l2 += weighted * q, sum_xl += weighted * x[j];
      quants[j] = q;
    }
    const floats determinant = sum_w * sum_l2 - sum_l * sum_l;
    struct line line = {divided(sum_w * sum_xl - sum_x * sum_l, determinant), divided(sum_l2 * sum_x - sum_l * sum_xl, determinant)};
    line.scale = pick(line.low > 0.0f, divided(sum_xl, sum_l2), line.scale);
    line.low = pick(line.low > 0.0f, splat(0), line.low);
    const floats tried = line_error(x, w, n, quants, line, absolute);
    const ints better = (determinant > 0.0f) & (tried < error);
    best_inverse = pick(better, inverse, best_inverse), best_low = pick(better, best.low, best_low);
    best.scale = pick(better, line.scale, best.scale), best.low = pick(better, line.low, best.low);
    error = pick(better, tried, error);
  }
  for (int j = 0; j < n; j++) quants[j] = pick(empty, splat(0), rounded(best_inverse * (x[j] - best_low), 0, top));
  *minimum = -best.low;
  return pick(empty, splat(0), best.scale);
}

INLINE floats distance(const floats *x, const floats *w, const int n, floats inverse, const float top) {
  const floats scale = divided(splat(1), inverse);
  floats error = {0};
  for (int j = 0; j < n; j++) {
    const floats difference = x[j] - scale * rounded(inverse * x[j], 0, top);
    error += w[j] * difference * difference;
  }
  return error;
}

// Of numbers that are not negative.
INLINE floats positive_scale(const floats *x, const floats *w, const int n, const float top, floats *quants) {
  floats peak = {0};
  for (int j = 0; j < n; j++) peak = larger(x[j], peak);  // of two zeros the positive one
  const ints empty = peak < TINY;
  floats best = divided(splat(top), peak), error = distance(x, w, n, best, top);
  for (int step = -4; step <= 4; step++) {
    if (step == 0) continue;
    const floats inverse = divided(splat(0.1f * (float)step + top), peak), tried = distance(x, w, n, inverse, top);
    best = pick(tried < error, inverse, best), error = pick(tried < error, tried, error);
  }
  struct sums s = {{0}, {0}};
  for (int j = 0; j < n; j++) {
    quants[j] = rounded(best * x[j], 0, top);
    add_fit(&s, w[j] * x[j], w[j], quants[j]);
  }
  for (int i = 0; i < 5; i++) descend(x, w, n, quants, &s, 0, top);
  for (int j = 0; j < n; j++) quants[j] = pick(empty, splat(0), quants[j]);
  return scale_of(s, empty);
}

// --- sixteen ascending values by a table

// The index, 0 to 15, of the nearest value; halfway between two, that of the larger one.
INLINE floats nearest_index(floats x, const float *values) {
  ints index = {0};
  for (int i = 0; i < 15; i++) index -= x >= (values[i] + values[i + 1]) / 2;
  return __builtin_convertvector(index, floats);
}

INLINE floats nearest_value(floats x, const float *values) {
  floats value = splat(values[0]);
  for (int i = 0; i < 15; i++) value = pick(x >= (values[i] + values[i + 1]) / 2, splat(values[i + 1]), value);
  return value;
}

// w q x is multiplied in this order.
INLINE struct sums fit_table(const floats *x, const floats *w, const int n, floats inverse, const float *values) {
  struct sums s = {{0}, {0}};
  for (int j = 0; j < n; j++) {
    const floats q = nearest_value(inverse * x[j], values), weighted = w[j] * q;
    s.products += weighted * x[j], s.squares += weighted * q;
  }
  return s;
}

// The first value has the largest magnitude.
INLINE floats table_scale(const floats *x, const floats *w, const int n, const float *values) {
  const floats peak = largest(x, n), first = divided(splat(1), divided(-peak, splat(values[0])));
  const ints empty = magnitude(peak) < TINY;
  struct candidate best = first_candidate(fit_table(x, w, n, first, values), first);
  for (int step = -7; step <= 7; step++) {
    const floats inverse = divided(splat((float)step + values[0]), peak);
    consider(&best, fit_table(x, w, n, inverse, values), inverse);
  }
  return pick(empty, splat(0), best.scale);
}
