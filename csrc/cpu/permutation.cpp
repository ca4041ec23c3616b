// moe_permute, moe_combine, moe_combine_backward, moe_chunk_sort on CPU. Threads share tokens or rows, each row being
// written by one of them, so results do not depend on their number.
#include <algorithm>
#include <cstring>

#include "rows.h"

namespace whale::cpu {
namespace {

// The route that names each row, or -1: rows are then written one after the other, which is faster than here and there.
std::vector<int32_t> routes_of_rows(const Tensor& positions, int64_t num_rows, const char* op) {
  std::vector<int32_t> routes(num_rows, -1);
  const int32_t* position = static_cast<const int32_t*>(positions.const_data_ptr());
  const int32_t num_routes = int32_t(positions.numel());
  check_positions(position, positions.numel(), num_rows, op);
  for (int32_t route = 0; route < num_routes; ++route) {
    if (position[route] >= 0) routes[position[route]] = route;
  }
  return routes;
}

// Calls write(row, route) for every row that a route names and zeroes the others.
template <class Write>
void for_each_row(const std::vector<int32_t>& routes, const Rows& to, const Write& write) {
  torch::stable::parallel_for(0, to.num_rows, grain_of(to.num_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (routes[row] < 0) {
        std::memset(to.at(row), 0, to.bytes());
      } else {
        write(row, routes[row]);
      }
    }
  });
}

void permute(Tensor x, Tensor positions, Tensor out) {
  const char* op = "moe_permute";
  check_rows(x, out, op);
  if (!rows_are_dense(x)) x = torch::stable::contiguous(x);
  positions = matrix_argument(positions, x.size(0), -1, ScalarType::Int, x, op, "positions");
  const Rows from = rows_of(x, op), to = rows_of(out, op);
  const auto cast = isa().bucket->cast[from.dtype][to.dtype];
  const int32_t k = int32_t(positions.size(1));
  for_each_row(routes_of_rows(positions, to.num_rows, op), to, [&](int64_t row, int32_t route) {
    if (from.dtype == to.dtype) {
      std::memcpy(to.at(row), from.at(route / k), to.bytes());
    } else {
      cast(from.at(route / k), to.at(row), to.num_features, 1.0);
    }
  });
}

void combine(Tensor y, Tensor positions, std::optional<Tensor> weights, Tensor out) {
  const char* op = "moe_combine";
  check_rows(y, out, op);
  if (!rows_are_dense(y)) y = torch::stable::contiguous(y);
  const ScalarType wide = wider_type(y, out);
  positions = matrix_argument(positions, out.size(0), -1, ScalarType::Int, y, op, "positions");
  weights = matrix_argument(weights, out.size(0), positions.size(1), wide, y, op, "weights");
  const Rows from = rows_of(y, op), to = rows_of(out, op);
  check_positions(static_cast<const int32_t*>(positions.const_data_ptr()), positions.numel(), from.num_rows, op);
  const auto sum = isa().permutation->combine[from.dtype][to.dtype];
  with_wide(wide, [&](auto type) {
    using A = decltype(type);
    const A* weight = static_cast<const A*>(pointer_or_null(weights));
    sum_of_routes(positions, weight, to, sum, [&](int64_t, int32_t row) { return from.at(row); });
  });
}

Tensor combine_backward(Tensor dy, Tensor y, Tensor positions, Tensor weights, Tensor drows) {
  const char* op = "moe_combine_backward";
  check_rows(y, drows, op);
  check_same_rows(y, drows, op);
  STD_TORCH_CHECK(dy.dim() == 2 && dy.size(1) == y.size(1), op, ": dy has not the features of y");
  check_device(dy, y, op);
  if (!rows_are_dense(y)) y = torch::stable::contiguous(y);
  if (!rows_are_dense(dy)) dy = torch::stable::contiguous(dy);
  const ScalarType wide = wider_type(y, dy);
  positions = matrix_argument(positions, dy.size(0), -1, ScalarType::Int, y, op, "positions");
  weights = matrix_argument(weights, dy.size(0), positions.size(1), wide, y, op, "weights");
  Tensor dweights = torch::stable::new_zeros(y, {dy.size(0), positions.size(1)}, wide);
  const Rows grad = rows_of(dy, op), from = rows_of(y, op), to = rows_of(drows, op);
  const auto routes = routes_of_rows(positions, to.num_rows, op);
  const int32_t k = int32_t(positions.size(1));
  const auto loop = isa().permutation->combine_backward[grad.dtype][from.dtype];
  with_wide(wide, [&](auto type) {
    using A = decltype(type);
    const A* weight = static_cast<const A*>(weights.const_data_ptr());
    A* dot = static_cast<A*>(dweights.mutable_data_ptr());
    for_each_row(routes, to, [&](int64_t row, int32_t route) {
      dot[route] = A(loop(grad.at(route / k), from.at(row), double(weight[route]), to.at(row), to.num_features));
    });
  });
  return dweights;
}

// Where a chunk begins before and after, in the order of the result.
struct Chunk {
  int64_t from, to, length;
};

std::vector<Chunk> chunks_of(const int64_t* lengths, int64_t sources, int64_t experts, bool inverse, int64_t num_rows) {
  // Stored are `outer` runs of `inner` chunks; the result has `inner` runs of `outer`.
  const int64_t outer = inverse ? experts : sources, inner = inverse ? sources : experts;
  const auto length_of = [&](int64_t o, int64_t i) { return inverse ? lengths[i * experts + o] : lengths[o * experts + i]; };
  std::vector<Chunk> chunks(outer * inner);
  int64_t row = 0;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t length = length_of(o, i);
      STD_TORCH_CHECK(length >= 0 && length <= num_rows - row, "moe_chunk_sort: chunks do not fit ", num_rows, " rows");
      chunks[i * outer + o] = {row, 0, length};
      row += length;
    }
  }
  row = 0;
  for (Chunk& chunk : chunks) {
    chunk.to = row;
    row += chunk.length;
  }
  return chunks;
}

