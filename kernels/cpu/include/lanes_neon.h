// lanes.h in NEON: four registers each. Dot products where the processor has them.
#pragma once
#include <arm_neon.h>

typedef float32x4x4_t v16;
typedef uint32x4x4_t w16;
typedef int32x4x4_t i16;

#define EACH for (int i = 0; i < 4; i++)

// One function a line, as a table.
// clang-format off
static inline v16 v16_load(const float *p) { v16 r; EACH r.val[i] = vld1q_f32(p + 4 * i); return r; }
static inline void v16_store(float *p, v16 a) { EACH vst1q_f32(p + 4 * i, a.val[i]); }
static inline v16 v16_set(float x) { v16 r; EACH r.val[i] = vdupq_n_f32(x); return r; }
static inline v16 v16_add(v16 a, v16 b) { EACH a.val[i] = vaddq_f32(a.val[i], b.val[i]); return a; }
static inline v16 v16_sub(v16 a, v16 b) { EACH a.val[i] = vsubq_f32(a.val[i], b.val[i]); return a; }
static inline v16 v16_mul(v16 a, v16 b) { EACH a.val[i] = vmulq_f32(a.val[i], b.val[i]); return a; }
static inline v16 v16_div(v16 a, v16 b) { EACH a.val[i] = vdivq_f32(a.val[i], b.val[i]); return a; }
// Not vminq and vmaxq: they give NaN where either is.
static inline v16 v16_min(v16 a, v16 b) { EACH a.val[i] = vbslq_f32(vcltq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]); return a; }
static inline v16 v16_max(v16 a, v16 b) { EACH a.val[i] = vbslq_f32(vcgtq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]); return a; }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { EACH c.val[i] = vfmaq_f32(c.val[i], a.val[i], b.val[i]); return c; }

static inline v16 v16_round(v16 a) { EACH a.val[i] = vrndnq_f32(a.val[i]); return a; }
static inline v16 v16_fraction(v16 a) { EACH a.val[i] = vsubq_f32(a.val[i], vrndmq_f32(a.val[i])); return a; }
static inline v16 v16_scale2(v16 a, v16 n) {
  EACH {
    int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.val[i]), vdupq_n_s32(127)), 23);
    a.val[i] = vmulq_f32(a.val[i], vreinterpretq_f32_s32(power));
  }
  return a;
}
static inline v16 v16_zero_below(v16 a, v16 x, v16 low) {
  EACH a.val[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.val[i]), vcltq_f32(x.val[i], low.val[i])));
  return a;
}
static inline v16 v16_abs(v16 a) { EACH a.val[i] = vabsq_f32(a.val[i]); return a; }

static inline float v16_sum(v16 a) {
  float32x4_t q = vaddq_f32(vaddq_f32(a.val[0], a.val[2]), vaddq_f32(a.val[1], a.val[3]));
  return vpadds_f32(vadd_f32(vget_low_f32(q), vget_high_f32(q)));
}
static inline float v16_max_of(v16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.val[0], a.val[2]), vmaxq_f32(a.val[1], a.val[3])));
}

static inline v16 v16_load_bf16(const uint16_t *p) {
  v16 r;
  EACH r.val[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return r;
}
static inline v16 v16_load_f16(const uint16_t *p) {
  v16 r;
  EACH r.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return r;
}
static inline void v16_store_bf16(uint16_t *p, v16 a) {
  EACH {
    uint32x4_t bits = vreinterpretq_u32_f32(a.val[i]), high = vshrq_n_u32(bits, 16), number = vceqq_f32(a.val[i], a.val[i]);
    uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), vandq_u32(high, vdupq_n_u32(1))), 16);
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(number, rounded, vorrq_u32(high, vdupq_n_u32(0x40)))));
  }
}
static inline void v16_store_f16(uint16_t *p, v16 a) { EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.val[i]))); }

static inline w16 w16_load(const void *p) {
  w16 r;
  EACH r.val[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p + 16 * i));
  return r;
}

static inline w16 w16_load_u16(const uint16_t *p) {
  w16 r;
  EACH r.val[i] = vmovl_u16(vld1_u16(p + 4 * i));
  return r;
}

