// moe_activate and moe_activate_backward on CUDA: a warp's threads take adjacent columns, and a thread all rows of its
// block, so that sums over rows have a fixed order: by block first, then over blocks.
#include "../common/activation_arguments.h"

#include <algorithm>

#include "launch.h"

namespace whale::cuda {
namespace {

constexpr int kColumns = 128;  // of a block, one a thread
constexpr int kRows = 32;      // of a block

template <class F, class S>
__global__ void __launch_bounds__(kColumns, kNoSpills)
    activate_kernel(const S* h, const S* u, S* out, int64_t num_rows, int64_t num_columns) {
  using A = Wide<S>;
  const int64_t j = int64_t(blockIdx.x) * kColumns + threadIdx.x;
  if (j >= num_columns) return;
  const int64_t first = int64_t(blockIdx.y) * kRows, end = min(first + kRows, num_rows);
  for (int64_t i = first; i < end; ++i) {
    const int64_t at = i * num_columns + j;
    A value = F::of(A(widen(h[at]))).value;
    if (u != nullptr) value *= A(widen(u[at]));
    out[at] = Narrow<S>::from(value);
  }
}

template <class F, class S>
__global__ void __launch_bounds__(kColumns, kNoSpills)
    activate_backward_kernel(S* grad, const S* h, const S* u, S* du, Wide<S>* parts, Wide<S>* du_parts, int64_t num_rows,
                             int64_t num_columns) {
  using A = Wide<S>;
  const int64_t j = int64_t(blockIdx.x) * kColumns + threadIdx.x;
  if (j >= num_columns) return;
  const int64_t first = int64_t(blockIdx.y) * kRows, end = min(first + kRows, num_rows);
  A sum = 0, du_sum = 0;
  for (int64_t i = first; i < end; ++i) {
    const int64_t at = i * num_columns + j;
    const Activated<A> f = F::of(A(widen(h[at])));
    const A above = A(widen(grad[at]));
    A g = above * f.slope;
    if (u != nullptr) {
      g *= A(widen(u[at]));
      du[at] = Narrow<S>::from(above * f.value);
      du_sum += above * f.value;
    }
    grad[at] = Narrow<S>::from(g);
    sum += g;
  }
  if (parts != nullptr) parts[blockIdx.y * num_columns + j] = sum;
  if (du_parts != nullptr) du_parts[blockIdx.y * num_columns + j] = du_sum;
}

template <class A>
__global__ void __launch_bounds__(kColumns) add_parts_kernel(const A* parts, A* sums, int64_t num_parts, int64_t num_columns) {
  const int64_t j = int64_t(blockIdx.x) * kColumns + threadIdx.x;
  if (j >= num_columns) return;
  A sum = 0;
  for (int64_t part = 0; part < num_parts; ++part) sum += parts[part * num_columns + j];
  sums[j] += sum;
}

template <class Call>
void with_function(int64_t function, Call call) {
  switch (function) {
    case 0: return call(Gelu());
    case 1: return call(GeluTanh());
    case 2: return call(Relu());
    default: return call(Silu());
  }
}

struct Grid {
  dim3 blocks;
  int64_t num_parts;
};

Grid grid_of(const Tensor& h, const char* op) {
  const int64_t parts = (h.size(0) + kRows - 1) / kRows, columns = (h.size(1) + kColumns - 1) / kColumns;
  STD_TORCH_CHECK(parts <= 65535, op, ": more than ", 65535 * kRows, " rows");
  return {dim3(uint32_t(columns), uint32_t(parts)), parts};
}

void activate(Tensor h, std::optional<Tensor> u, int64_t function, Tensor out) {
  const char* op = "moe_activate";
  check_activation(h, out, u, function, op);
  if (h.numel() == 0) return;
  const Grid grid = grid_of(h, op);
  with_type(dtype_of(h, op), [&](auto type) {
    using S = decltype(type);
    with_function(function, [&](auto f) {
      activate_kernel<decltype(f), S><<<grid.blocks, kColumns, 0, current_stream(h)>>>(
          static_cast<const S*>(h.data_ptr()), data_or_null<S>(u), static_cast<S*>(out.data_ptr()), h.size(0), h.size(1));
    });
  });
  check_launch(op);
}

template <class A>
void add_parts(const Tensor& parts, const std::optional<Tensor>& sums, const Grid& grid) {
  if (!sums.has_value()) return;
  add_parts_kernel<A><<<grid.blocks.x, kColumns, 0, current_stream(parts)>>>(
      static_cast<const A*>(parts.data_ptr()), static_cast<A*>(sums->data_ptr()), grid.num_parts, parts.size(1));
}

void activate_backward(Tensor grad, Tensor h, std::optional<Tensor> u, int64_t function, std::optional<Tensor> du,
                       std::optional<Tensor> dbias, std::optional<Tensor> du_bias) {
  const char* op = "moe_activate_backward";
  const ScalarType wide = check_activation_backward(grad, h, u, function, du, dbias, du_bias, op);
  if (grad.numel() == 0) return;
  const Grid grid = grid_of(grad, op);
  const int64_t kept = dbias.has_value() ? grid.num_parts : 0, du_kept = du_bias.has_value() ? grid.num_parts : 0;
  Tensor parts = torch::stable::new_empty(grad, {kept, grad.size(1)}, wide);
  Tensor du_parts = torch::stable::new_empty(grad, {du_kept, grad.size(1)}, wide);
  with_type(dtype_of(grad, op), [&](auto type) {
    using S = decltype(type);
    using A = Wide<S>;
    with_function(function, [&](auto f) {
      activate_backward_kernel<decltype(f), S><<<grid.blocks, kColumns, 0, current_stream(grad)>>>(
          static_cast<S*>(grad.data_ptr()), static_cast<const S*>(h.data_ptr()), data_or_null<S>(u), data_or_null<S>(du),
          kept ? static_cast<A*>(parts.data_ptr()) : nullptr, du_kept ? static_cast<A*>(du_parts.data_ptr()) : nullptr,
          grad.size(0), grad.size(1));
    });
    add_parts<A>(parts, dbias, grid);
    add_parts<A>(du_parts, du_bias, grid);
  });
  check_launch(op);
}

}  // namespace
}  // namespace whale::cuda

STABLE_TORCH_LIBRARY_IMPL(whale, CUDA, library) {
  library.impl("moe_activate", TORCH_BOX(&whale::cuda::activate));
  library.impl("moe_activate_backward", TORCH_BOX(&whale::cuda::activate_backward));
}
