// The order of logits, as integers that compare as the numbers do. The best token is the one with the largest logit, and of equal ones the
// one with the lowest id, on every backend and however a row is divided.
//
// A plain C subset for C, CUDA C++ and Metal: scalars and small structures by value, no pointers, no library. What differs between the
// languages (DEVICE_FN, u32, u64, bits_of_float, float_from_bits, fmadd) is in the backend's own include/portable.h.
#pragma once
#include "portable.h"

#define NAN_ORDER 0xFFFFFFFFu  // for a NaN: above all numbers
#define MIN_ORDER 0x00800000u  // of -inf
#define MAX_ORDER 0xFF800000u  // of +inf; an order outside of these two is that of a NaN

#define MINUS_INFINITY float_from_bits(0xFF800000u)

// Compares as x does; both zeros are equal. Of a NaN: an order outside of MIN_ORDER to MAX_ORDER.
DEVICE_FN u32 order_of(float x) {
  const u32 bits = bits_of_float(x);
  return bits >> 31 ? 0x80000000u - (bits & 0x7FFFFFFFu) : bits + 0x80000000u;
}

DEVICE_FN u32 order_or_nan(float x) {
  const u32 order = order_of(x);
  return order - MIN_ORDER <= MAX_ORDER - MIN_ORDER ? order : NAN_ORDER;
}

DEVICE_FN float float_from_order(u32 order) {
  return float_from_bits(order >> 31 ? order - 0x80000000u : 0x80000000u | (0x80000000u - order));
}

// --- a token and its score as one integer, for atomic maxima: the largest key is the best token. 0: no token.

#define NAN_KEY (~(u64)0)

DEVICE_FN u64 key_of(float score, u32 token) { return score > MINUS_INFINITY ? (u64)order_of(score) << 32 | (0xFFFFFFFFu - token) : 0; }

DEVICE_FN int token_of_key(u64 key) { return key == 0 || key == NAN_KEY ? -1 : (int)(0xFFFFFFFFu - (u32)key); }

// --- a token and its score as a pair, for machines without 64-bit atomics. Order MIN_ORDER: no token; NAN_ORDER: none ever.

typedef struct {
  u32 order, token;
} Candidate;

DEVICE_FN Candidate make_candidate(u32 order, u32 token) {
  Candidate candidate;
  candidate.order = order, candidate.token = token;
  return candidate;
}

DEVICE_FN Candidate no_candidate(void) { return make_candidate(MIN_ORDER, 0xFFFFFFFFu); }

DEVICE_FN Candidate better(Candidate a, Candidate b) { return b.order > a.order || (b.order == a.order && b.token < a.token) ? b : a; }

DEVICE_FN int token_of(Candidate best) { return best.order == MIN_ORDER || best.order == NAN_ORDER ? -1 : (int)best.token; }
