// moe_route, moe_route_backward, moe_positions on CPU. Threads share tokens; a route's number within its expert is the
// same whichever thread finds it.
#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>

#include "../common/arguments.h"
#include "dispatch.h"

namespace whale::cpu {
namespace {

int64_t tokens_per_grain(int64_t num_experts) { return std::max<int64_t>(kRouteLanes, 16384 / num_experts); }

std::tuple<Tensor, Tensor, Tensor> route(Tensor logits, int64_t k, bool sigmoid, std::optional<Tensor> bias,
                                         int64_t groups) {
  check_route(logits, k, groups, "moe_route");
  const Dtype dtype = dtype_of(logits, "moe_route");
  const ScalarType wide = statistics_type(logits);
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  bias = vector_argument(bias, num_experts, wide, logits, "moe_route", "bias");
  Tensor scores = torch::stable::new_empty(logits, {num_tokens, k}, wide);
  Tensor experts = torch::stable::new_empty(logits, {num_tokens, k}, ScalarType::Int);
  Tensor probs = torch::stable::new_empty(logits, {num_tokens, num_experts}, wide);
  const RouteRows rows{logits.const_data_ptr(), logits.stride(0), num_experts, k, groups, sigmoid, pointer_or_null(bias),
                       scores.mutable_data_ptr(), static_cast<int32_t*>(experts.mutable_data_ptr()),
                       probs.mutable_data_ptr()};
  const auto loop = isa().routing->route[dtype];
  torch::stable::parallel_for(0, num_tokens, tokens_per_grain(num_experts), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[num_experts * kRouteLanes * 16]);
    loop(rows, scratch.get(), begin, end);
  });
  return {scores, experts, probs};
}

Tensor route_backward(Tensor probs, Tensor experts, std::optional<Tensor> dscores, std::optional<Tensor> dprobs,
                      bool sigmoid, int64_t groups, ScalarType type) {
  const char* op = "moe_route_backward";
  check_route(probs, experts.dim() == 2 ? experts.size(1) : 0, groups, op);
  const int64_t num_tokens = probs.size(0), num_experts = probs.size(1), k = experts.size(1);
  Tensor dlogits = torch::stable::new_empty(probs, {num_tokens, num_experts}, type);
  const ScalarType wide = statistics_type(dlogits);
  probs = matrix_argument(probs, num_tokens, num_experts, wide, probs, op, "probs");
  experts = matrix_argument(experts, num_tokens, k, ScalarType::Int, probs, op, "experts");
  dscores = matrix_argument(dscores, num_tokens, k, wide, probs, op, "dscores");
  dprobs = matrix_argument(dprobs, num_tokens, num_experts, wide, probs, op, "dprobs");
  const RouteGradRows rows{probs.const_data_ptr(), static_cast<const int32_t*>(experts.const_data_ptr()),
                           pointer_or_null(dscores), pointer_or_null(dprobs), num_experts, k, groups, sigmoid,
                           dlogits.mutable_data_ptr()};
  const auto loop = isa().routing->route_backward[dtype_of(dlogits, op)];
  std::atomic<bool> exist{true};
  torch::stable::parallel_for(0, num_tokens, tokens_per_grain(num_experts), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[num_experts * 8]);
    if (!loop(rows, scratch.get(), begin, end)) exist = false;
  });
  STD_TORCH_CHECK(exist, op, ": an expert is not below ", num_experts);
  return dlogits;
}

// Routes in the order in which they take their turns, as indices into [tokens, k].
struct Turns {
  int64_t num_tokens, k;
  bool slot_major;
  const int64_t* order;  // null is as they are

  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    if (begin == end) return;
    const int64_t inner = slot_major ? num_tokens : k;
    int64_t outer_at = begin / inner, inner_at = begin % inner;
    for (int64_t turn = begin; turn < end; ++outer_at, inner_at = 0) {
      for (; inner_at < inner && turn < end; ++inner_at, ++turn) {
        const int64_t token = slot_major ? inner_at : outer_at, slot = slot_major ? outer_at : inner_at;
        visit((order == nullptr ? token : order[token]) * k + slot);
      }
    }
  }
};

