// Weighted sums of rows and their gradients, a token at a time. Compiled once for each instruction set (WHALE_ISA).
#include "../common/cast.h"
#include "loops.h"

namespace whale::cpu::WHALE_ISA {

// to = cast(before + the weighted sum of N rows, in their order); without before, of the rows alone.
template <int N, class S, class A, class T>
static void weighted_sum(const void* const* rows, const A* weights, const A* before, T* to, int64_t count) {
  const S* row[N];
  A weight[N];
  for (int n = 0; n < N; ++n) {
    row[n] = static_cast<const S*>(rows[n]);
    weight[n] = weights[n];
  }
  if (before == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      A sum = weight[0] * A(widen(row[0][i]));
      for (int n = 1; n < N; ++n) sum += weight[n] * A(widen(row[n][i]));
      to[i] = Narrow<T>::from(sum);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      A sum = before[i];
      for (int n = 0; n < N; ++n) sum += weight[n] * A(widen(row[n][i]));
      to[i] = Narrow<T>::from(sum);
    }
  }
}

template <class S, class T>
static void combine(const void* const* rows, const void* weights, int64_t num_rows, void* to, void* scratch,
                    int64_t count) {
  using A = typename WiderOf<S, T>::type;
  const A* weight = static_cast<const A*>(weights);
  A* total = static_cast<A*>(scratch);
  const A* before = nullptr;
  for (; num_rows > 4; rows += 4, weight += 4, num_rows -= 4) {
    weighted_sum<4, S, A, A>(rows, weight, before, total, count);
    before = total;
  }
  T* out = static_cast<T*>(to);
  switch (num_rows) {
    case 0:
      for (int64_t i = 0; i < count; ++i) out[i] = Narrow<T>::from(A(0));
      return;
    case 1: return weighted_sum<1, S, A, T>(rows, weight, before, out, count);
    case 2: return weighted_sum<2, S, A, T>(rows, weight, before, out, count);
    case 3: return weighted_sum<3, S, A, T>(rows, weight, before, out, count);
    default: return weighted_sum<4, S, A, T>(rows, weight, before, out, count);
  }
}

template <class G, class S>
static double combine_backward(const void* dy, const void* y, double weight, void* drow, int64_t count) {
  using A = typename WiderOf<S, G>::type;
  const G* grad = static_cast<const G*>(dy);
  const S* row = static_cast<const S*>(y);
  S* out = static_cast<S*>(drow);
  const A factor = A(weight);
  A dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < count; ++i) {
    const A g = A(widen(grad[i]));
    dot += g * A(widen(row[i]));
    out[i] = Narrow<S>::from(factor * g);
  }
  return dot;
}

#define WHALE_ROW(LOOP, FROM) {LOOP<FROM, float>, LOOP<FROM, Bf16>, LOOP<FROM, Fp16>, LOOP<FROM, double>}
#define WHALE_TABLE(LOOP) \
  { WHALE_ROW(LOOP, float), WHALE_ROW(LOOP, Bf16), WHALE_ROW(LOOP, Fp16), WHALE_ROW(LOOP, double) }

extern const PermutationLoops permutation_loops = {WHALE_TABLE(combine), WHALE_TABLE(combine_backward)};

}  // namespace whale::cpu::WHALE_ISA
