// Cast with scale between every pair of dtypes, dense and strided. Compiled once for each instruction set (WHALE_ISA).
#include <cstring>

#include "../common/cast.h"
#include "loops.h"

namespace whale::cpu::WHALE_ISA {

template <class From, class To>
static void cast(const void* from_memory, void* to_memory, int64_t count, double scale) {
  const From* __restrict from = static_cast<const From*>(from_memory);
  To* __restrict to = static_cast<To*>(to_memory);
  const auto operation = ScaledCast<To, From>::with(scale);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = ScaledCast<To, From>::apply(operation, from[i]);
}

template <class From, class To>
static bool cast_checked(const void* from_memory, void* to_memory, int64_t count, double scale) {
  const From* __restrict from = static_cast<const From*>(from_memory);
  To* __restrict to = static_cast<To*>(to_memory);
  const auto operation = ScaledCast<To, From>::with(scale);
  uint32_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < count; ++i) {
    found |= is_non_finite(from[i]) ? 1u : 0u;
    to[i] = ScaledCast<To, From>::apply(operation, from[i]);
  }
  return found != 0;
}

// Calls run(offset of the first element, elements, elements done before) for each piece of an innermost row.
template <class Run>
static void for_each_run(Strided layout, int64_t begin, int64_t count, Run run) {
  constexpr int kMaxDims = 64;  // torch's own limit
  int64_t index[kMaxDims];
  int64_t offset = 0, rest = begin;
  for (int d = layout.dims - 1; d >= 0; --d) {
    index[d] = rest % layout.sizes[d];
    rest /= layout.sizes[d];
    offset += index[d] * layout.strides[d];
  }
  const int inner = layout.dims - 1;
  for (int64_t done = 0; done < count;) {
    const int64_t left = layout.sizes[inner] - index[inner];
    const int64_t length = left < count - done ? left : count - done;
    run(offset, length, done);
    done += length;
    offset += length * layout.strides[inner];
    index[inner] += length;
    for (int d = inner; d > 0 && index[d] == layout.sizes[d]; --d) {
      offset += layout.strides[d - 1] - index[d] * layout.strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <class From, class To>
static void gather(const void* from_memory, Strided layout, int64_t begin, void* to_memory, int64_t count, double scale) {
  const From* __restrict from = static_cast<const From*>(from_memory);
  To* __restrict to = static_cast<To*>(to_memory);
  const auto operation = ScaledCast<To, From>::with(scale);
  const int64_t stride = layout.strides[layout.dims - 1];
  for_each_run(layout, begin, count, [=](int64_t offset, int64_t length, int64_t done) {
    for (int64_t i = 0; i < length; ++i) to[done + i] = ScaledCast<To, From>::apply(operation, from[offset + i * stride]);
  });
}

template <class From, class To>
static bool scatter(const void* from_memory, void* to_memory, Strided layout, int64_t begin, int64_t count, double scale) {
  const From* __restrict from = static_cast<const From*>(from_memory);
  To* __restrict to = static_cast<To*>(to_memory);
  const auto operation = ScaledCast<To, From>::with(scale);
  const int64_t stride = layout.strides[layout.dims - 1];
  bool found = false;
  for_each_run(layout, begin, count, [=, &found](int64_t offset, int64_t length, int64_t done) {
    bool any = false;
    for (int64_t i = 0; i < length; ++i) {
      any |= is_non_finite(from[done + i]);
      to[offset + i * stride] = ScaledCast<To, From>::apply(operation, from[done + i]);
    }
    found |= any;
  });
  return found;
}

template <class From>
static uint32_t largest(const void* from_memory, int64_t count) {
  const From* __restrict from = static_cast<const From*>(from_memory);
  int32_t most = 0;  // the bits of a magnitude are below 2^31, and signed maxima need no SSE4
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = int32_t(magnitude_bits(from[i]));
    most = bits > most ? bits : most;
  }
  return uint32_t(most);
}

#define WHALE_ROW(LOOP, FROM) {LOOP<FROM, float>, LOOP<FROM, Bf16>, LOOP<FROM, Fp16>, LOOP<FROM, double>}
#define WHALE_TABLE(LOOP) \
  { WHALE_ROW(LOOP, float), WHALE_ROW(LOOP, Bf16), WHALE_ROW(LOOP, Fp16), WHALE_ROW(LOOP, double) }

extern const BucketLoops bucket_loops = {
    WHALE_TABLE(cast),
    WHALE_TABLE(cast_checked),
    WHALE_TABLE(gather),
    WHALE_TABLE(scatter),
    {largest<float>, largest<Bf16>, largest<Fp16>, largest<double>},
};

}  // namespace whale::cpu::WHALE_ISA
