// The arithmetic of buckets: cast with scale, non-finite values, magnitudes.
#pragma once

#include "numeric.h"

namespace whale {

template <class A, class B>
struct WiderOf {
  using type = float;
};
template <class B>
struct WiderOf<double, B> {
  using type = double;
};
template <class A>
struct WiderOf<A, double> {
  using type = double;
};
template <>
struct WiderOf<double, double> {
  using type = double;
};

// to = cast(from * scale), multiplied in double if either side is double, else in float.
template <class To, class From>
struct ScaledCast {
  using Arithmetic = typename WiderOf<To, From>::type;
  Arithmetic scale;

  WHALE_MATH ScaledCast with(double scale) { return ScaledCast{Arithmetic(scale)}; }
  WHALE_MATH To apply(const ScaledCast& self, From x) { return Narrow<To>::from(Arithmetic(widen(x)) * self.scale); }
};

// |x| as the bits of a float, which order as the magnitudes do, inf above every finite value and NaN above inf.
template <class Stored>
WHALE_MATH uint32_t magnitude_bits(Stored x) {
  return bits_of(float(widen(x))) & 0x7fffffffu;
}

template <class Stored>
WHALE_MATH bool is_non_finite(Stored x) {
  return magnitude_bits(x) >= 0x7f800000u;
}
WHALE_MATH bool is_non_finite(double x) { return !(x - x == 0.0); }

}  // namespace whale
