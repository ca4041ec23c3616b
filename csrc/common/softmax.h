// The arithmetic of softmax cross-entropy.
#pragma once

#include <cmath>

#include "numeric.h"

namespace whale {

WHALE_MATH float negative_infinity(float) { return float_of(0xff800000u); }
WHALE_MATH double negative_infinity(double) { return -__builtin_huge_val(); }

// e^x as exactly as x itself is rounded (relative error 1e-7 + |x| 4e-8); 0 below -86 (no subnormals, which are slow), inf
// from 88.4, NaN stays. No branch and no call, so that a loop over it vectorises.
// x = k ln2 + r; 2^k by its bits; e^r by a polynomial fitted to the smallest relative error on |r| <= ln2 / 2.
// exponential_to_88 spares the comparison that a larger x needs.
WHALE_MATH float exponential_to_88(float x) {
  constexpr float kLowest = -86.0f, kInverseLn2 = 1.44269504f, kLn2 = 0.693147182f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: its lowest mantissa bit counts ones
  const float shifted = x * kInverseLn2 + kRound;
  const float k = shifted - kRound;
  const float r = x - k * kLn2;
  float p = 0.008290305733680725f;
  p = p * r + 0.0418979749083519f;
  p = p * r + 0.1666763722896576f;
  p = p * r + 0.4999915063381195f;
  p = p * r + 0.9999997019767761f;
  p = p * r + 1.0f;
  const float power = float_of((bits_of(shifted) + 127u) << 23);  // kRound's own bits shift out
  return x < kLowest ? 0.0f : p * power;
}
WHALE_MATH double exponential_to_88(double x) { return exp(x); }

WHALE_MATH float exponential(float x) { return exponential_to_88(89.0f < x ? 89.0f : x); }
WHALE_MATH double exponential(double x) { return exp(x); }

// exp(z - max), where a max of -inf (no class, or none possible) counts as 0, so that the sum is 0 and not NaN.
template <class A>
WHALE_MATH A finite_shift(A largest) {
  return largest == negative_infinity(A()) ? A(0) : largest;
}

// One row's part of the gradient: g_j = e^(z_j - lse) softmax - smooth w_j - [j is the target] target.
template <class A>
struct RowGradient {
  A lse, softmax, target, smooth;

  WHALE_MATH bool is_zero(const RowGradient& row) { return row.softmax == 0 && row.target == 0 && row.smooth == 0; }
  WHALE_MATH A plain(const RowGradient& row, A z) { return exponential(z - row.lse) * row.softmax; }
  WHALE_MATH A smoothed(const RowGradient& row, A z, A weight) { return plain(row, z) - row.smooth * weight; }
};

}  // namespace whale
