// The arithmetic of routing: in which order experts are taken, what a token gives them, and its gradient.
#pragma once

#include "softmax.h"

namespace whale {

// Integers that order as numbers do, with -0 equal to 0 and NaN below -inf; taken is below all of them.
template <class A>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = int32_t;
  static constexpr int32_t taken = INT32_MIN;

  WHALE_MATH int32_t from(float x) {
    const int32_t bits = int32_t(bits_of(x));
    const int32_t ordered = bits ^ ((bits >> 31) & INT32_MAX);
    return x != x ? taken + 1 : x == 0 ? 0 : ordered;
  }
};
template <>
struct KeyOf<double> {
  using type = int64_t;
  static constexpr int64_t taken = INT64_MIN;

  WHALE_MATH int64_t from(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int64_t ordered = bits ^ ((bits >> 63) & INT64_MAX);
    return x != x ? taken + 1 : x == 0 ? 0 : ordered;
  }
};

template <class A>
WHALE_MATH A sigmoid(A x) {
  return A(1) / (A(1) + exponential(-x));
}

// The gradient of a logit from that of its probability; dot is the sum of grad * p over the softmax.
template <class A>
WHALE_MATH A softmax_gradient(A p, A grad, A dot) {
  return p * (grad - dot);
}
template <class A>
WHALE_MATH A sigmoid_gradient(A p, A grad) {
  return grad * p * (A(1) - p);
}

}  // namespace whale
