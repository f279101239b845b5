// RMS norm within a product: the product is of x * weight, and its sums are multiplied by 1 / sqrt(mean(x^2) + eps) at the end, so that x
// is read once. The squares are summed by the lanes that read x for the product.
#pragma once
#include "product.h"

INLINE float inverse_root(float squares, int width, float eps) { return 1.0f / precise::sqrt(squares / (float)width + eps); }