void check_order(const int64_t* order, int64_t num_tokens) {
  const std::unique_ptr<bool[]> seen(new bool[num_tokens]());
  for (int64_t i = 0; i < num_tokens; ++i) {
    STD_TORCH_CHECK(order[i] >= 0 && order[i] < num_tokens && !seen[order[i]],
                    "moe_positions: order is no permutation of ", num_tokens, " tokens");
    seen[order[i]] = true;
  }
}

// Kept routes of each expert, and the row of the first.
void place_experts(int64_t num_experts, const int64_t* counts, const int64_t* capacity, std::optional<int64_t> slots,
                   int64_t* kept, int64_t* first) {
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    STD_TORCH_CHECK(capacity == nullptr || capacity[e] >= 0, "moe_positions: a capacity is negative");
    kept[e] = capacity == nullptr ? counts[e] : std::min(counts[e], capacity[e]);
    if (slots.has_value()) kept[e] = std::min(kept[e], *slots);
    first[e] = slots.has_value() ? e * *slots : row;
    row += kept[e];
  }
}

std::tuple<Tensor, Tensor, Tensor> positions(Tensor experts, int64_t num_experts, std::optional<Tensor> capacity,
                                             std::optional<int64_t> slots, bool slot_major,
                                             std::optional<Tensor> order) {
  const char* op = "moe_positions";
  check_experts(experts, num_experts, slots, op);
  const int64_t num_tokens = experts.size(0), k = experts.size(1), num_routes = num_tokens * k;
  experts = matrix_argument(experts, num_tokens, k, ScalarType::Int, experts, op, "experts");
  capacity = vector_argument(capacity, num_experts, ScalarType::Long, experts, op, "capacity");
  order = vector_argument(order, num_tokens, ScalarType::Long, experts, op, "order");
  if (order.has_value()) check_order(static_cast<const int64_t*>(order->const_data_ptr()), num_tokens);
  Tensor result = torch::stable::new_empty(experts, {num_tokens, k});
  Tensor count_of = torch::stable::new_zeros(experts, {num_experts}, ScalarType::Long);
  Tensor kept_of = torch::stable::new_empty(experts, {num_experts}, ScalarType::Long);
  const int32_t* expert = static_cast<const int32_t*>(experts.const_data_ptr());
  int32_t* position = static_cast<int32_t*>(result.mutable_data_ptr());
  int64_t* counts = static_cast<int64_t*>(count_of.mutable_data_ptr());
  int64_t* kept = static_cast<int64_t*>(kept_of.mutable_data_ptr());
  const Turns turns{num_tokens, k, slot_major, static_cast<const int64_t*>(pointer_or_null(order))};

  // Each block of turns counts its routes, learns how many came before it, and numbers its own.
  const int64_t num_blocks = std::clamp<int64_t>(num_routes / 16384, 1, 64);
  const auto begin_of = [&](int64_t block) { return num_routes * block / num_blocks; };
  std::vector<int64_t> next(num_blocks * num_experts), first(num_experts);
  std::atomic<bool> exist{true};
  torch::stable::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t* mine = next.data() + block * num_experts;
      turns.visit(begin_of(block), begin_of(block + 1), [&](int64_t route) {
        if (expert[route] >= num_experts) {
          exist = false;
        } else if (expert[route] >= 0) {
          ++mine[expert[route]];
        }
      });
    }
  });
  STD_TORCH_CHECK(exist, op, ": an expert is not below ", num_experts);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t e = 0; e < num_experts; ++e) counts[e] += next[block * num_experts + e];
  }
  place_experts(num_experts, counts, capacity ? static_cast<const int64_t*>(capacity->const_data_ptr()) : nullptr, slots,
                kept, first.data());
  std::vector<int64_t> row(first);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t here = next[block * num_experts + e];
      next[block * num_experts + e] = row[e];
      row[e] += here;
    }
  }
  torch::stable::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t* mine = next.data() + block * num_experts;
      turns.visit(begin_of(block), begin_of(block + 1), [&](int64_t route) {
        const int32_t e = expert[route];
        const int64_t at = e < 0 ? 0 : mine[e]++;
        position[route] = e >= 0 && at < first[e] + kept[e] ? int32_t(at) : -1;
      });
    }
  });
  return {result, count_of, kept_of};
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("moe_route", TORCH_BOX(&whale::cpu::route));
  library.impl("moe_route_backward", TORCH_BOX(&whale::cpu::route_backward));
  library.impl("moe_positions", TORCH_BOX(&whale::cpu::positions));
}
