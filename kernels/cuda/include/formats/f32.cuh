// F32: float32, in rows only.
#pragma once

DEVICE float4 read_row(const u8 *table, int width, int row, int column) { return ((const float4 *)table)[((s64)row * width + column) / 4]; }