void chunk_sort(Tensor x, Tensor lengths, bool inverse, Tensor out) {
  const char* op = "moe_chunk_sort";
  check_rows(x, out, op);
  check_same_rows(x, out, op);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  lengths = matrix_argument(lengths, -1, -1, ScalarType::Long, x, op, "lengths");
  const Rows from = rows_of(x, op), to = rows_of(out, op);
  const auto chunks = chunks_of(static_cast<const int64_t*>(lengths.const_data_ptr()), lengths.size(0), lengths.size(1),
                                inverse, from.num_rows);
  const int64_t sorted = chunks.empty() ? 0 : chunks.back().to + chunks.back().length;
  const int64_t bytes = to.bytes();
  torch::stable::parallel_for(0, sorted, grain_of(to.num_features), [&](int64_t begin, int64_t end) {
    auto chunk = std::upper_bound(chunks.begin(), chunks.end(), begin,
                                  [](int64_t row, const Chunk& c) { return row < c.to + c.length; });
    for (int64_t row = begin; row < end; ++chunk) {
      const int64_t stop = std::min(end, chunk->to + chunk->length);
      std::memcpy(to.data + row * bytes, from.data + (chunk->from + row - chunk->to) * bytes, (stop - row) * bytes);
      row = stop;
    }
  });
  if (to.num_rows > sorted) std::memset(to.data + sorted * bytes, 0, (to.num_rows - sorted) * bytes);
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("moe_permute", TORCH_BOX(&whale::cpu::permute));
  library.impl("moe_combine", TORCH_BOX(&whale::cpu::combine));
  library.impl("moe_combine_backward", TORCH_BOX(&whale::cpu::combine_backward));
  library.impl("moe_chunk_sort", TORCH_BOX(&whale::cpu::chunk_sort));
}
