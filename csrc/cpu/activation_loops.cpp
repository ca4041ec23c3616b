// Activations, with gates, and their gradients, a range of columns at a time. Compiled once for each
// instruction set (WHALE_ISA).
#include "../common/activation.h"
#include "loops.h"

namespace whale::cpu::WHALE_ISA {

constexpr int64_t kRowsOfSum = 32;  // rows are summed by so many first, so that rounding grows with fewer

template <class F, class S>
static void activate(const ActivationRows& rows, int64_t begin, int64_t end) {
  using A = Wide<S>;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const S* h = static_cast<const S*>(rows.h) + i * rows.num_columns;
    S* out = static_cast<S*>(rows.out) + i * rows.num_columns;
    if (rows.u == nullptr) {
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) out[j] = Narrow<S>::from(F::of(A(widen(h[j]))).value);
    } else {
      const S* u = static_cast<const S*>(rows.u) + i * rows.num_columns;
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        out[j] = Narrow<S>::from(F::of(A(widen(h[j]))).value * A(widen(u[j])));
      }
    }
  }
}

template <class A>
static void add_and_clear(A* sum, A* part, int64_t begin, int64_t end) {
  if (sum == nullptr) return;
#pragma omp simd
  for (int64_t j = begin; j < end; ++j) {
    sum[j] += part[j];
    part[j] = 0;
  }
}

template <class F, class S>
static void activate_backward(const ActivationGradRows& rows, int64_t begin, int64_t end) {
  using A = Wide<S>;
  A *sum = static_cast<A*>(rows.dbias), *du_sum = static_cast<A*>(rows.du_bias);
  A *part = static_cast<A*>(rows.scratch), *du_part = part + rows.num_columns;
  for (int64_t j = begin; j < end; ++j) part[j] = du_part[j] = 0;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const int64_t first = i * rows.num_columns;
    S* grad = static_cast<S*>(rows.grad) + first;
    const S* h = static_cast<const S*>(rows.h) + first;
    if (rows.u == nullptr) {
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        const A g = A(widen(grad[j])) * F::of(A(widen(h[j]))).slope;
        part[j] += g;
        grad[j] = Narrow<S>::from(g);
      }
    } else {
      const S* u = static_cast<const S*>(rows.u) + first;
      S* du = static_cast<S*>(rows.du) + first;
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        const Activated<A> f = F::of(A(widen(h[j])));
        const A above = A(widen(grad[j])), gate = above * f.value, g = above * A(widen(u[j])) * f.slope;
        part[j] += g;
        du_part[j] += gate;
        grad[j] = Narrow<S>::from(g);
        du[j] = Narrow<S>::from(gate);
      }
    }
    if (i % kRowsOfSum == kRowsOfSum - 1 || i == rows.num_rows - 1) {
      add_and_clear(sum, part, begin, end);
      add_and_clear(du_sum, du_part, begin, end);
    }
  }
}

#define WHALE_OF(LOOP, F) {LOOP<F, float>, LOOP<F, Bf16>, LOOP<F, Fp16>, LOOP<F, double>}
#define WHALE_TABLE(LOOP) {WHALE_OF(LOOP, Gelu), WHALE_OF(LOOP, GeluTanh), WHALE_OF(LOOP, Relu), WHALE_OF(LOOP, Silu)}

extern const ActivationLoops activation_loops = {WHALE_TABLE(activate), WHALE_TABLE(activate_backward)};

}  // namespace whale::cpu::WHALE_ISA
