// Routes, kLanes tokens side by side: every step is one operation for all of them, whatever the number of experts.
// Compiled once for each instruction set (WHALE_ISA).
#include "../common/routing.h"
#include "loops.h"

namespace whale::cpu::WHALE_ISA {

constexpr int kLanes = kRouteLanes;

// Logits to probabilities in place, [count][kLanes].
template <class A>
static void softmax(A* __restrict z, int64_t count) {
  A largest[kLanes], sum[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) largest[lane] = negative_infinity(A());
  for (int64_t e = 0; e < count; ++e) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const A value = z[e * kLanes + lane];
      largest[lane] = value > largest[lane] ? value : largest[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    largest[lane] = finite_shift(largest[lane]);
    sum[lane] = 0;
  }
  for (int64_t e = 0; e < count; ++e) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const A value = exponential_to_88(z[e * kLanes + lane] - largest[lane]);
      z[e * kLanes + lane] = value;
      sum[lane] += value;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = A(1) / sum[lane];
  for (int64_t e = 0; e < count; ++e) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) z[e * kLanes + lane] *= sum[lane];
  }
}

// The lowest index of the largest key of each lane, whose key is then taken.
template <class Key>
static void choose(Key* __restrict keys, int64_t count, Key taken, int32_t* __restrict chosen) {
  Key largest[kLanes];
  int32_t index[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    largest[lane] = taken;
    index[lane] = 0;
  }
  for (int64_t e = 0; e < count; ++e) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const Key key = keys[e * kLanes + lane];
      index[lane] = key > largest[lane] ? int32_t(e) : index[lane];
      largest[lane] = key > largest[lane] ? key : largest[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    chosen[lane] = index[lane];
    keys[index[lane] * int64_t(kLanes) + lane] = taken;
  }
}

template <class S>
static void route(const RouteRows& rows, void* scratch, int64_t begin, int64_t end) {
  using A = Wide<S>;
  using Key = typename KeyOf<A>::type;
  const int64_t num_experts = rows.num_experts, in_group = num_experts / rows.groups, of_group = rows.k / rows.groups;
  A* z = static_cast<A*>(scratch);
  Key* keys = reinterpret_cast<Key*>(z + num_experts * kLanes);
  const A* bias = static_cast<const A*>(rows.bias);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int lanes = end - first < kLanes ? int(end - first) : kLanes;
    const S* logits = static_cast<const S*>(rows.logits) + first * rows.row_stride;
    for (int lane = 0; lane < kLanes; ++lane) {
      // Lanes past the last token repeat it.
      const S* row = logits + (lane < lanes ? lane : lanes - 1) * rows.row_stride;
      for (int64_t e = 0; e < num_experts; ++e) z[e * kLanes + lane] = widen(row[e]);
    }
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < num_experts * kLanes; ++i) keys[i] = KeyOf<A>::from(z[i]);
    }
    if (rows.sigmoid) {
#pragma omp simd
      for (int64_t i = 0; i < num_experts * kLanes; ++i) z[i] = sigmoid(z[i]);
    } else {
      for (int64_t group = 0; group < rows.groups; ++group) softmax(z + group * in_group * kLanes, in_group);
    }
    if (bias != nullptr) {
      for (int64_t e = 0; e < num_experts; ++e) {
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) {
          keys[e * kLanes + lane] = KeyOf<A>::from(z[e * kLanes + lane] + bias[e]);
        }
      }
    }
    for (int64_t slot = 0; slot < rows.k; ++slot) {
      const int64_t base = slot / of_group * in_group;
      int32_t chosen[kLanes];
      choose<Key>(keys + base * kLanes, in_group, KeyOf<A>::taken, chosen);
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t expert = base + chosen[lane], at = (first + lane) * rows.k + slot;
        rows.experts[at] = int32_t(expert);
        static_cast<A*>(rows.scores)[at] = z[expert * kLanes + lane];
      }
    }
    A* probs = static_cast<A*>(rows.probs) + first * num_experts;
    for (int lane = 0; lane < lanes; ++lane) {
      for (int64_t e = 0; e < num_experts; ++e) probs[lane * num_experts + e] = z[e * kLanes + lane];
    }
  }
}

// One token's gradient; returns whether its experts exist.
template <class S>
static bool route_backward(const RouteGradRows& rows, void* scratch, int64_t begin, int64_t end) {
  using A = Wide<S>;
  const int64_t num_experts = rows.num_experts, in_group = num_experts / rows.groups;
  A* __restrict grad = static_cast<A*>(scratch);
  bool exist = true;
  for (int64_t token = begin; token < end; ++token) {
    const A* __restrict p = static_cast<const A*>(rows.probs) + token * num_experts;
    S* __restrict out = static_cast<S*>(rows.dlogits) + token * num_experts;
    for (int64_t e = 0; e < num_experts; ++e) {
      grad[e] = rows.dprobs == nullptr ? A(0) : static_cast<const A*>(rows.dprobs)[token * num_experts + e];
    }
    for (int64_t at = token * rows.k; rows.dscores != nullptr && at < (token + 1) * rows.k; ++at) {
      const int32_t expert = rows.experts[at];
      if (expert >= num_experts) exist = false;
      if (expert >= 0 && expert < num_experts) grad[expert] += static_cast<const A*>(rows.dscores)[at];
    }
    if (rows.sigmoid) {
#pragma omp simd
      for (int64_t e = 0; e < num_experts; ++e) out[e] = Narrow<S>::from(sigmoid_gradient(p[e], grad[e]));
      continue;
    }
    for (int64_t first = 0; first < num_experts; first += in_group) {
      A dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t e = first; e < first + in_group; ++e) dot += p[e] * grad[e];
#pragma omp simd
      for (int64_t e = first; e < first + in_group; ++e) {
        out[e] = Narrow<S>::from(softmax_gradient(p[e], grad[e], dot));
      }
    }
  }
  return exist;
}

extern const RoutingLoops routing_loops = {
    {route<float>, route<Bf16>, route<Fp16>, route<double>},
    {route_backward<float>, route_backward<Bf16>, route_backward<Fp16>, route_backward<double>},
};

}  // namespace whale::cpu::WHALE_ISA
