// FP8_G128: weight = scale * e4m3. File: { float scale; uint8 q[128] }.
#pragma once
#define E4M3_QUANTS 1
#define HEAD_BYTES 4

constexpr int BLOCK = 128;
