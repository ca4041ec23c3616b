// Element types and the conversions between them, the same on the host and on a GPU. Torch's headers stay out, and every
// function is always inlined: this file is compiled once for each instruction set, and of an inline function with a body
// of its own the linker would keep one copy for all.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define WHALE_MATH static __host__ __device__ __forceinline__
#else
#define WHALE_MATH static inline __attribute__((always_inline))
#endif

namespace whale {

// Tables over element types are in this order.
enum Dtype { kFloat = 0, kBf16 = 1, kFp16 = 2, kDouble = 3 };
constexpr int kNumDtypes = 4;
constexpr int64_t kElementBytes[kNumDtypes] = {4, 2, 2, 8};

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

WHALE_MATH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

WHALE_MATH float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

WHALE_MATH float widen(float x) { return x; }
WHALE_MATH double widen(double x) { return x; }
WHALE_MATH float widen(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }

// The exponent is moved by a multiplication with 2^112, which also normalises subnormals; inf and NaN get float's.
WHALE_MATH float widen(Fp16 x) {
  uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float value = float_of(magnitude) * float_of((127u + 112u) << 23);
  uint32_t special = magnitude | 0x7f800000u;
  uint32_t bits = (x.bits & 0x7c00) == 0x7c00 ? special : bits_of(value);
  return float_of(bits | uint32_t(x.bits & 0x8000) << 16);
}

template <class To>
struct Narrow;

template <>
struct Narrow<float> {
  WHALE_MATH float from(float x) { return x; }
  WHALE_MATH float from(double x) { return float(x); }
};

template <>
struct Narrow<double> {
  WHALE_MATH double from(float x) { return x; }
  WHALE_MATH double from(double x) { return x; }
};

template <>
struct Narrow<Bf16> {
  // Round to nearest even by an integer addition. A NaN is cut instead: the addition could carry it into the sign. Cut, it
  // stays one, as every x here comes from arithmetic, which makes NaNs quiet (the top bit of their mantissa is set).
  WHALE_MATH Bf16 from(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t increment = x != x ? 0u : 0x7fffu + ((bits >> 16) & 1u);
    return Bf16{uint16_t((bits + increment) >> 16)};
  }
  WHALE_MATH Bf16 from(double x) { return from(float(x)); }
};

template <>
struct Narrow<Fp16> {
  // Round to nearest even. Below 2^-14 the result is subnormal: adding 0.5 lets float's own rounding place its bits.
  WHALE_MATH Fp16 from(float x) {
    uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return Fp16{uint16_t(sign | (magnitude >= 0x477ff000u ? special : finite))};
  }
  WHALE_MATH Fp16 from(double x) { return from(float(x)); }
};

// The type that arithmetic on a stored type is done in: float, and double for double.
template <class Stored>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <class Stored>
using Wide = typename WideOf<Stored>::type;

}  // namespace whale