// BFDOT adds both products to each other first, rounds to odd in between and takes subnormals for 0: it may differ in the last bits.
static inline v16 v16_dot_bf16(v16 acc, w16 w, uint32_t x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  EACH acc.val[i] = vbfdotq_f32(acc.val[i], vreinterpretq_bf16_u32(w.val[i]), vreinterpretq_bf16_u32(vdupq_n_u32(x)));
#else
  float32x4_t low = vreinterpretq_f32_u32(vdupq_n_u32(x << 16)), high = vreinterpretq_f32_u32(vdupq_n_u32(x & 0xFFFF0000u));
  EACH {
    acc.val[i] = vfmaq_f32(acc.val[i], vreinterpretq_f32_u32(vandq_u32(w.val[i], vdupq_n_u32(0xFFFF0000u))), high);
    acc.val[i] = vfmaq_f32(acc.val[i], vreinterpretq_f32_u32(vshlq_n_u32(w.val[i], 16)), low);
  }
#endif
  return acc;
}

static inline i16 i16_dot_u8s8(i16 acc, w16 w, uint32_t x) {
  int8x16_t xs = vreinterpretq_s8_u32(vdupq_n_u32(x));
#if defined(__ARM_FEATURE_MATMUL_INT8)
  EACH acc.val[i] = vusdotq_s32(acc.val[i], vreinterpretq_u8_u32(w.val[i]), xs);
#elif defined(__ARM_FEATURE_DOTPROD)  // both sides signed: w - 128, and 128 times the sum of x goes back in as 2 * 64
  int32x4_t back = vdotq_s32(vdotq_s32(vdupq_n_s32(0), xs, vdupq_n_s8(64)), xs, vdupq_n_s8(64));
  EACH {
    int8x16_t less = vreinterpretq_s8_u32(veorq_u32(w.val[i], vdupq_n_u32(0x80808080u)));
    acc.val[i] = vdotq_s32(vaddq_s32(acc.val[i], back), less, xs);
  }
#else
  int16x4_t four = vget_low_s16(vmovl_s8(vget_low_s8(xs)));
  EACH {
    uint8x16_t bytes = vreinterpretq_u8_u32(w.val[i]);
    int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
    int32x4_t first = vpaddq_s32(vmull_s16(vget_low_s16(low), four), vmull_s16(vget_high_s16(low), four));
    int32x4_t second = vpaddq_s32(vmull_s16(vget_low_s16(high), four), vmull_s16(vget_high_s16(high), four));
    acc.val[i] = vaddq_s32(acc.val[i], vpaddq_s32(first, second));
  }
#endif
  return acc;
}
static inline i16 i16_set(int32_t x) { i16 r; EACH r.val[i] = vdupq_n_s32(x); return r; }
static inline v16 v16_from_i16(i16 a) { v16 r; EACH r.val[i] = vcvtq_f32_s32(a.val[i]); return r; }
static inline w16 w16_low_nibbles(w16 w) { EACH w.val[i] = vandq_u32(w.val[i], vdupq_n_u32(0x0F0F0F0F)); return w; }
static inline w16 w16_high_nibbles(w16 w) { EACH w.val[i] = vandq_u32(vshrq_n_u32(w.val[i], 4), vdupq_n_u32(0x0F0F0F0F)); return w; }
static inline w16 w16_bits(w16 w, int right, int mask) {
  EACH w.val[i] = vandq_u32(vshlq_u32(w.val[i], vdupq_n_s32(-right)), vreinterpretq_u32_u8(vdupq_n_u8((uint8_t)mask)));
  return w;
}
static inline w16 w16_lookup(w16 w, const uint8_t *table) {
  const uint8x16_t entries = vld1q_u8(table);
  EACH w.val[i] = vreinterpretq_u32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_u32(w.val[i])));
  return w;
}
static inline v16 v16_from_bits(w16 w, int first, int count) {
  v16 r;
  EACH r.val[i] = vcvtq_f32_u32(vandq_u32(vshlq_u32(w.val[i], vdupq_n_s32(-first)), vdupq_n_u32((1u << count) - 1)));
  return r;
}
static inline v16 v16_from_s8(w16 w, int j) {
  v16 r;
  EACH r.val[i] = vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u32(w.val[i]), vdupq_n_s32(24 - 8 * j)), 24));
  return r;
}
static inline v16 v16_lookup(w16 w, int first, const float *table) {
  const uint8x16x4_t entries = vld1q_u8_x4((const uint8_t *)table);
  v16 r;
  EACH {
    const uint32x4_t at = vandq_u32(vshlq_u32(w.val[i], vdupq_n_s32(-first)), vdupq_n_u32(15));
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), at, 0x04040404);  // of each entry all four
    r.val[i] = vreinterpretq_f32_u8(vqtbl4q_u8(entries, vreinterpretq_u8_u32(bytes)));
  }
  return r;
}
static inline w16 w16_fifth_bits(w16 w, int first) {
  EACH {
    const uint32x4_t bits = vandq_u32(vshlq_u32(w.val[i], vdupq_n_s32(-first)), vdupq_n_u32(15));
    w.val[i] = vandq_u32(vmulq_u32(bits, vdupq_n_u32(0x02040810u)), vdupq_n_u32(0x10101010u));
  }
  return w;
}
static inline w16 w16_or(w16 a, w16 b) { EACH a.val[i] = vorrq_u32(a.val[i], b.val[i]); return a; }

