// Softmax statistics and gradient, a row at a time. Compiled once for each instruction set (WHALE_ISA).
#include "../common/softmax.h"
#include "loops.h"

namespace whale::cpu::WHALE_ISA {

// A block stays in the first-level cache between its maximum and its sum, so memory is read once.
constexpr int64_t kBlock = 2048;

template <class S, class A>
static A block_max(const S* z, int64_t count, A largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) {
    const A value = widen(z[j]);
    largest = value > largest ? value : largest;
  }
  return largest;
}

template <class S, class A>
static A block_sum(const S* z, int64_t count, A shift) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) sum += exponential_to_88(widen(z[j]) - shift);
  return sum;
}

template <class S, class A>
static A block_weighted(const S* z, const A* weight, int64_t count) {
  A sum = 0;
  if (weight == nullptr) {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) sum += widen(z[j]);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) sum += weight[j] * widen(z[j]);
  }
  return sum;
}

template <class S>
static void stats(const StatsRows& rows, int64_t begin, int64_t end) {
  using A = Wide<S>;
  const int64_t num_classes = rows.num_classes;
  const A* class_weight = static_cast<const A*>(rows.class_weight);
  A* out = static_cast<A*>(rows.stats);
  for (int64_t i = begin; i < end; ++i) {
    const S* z = static_cast<const S*>(rows.logits) + i * rows.row_stride;
    A largest = negative_infinity(A());
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j < num_classes; j += kBlock) {
      const int64_t count = num_classes - j < kBlock ? num_classes - j : kBlock;
      const A before = finite_shift(largest);
      largest = block_max<S, A>(z + j, count, largest);
      const A shift = finite_shift(largest);
      if (sum != 0 && shift != before) sum *= exponential(before - shift);
      sum += block_sum<S, A>(z + j, count, shift);
      if (rows.smoothing) weighted += block_weighted<S, A>(z + j, class_weight ? class_weight + j : nullptr, count);
    }
    const int64_t target = rows.target[i] - rows.first_class;
    out[i] = largest;
    out[rows.num_rows + i] = A(sum);
    out[2 * rows.num_rows + i] = target >= 0 && target < num_classes ? widen(z[target]) : A(0);
    out[3 * rows.num_rows + i] = A(weighted);
  }
}

template <class S, class A>
static void grad_row(const S* z, S* out, int64_t count, const RowGradient<A>& row, const A* weight) {
  using Row = RowGradient<A>;
  const Row local = row;
  if (local.smooth == 0) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = Narrow<S>::from(Row::plain(local, widen(z[j])));
  } else if (weight == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = Narrow<S>::from(Row::smoothed(local, widen(z[j]), A(1)));
  } else {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = Narrow<S>::from(Row::smoothed(local, widen(z[j]), weight[j]));
  }
}

template <class S>
static void grad(const GradRows& rows, int64_t begin, int64_t end) {
  using A = Wide<S>;
  using Row = RowGradient<A>;
  const auto at = [](const void* vector, int64_t i) { return vector ? static_cast<const A*>(vector)[i] : A(0); };
  const A* weight = static_cast<const A*>(rows.class_weight);
  for (int64_t i = begin; i < end; ++i) {
    const S* z = static_cast<const S*>(rows.logits) + i * rows.row_stride;
    S* out = static_cast<S*>(rows.grad) + i * rows.grad_row_stride;
    const Row row{at(rows.lse, i), at(rows.softmax_coef, i), at(rows.target_coef, i), at(rows.smooth_coef, i)};
    if (Row::is_zero(row)) {
      for (int64_t j = 0; j < rows.num_classes; ++j) out[j] = Narrow<S>::from(A(0));
      continue;
    }
    const int64_t target = rows.target[i] - rows.first_class;
    const bool here = target >= 0 && target < rows.num_classes;
    // Read before the row is written: out may be z.
    const A target_logit = here ? A(widen(z[target])) : A(0);
    grad_row<S, A>(z, out, rows.num_classes, row, weight);
    if (here) {
      out[target] = Narrow<S>::from(Row::smoothed(row, target_logit, weight ? weight[target] : A(1)) - row.target);
    }
  }
}

extern const SoftmaxLoops softmax_loops = {
    {stats<float>, stats<Bf16>, stats<Fp16>, stats<double>},
    {grad<float>, grad<Bf16>, grad<Fp16>, grad<double>},
};

}  // namespace whale::cpu::WHALE_ISA
