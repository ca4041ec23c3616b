// The activations of feed-forward experts: their values and slopes.
#pragma once

#include "routing.h"

namespace whale {

// Tables over functions are in this order.
constexpr int kNumActivations = 4;  // gelu, gelu_tanh, relu, silu

template <class A>
struct Activated {
  A value, slope;
};

// e^(z^2) erfc(z) for z >= 0, as t P(t) with t = 1 / (1 + p z): a fit to the smallest relative error, 2.5e-7 exactly and
// 5.5e-7 in float. No branch and no call.
WHALE_MATH float scaled_erfc(float z) {
  const float t = 1.0f / (1.0f + 0.425f * z);
  float p = 0.06888730078935623f;
  p = p * t - 0.3024805784225464f;
  p = p * t + 0.389468789100647f;
  p = p * t - 0.08682073652744293f;
  p = p * t + 0.24656838178634644f;
  p = p * t + 0.2032243013381958f;
  p = p * t + 0.2414490133523941f;
  p = p * t + 0.23970326781272888f;
  return p * t;
}

// The normal distribution up to x, and its density times x.
WHALE_MATH Activated<float> normal(float x) {
  constexpr float kInverseRoot2 = 0.707106781f, kInverseRoot2Pi = 0.398942280f;
  const float magnitude = x < 0 ? -x : x;
  const float e = exponential_to_88(-0.5f * x * x);
  const float tail = 0.5f * scaled_erfc(magnitude * kInverseRoot2) * e;
  return {x < 0 ? tail : 1.0f - tail, x * kInverseRoot2Pi * e};
}
WHALE_MATH Activated<double> normal(double x) {
  constexpr double kInverseRoot2 = 0.70710678118654752440, kInverseRoot2Pi = 0.39894228040143267794;
  return {0.5 * erfc(-x * kInverseRoot2), x * kInverseRoot2Pi * exp(-0.5 * x * x)};
}

struct Gelu {
  template <class A>
  WHALE_MATH Activated<A> of(A x) {
    const Activated<A> part = normal(x);
    return {x * part.value, part.value + part.slope};
  }
};

struct GeluTanh {
  template <class A>
  WHALE_MATH Activated<A> of(A x) {
    constexpr A kRoot = A(0.79788456080286535588), kCubic = A(0.044715);
    const A y = A(2) * kRoot * (x + kCubic * x * x * x);
    const A inner = kRoot * (A(1) + A(3) * kCubic * x * x);
    // (1 + tanh(y / 2)) / 2 is the sigmoid of y: by e^-|y|, so that nothing cancels in the tails.
    const A e = exponential(y < 0 ? y : -y), t = A(1) / (A(1) + e);
    const A s = y < 0 ? e * t : t;
    return {x * s, s + A(2) * x * e * t * t * inner};
  }
};

struct Relu {
  template <class A>
  WHALE_MATH Activated<A> of(A x) {
    return {x <= 0 ? A(0) : x, x <= 0 ? A(0) : A(1)};  // NaN stays
  }
};

struct Silu {
  template <class A>
  WHALE_MATH Activated<A> of(A x) {
    const A s = sigmoid(x);
    return {x * s, s * (A(1) + x * (A(1) - s))};
  }
};

}  // namespace whale