static inline w16 w16_load_halves(const void *low, const void *high) {
  w16 r;
  EACH r.val[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(i < 2 ? low : high) + 16 * (i % 2)));
  return r;
}

static inline i16 i16_dot_u4s8(i16 acc, w16 w, uint32_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t xs = vreinterpretq_s8_u32(vdupq_n_u32(x));
  EACH acc.val[i] = vdotq_s32(acc.val[i], vreinterpretq_s8_u32(w.val[i]), xs);
  return acc;
#else
  return i16_dot_u8s8(acc, w, x);
#endif
}
static inline v16 v16_from_e4m3(w16 w, int j) {
  v16 r;
  EACH {
    const int32x4_t top = vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u32(w.val[i]), vdupq_n_s32(24 - 8 * j)), 4);
    const uint32x4_t bits = vandq_u32(vreinterpretq_u32_s32(top), vdupq_n_u32(0x87F00000u));
    r.val[i] = vmulq_n_f32(vreinterpretq_f32_u32(bits), 0x1p120f);
  }
  return r;
}

static inline void v16_store_i8(int8_t *p, v16 a) {
  int32x4x4_t whole;
  EACH whole.val[i] = vcvtnq_s32_f32(a.val[i]);
  int16x8_t low = vcombine_s16(vmovn_s32(whole.val[0]), vmovn_s32(whole.val[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(whole.val[2]), vmovn_s32(whole.val[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static inline v16 v16_first(int n, v16 a, v16 b) {
  const uint32x4_t four = {0, 1, 2, 3};
  EACH {
    uint32x4_t from_a = vcltq_u32(vaddq_u32(four, vdupq_n_u32(4 * (uint32_t)i)), vdupq_n_u32((uint32_t)n));
    a.val[i] = vbslq_f32(from_a, a.val[i], b.val[i]);
  }
  return a;
}

// Four by four words; the sixteen squares change places across the diagonal, too.
static inline uint32x4x4_t transpose4(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  uint64x2_t even = vreinterpretq_u64_u32(vtrn1q_u32(a, b)), odd = vreinterpretq_u64_u32(vtrn2q_u32(a, b));
  uint64x2_t even2 = vreinterpretq_u64_u32(vtrn1q_u32(c, d)), odd2 = vreinterpretq_u64_u32(vtrn2q_u32(c, d));
  return (uint32x4x4_t){{vreinterpretq_u32_u64(vtrn1q_u64(even, even2)), vreinterpretq_u32_u64(vtrn1q_u64(odd, odd2)),
                         vreinterpretq_u32_u64(vtrn2q_u64(even, even2)), vreinterpretq_u32_u64(vtrn2q_u64(odd, odd2))}};
}
static inline void w16_transpose(w16 *r) {
  EACH for (int j = 0; j <= i; j++) {
    w16 *p = r + 4 * i, *q = r + 4 * j;
    uint32x4x4_t lower = transpose4(p[0].val[j], p[1].val[j], p[2].val[j], p[3].val[j]);
    uint32x4x4_t upper = transpose4(q[0].val[i], q[1].val[i], q[2].val[i], q[3].val[i]);
    for (int k = 0; k < 4; k++) q[k].val[i] = lower.val[k], p[k].val[j] = upper.val[k];
  }
}

static inline v16 v16_from_w16(w16 w) { v16 r; EACH r.val[i] = vreinterpretq_f32_u32(w.val[i]); return r; }
static inline v16 v16_from_low_bf16(w16 w) { EACH w.val[i] = vshlq_n_u32(w.val[i], 16); return v16_from_w16(w); }
static inline v16 v16_from_high_bf16(w16 w) { EACH w.val[i] = vandq_u32(w.val[i], vdupq_n_u32(0xFFFF0000u)); return v16_from_w16(w); }
static inline v16 v16_from_low_f16(w16 w) { v16 r; EACH r.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(w.val[i]))); return r; }
static inline v16 v16_from_high_f16(w16 w) {
  v16 r;
  EACH r.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(w.val[i], 16)));
  return r;
}

// clang-format on
#undef EACH
