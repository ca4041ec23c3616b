// Matrices by their rows, and what loops over tokens and rows share.
#pragma once

#include <algorithm>

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

template <class Call>
void with_wide(ScalarType wide, const Call& call) {
  return wide == ScalarType::Double ? call(double()) : call(float());
}

}  // namespace whale::cpu
