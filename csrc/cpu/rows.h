// Matrices by their rows, and what loops over tokens and rows share.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../common/arguments.h"
#include "dispatch.h"

namespace whale::cpu {

constexpr int64_t kGrain = 32768;  // elements a thread takes at least

inline int64_t grain_of(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)); }

// A matrix by its rows, whose elements are adjacent.
struct Rows {
  char* data;
  Dtype dtype;
  int64_t num_rows, num_features, row_bytes;

  char* at(int64_t row) const { return data + row * row_bytes; }
  int64_t bytes() const { return num_features * kElementBytes[dtype]; }
};

inline Rows rows_of(const Tensor& tensor, const char* op) {
  const Dtype dtype = dtype_of(tensor, op);
  return {static_cast<char*>(tensor.data_ptr()), dtype, tensor.size(0), tensor.size(1),
          tensor.stride(0) * kElementBytes[dtype]};
}

inline void check_positions(const int32_t* position, int64_t num_routes, int64_t num_rows, const char* op) {
  STD_TORCH_CHECK(num_routes <= INT32_MAX, op, ": routes are numbered in int32");
  int32_t largest = -1;
  for (int64_t route = 0; route < num_routes; ++route) largest = std::max(largest, position[route]);
  STD_TORCH_CHECK(largest < num_rows, op, ": a position is ", largest, " of ", num_rows, " rows");
}

// Calls each(token, begin, end) with the routes of every token.
template <class Each>
void for_each_token(const Tensor& positions, int64_t elements, const Each& each) {
  const int64_t k = positions.size(1);
  torch::stable::parallel_for(0, positions.size(0), grain_of(k * elements), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) each(token, token * k, (token + 1) * k);
  });
}

// Writes each token's weighted sum to its row of `to`: found(route, position) says where the row of a route lies.
template <class A, class Sum, class Found>
void sum_of_routes(const Tensor& positions, const A* weight, const Rows& to, Sum sum, const Found& found) {
  const int64_t k = positions.size(1);
  const int32_t* position = static_cast<const int32_t*>(positions.const_data_ptr());
  torch::stable::parallel_for(0, positions.size(0), grain_of(k * to.num_features), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<A[]> scratch(new A[to.num_features]);
    std::vector<const void*> rows(k);
    std::vector<A> of_rows(k, A(1));
    for (int64_t token = begin; token < end; ++token) {
      int64_t num_rows = 0;
      for (int64_t route = token * k; route < (token + 1) * k; ++route) {
        if (position[route] < 0) continue;
        rows[num_rows] = found(route, position[route]);
        if (weight != nullptr) of_rows[num_rows] = weight[route];
        ++num_rows;
      }
      sum(rows.data(), of_rows.data(), num_rows, to.at(token), scratch.get(), to.num_features);
    }
  });
}

template <class Call>
void with_wide(ScalarType wide, const Call& call) {
  return wide == ScalarType::Double ? call(double()) : call(float());
}

}  // namespace whale::cpu
