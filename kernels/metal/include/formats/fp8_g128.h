// FP8_G128: blocks of 128 columns, 132 bytes: float scale, 128 e4m3 numbers (e4m3_blocks.h); w = scale * number. weights.h says what a format
// header defines.
#define BLOCK 128
#define HEAD_BYTES 4

INLINE float head_scale(device const uchar *block) { return *(device const float *)block; }
