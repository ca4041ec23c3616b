// moe_scatter, moe_collect, moe_scatter_backward: rows in memory that other processes write and read at the same time, so
// that rows which no route names are left alone. A token is one thread's, and so are its rows.
#include <cstring>

#include "rows.h"

namespace whale::cpu {
namespace {

void scatter(Tensor x, Tensor positions, Tensor out) {
  const char* op = "moe_scatter";
  check_rows(x, out, op);
  if (!rows_are_dense(x)) x = torch::stable::contiguous(x);
  positions = matrix_argument(positions, x.size(0), -1, ScalarType::Int, x, op, "positions");
  const Rows from = rows_of(x, op), to = rows_of(out, op);
  const auto cast = isa().bucket->cast[from.dtype][to.dtype];
  const int32_t* position = static_cast<const int32_t*>(positions.const_data_ptr());
  check_positions(position, positions.numel(), to.num_rows, op);
  for_each_token(positions, to.num_features, [&](int64_t token, int64_t begin, int64_t end) {
    for (int64_t route = begin; route < end; ++route) {
      if (position[route] < 0) continue;
      if (from.dtype == to.dtype) {
        std::memcpy(to.at(position[route]), from.at(token), to.bytes());
      } else {
        cast(from.at(token), to.at(position[route]), to.num_features, 1.0);
      }
    }
  });
}

void collect(Tensor y, Tensor positions, Tensor weights, Tensor out, Tensor rows) {
  const char* op = "moe_collect";
  check_rows(y, out, op);
  check_rows(y, rows, op);
  const ScalarType wide = wider_type(y, out);
  positions = matrix_argument(positions, out.size(0), -1, ScalarType::Int, y, op, "positions");
  weights = matrix_argument(weights, out.size(0), positions.size(1), wide, y, op, "weights");
  const Rows from = rows_of(y, op), to = rows_of(out, op), copies = rows_of(rows, op);
  STD_TORCH_CHECK(copies.num_rows == positions.numel() && copies.dtype == from.dtype && rows_are_dense(y), op,
                  ": rows are a copy of a row for each route");
  check_positions(static_cast<const int32_t*>(positions.const_data_ptr()), positions.numel(), from.num_rows, op);
  const auto sum = isa().permutation->combine[from.dtype][to.dtype];
  with_wide(wide, [&](auto type) {
    using A = decltype(type);
    const A* weight = static_cast<const A*>(weights.const_data_ptr());
    sum_of_routes(positions, weight, to, sum, [&](int64_t route, int32_t row) {
      std::memcpy(copies.at(route), from.at(row), from.bytes());
      return copies.at(route);
    });
  });
}

Tensor scatter_backward(Tensor dy, Tensor rows, Tensor positions, Tensor weights, Tensor out) {
  const char* op = "moe_scatter_backward";
  check_rows(dy, out, op);
  if (!rows_are_dense(dy)) dy = torch::stable::contiguous(dy);
  const ScalarType wide = wider_type(rows, dy);
  positions = matrix_argument(positions, dy.size(0), -1, ScalarType::Int, dy, op, "positions");
  weights = matrix_argument(weights, dy.size(0), positions.size(1), wide, dy, op, "weights");
  Tensor dweights = torch::stable::new_zeros(dy, {dy.size(0), positions.size(1)}, wide);
  const Rows grad = rows_of(dy, op), from = rows_of(rows, op), to = rows_of(out, op);
  STD_TORCH_CHECK(from.num_rows == positions.numel() && from.dtype == to.dtype && from.num_features == to.num_features,
                  op, ": rows are a copy of a row for each route");
  const int32_t* position = static_cast<const int32_t*>(positions.const_data_ptr());
  check_positions(position, positions.numel(), to.num_rows, op);
  const auto loop = isa().permutation->combine_backward[grad.dtype][from.dtype];
  with_wide(wide, [&](auto type) {
    using A = decltype(type);
    const A* weight = static_cast<const A*>(weights.const_data_ptr());
    A* dot = static_cast<A*>(dweights.mutable_data_ptr());
    for_each_token(positions, to.num_features, [&](int64_t token, int64_t begin, int64_t end) {
      for (int64_t route = begin; route < end; ++route) {
        if (position[route] < 0) continue;
        dot[route] = A(loop(grad.at(token), from.at(route), double(weight[route]), to.at(position[route]), to.num_features));
      }
    });
  });
  return dweights;
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("moe_scatter", TORCH_BOX(&whale::cpu::scatter));
  library.impl("moe_collect", TORCH_BOX(&whale::cpu::collect));
  library.impl("moe_scatter_backward", TORCH_BOX(&whale::cpu::scatter_backward));
}
