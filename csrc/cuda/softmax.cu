// softmax_stats, softmax_grad, softmax_grad_ on CUDA. A block reads a row once for its statistics; threads combine in a
// fixed order, so results are the same every time.
#include "../common/softmax.h"

#include <algorithm>

#include "launch.h"

namespace whale::cuda {
namespace {

constexpr int kMaxThreads = 256;

template <class S, class A>
struct StatsArguments {
  const S* logits;
  int64_t row_stride, num_rows, num_classes, first_class;
  const int64_t* target;
  const A* class_weight;  // null is ones
  bool smoothing, aligned;
  A* stats;
};

template <class S, class A>
struct GradArguments {
  const S* logits;
  int64_t row_stride, num_classes, first_class;
  const int64_t* target;
  const A *lse, *softmax_coef, *target_coef;
  const A* smooth_coef;   // null is zeros
  const A* class_weight;  // null is ones
  bool aligned;
  S* grad;  // may be logits
  int64_t grad_row_stride;
};

// What a thread has seen of a row: the running maximum, the sum relative to it, the weighted sum.
template <class A>
struct Running {
  A largest, sum, weighted;
};

template <class A>
__device__ __forceinline__ void raise(Running<A>& seen, A largest) {
  if (largest > seen.largest) {
    if (seen.sum != A(0)) seen.sum *= exponential_to_88(finite_shift(seen.largest) - finite_shift(largest));
    seen.largest = largest;
  }
}

template <class A>
__device__ __forceinline__ void merge(Running<A>& seen, Running<A> other) {
  raise(seen, other.largest);
  raise(other, seen.largest);
  seen.sum += other.sum;
  seen.weighted += other.weighted;
}

template <class A>
__device__ __forceinline__ Running<A> shuffled(const Running<A>& seen, int distance) {
  return {__shfl_down_sync(0xffffffffu, seen.largest, distance), __shfl_down_sync(0xffffffffu, seen.sum, distance),
          __shfl_down_sync(0xffffffffu, seen.weighted, distance)};
}

template <class S, class A, int N>
__device__ __forceinline__ void add(Running<A>& seen, const S (&z)[N], const A* weight, bool smoothing) {
  A largest = negative_infinity(A());
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const A value = widen(z[e]);
    largest = value > largest ? value : largest;
  }
  raise(seen, largest);
  const A shift = finite_shift(seen.largest);
#pragma unroll
  for (int e = 0; e < N; ++e) seen.sum += exponential_to_88(A(widen(z[e])) - shift);
  if (smoothing) {
#pragma unroll
    for (int e = 0; e < N; ++e) seen.weighted += (weight ? weight[e] : A(1)) * A(widen(z[e]));
  }
}

template <class S, class A>
__global__ void __launch_bounds__(kMaxThreads) stats_kernel(const StatsArguments<S, A> arguments) {
  constexpr int N = 16 / sizeof(S);
  __shared__ Running<A> of_warp[kMaxThreads / kWarp];
  const int64_t row = blockIdx.x;
  const S* z = arguments.logits + row * arguments.row_stride;
  const A* weight = arguments.class_weight;
  Running<A> seen{negative_infinity(A()), A(0), A(0)};
  int64_t done = 0;
  if (arguments.aligned) {
    const int64_t vectors = arguments.num_classes / N;
    for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      const Vector<S, N> in = reinterpret_cast<const Vector<S, N>*>(z)[v];
      add(seen, in.at, weight ? weight + v * N : nullptr, arguments.smoothing);
    }
    done = vectors * N;
  }
  for (int64_t j = done + threadIdx.x; j < arguments.num_classes; j += blockDim.x) {
    const S one[1] = {z[j]};
    add(seen, one, weight ? weight + j : nullptr, arguments.smoothing);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) merge(seen, shuffled(seen, distance));
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = seen;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < blockDim.x / kWarp; ++warp) merge(seen, of_warp[warp]);
  const int64_t target = arguments.target[row] - arguments.first_class;
  const bool here = target >= 0 && target < arguments.num_classes;
  arguments.stats[row] = seen.largest;
  arguments.stats[arguments.num_rows + row] = seen.sum;
  arguments.stats[2 * arguments.num_rows + row] = here ? A(widen(z[target])) : A(0);
  arguments.stats[3 * arguments.num_rows + row] = seen.weighted;
}

template <class S, class A>
__device__ __forceinline__ S gradient(const RowGradient<A>& row, S z, const A* weight, int64_t j, int64_t target) {
  A value = RowGradient<A>::plain(row, widen(z));
  if (row.smooth != A(0)) value -= row.smooth * (weight ? weight[j] : A(1));
  if (j == target) value -= row.target;
  return Narrow<S>::from(value);
}

template <class S, class A>
__global__ void __launch_bounds__(kMaxThreads) grad_kernel(const GradArguments<S, A> arguments) {
  constexpr int N = 16 / sizeof(S);
  const int64_t i = blockIdx.x;
  const S* z = arguments.logits + i * arguments.row_stride;
  S* out = arguments.grad + i * arguments.grad_row_stride;
  const RowGradient<A> row{arguments.lse[i], arguments.softmax_coef[i], arguments.target_coef[i],
                           arguments.smooth_coef ? arguments.smooth_coef[i] : A(0)};
  const bool zero = RowGradient<A>::is_zero(row);
  const int64_t target = arguments.target[i] - arguments.first_class;
  const int64_t first = int64_t(blockIdx.y) * blockDim.x + threadIdx.x, step = int64_t(gridDim.y) * blockDim.x;
  const S nothing = Narrow<S>::from(A(0));
  int64_t done = 0;
  if (arguments.aligned) {
    const int64_t vectors = arguments.num_classes / N;
    for (int64_t v = first; v < vectors; v += step) {
      const Vector<S, N> in = reinterpret_cast<const Vector<S, N>*>(z)[v];
      Vector<S, N> result;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        result.at[e] = zero ? nothing : gradient(row, in.at[e], arguments.class_weight, v * N + e, target);
      }
      reinterpret_cast<Vector<S, N>*>(out)[v] = result;
    }
    done = vectors * N;
  }
  for (int64_t j = done + first; j < arguments.num_classes; j += step) {
    out[j] = zero ? nothing : gradient(row, z[j], arguments.class_weight, j, target);
  }
}

int threads_for(int64_t work) {
  return int(std::clamp<int64_t>((work + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
}

// Whether every row can be read and written in 16-byte accesses.
bool rows_aligned(const void* memory, int64_t row_stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(memory) % 16 == 0 && row_stride * element_bytes % 16 == 0;
}

template <class A>
const A* typed(const std::optional<Tensor>& tensor) {
  return static_cast<const A*>(pointer_or_null(tensor));
}

Tensor stats(Tensor logits, const Tensor& target, int64_t first_class, const std::optional<Tensor>& class_weight,
             bool smoothing) {
  const char* op = "softmax_stats";
  check_logits(logits, target, op);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const ScalarType wide = statistics_type(logits);
  const int64_t num_rows = logits.size(0), num_classes = logits.size(1);
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  const Tensor targets = vector_argument(target, num_rows, ScalarType::Long, logits, op, "target");
  const auto weight = vector_argument(class_weight, num_classes, wide, logits, op, "class_weight");
  Tensor result = torch::stable::new_empty(logits, {4, num_rows}, wide);
  if (num_rows == 0) return result;
  with_type(dtype_of(logits, op), [&](auto type) {
    using S = decltype(type);
    using A = Wide<S>;
    const StatsArguments<S, A> arguments{static_cast<const S*>(logits.data_ptr()),
                                         logits.stride(0),
                                         num_rows,
                                         num_classes,
                                         first_class,
                                         static_cast<const int64_t*>(targets.data_ptr()),
                                         typed<A>(weight),
                                         smoothing,
                                         rows_aligned(logits.data_ptr(), logits.stride(0), sizeof(S)),
                                         static_cast<A*>(result.data_ptr())};
    const int threads = threads_for(num_classes * int64_t(sizeof(S)) / 16);
    stats_kernel<S, A><<<unsigned(num_rows), threads, 0, current_stream(logits)>>>(arguments);
    check_launch(op);
  });
  return result;
}

// logits and grad have dense rows and may be one tensor.
void write_grad(const Tensor& logits, const Tensor& grad, const Tensor& lse, const Tensor& target, int64_t first_class,
                const Tensor& softmax_coef, const Tensor& target_coef, const std::optional<Tensor>& smooth_coef,
                const std::optional<Tensor>& class_weight) {
  const char* op = "softmax_grad";
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const ScalarType wide = statistics_type(logits);
  const int64_t num_rows = logits.size(0), num_classes = logits.size(1);
  const Tensor targets = vector_argument(target, num_rows, ScalarType::Long, logits, op, "target");
  const Tensor lses = vector_argument(lse, num_rows, wide, logits, op, "lse");
  const Tensor softmax = vector_argument(softmax_coef, num_rows, wide, logits, op, "softmax_coef");
  const Tensor of_target = vector_argument(target_coef, num_rows, wide, logits, op, "target_coef");
  const auto smooth = vector_argument(smooth_coef, num_rows, wide, logits, op, "smooth_coef");
  const auto weight = vector_argument(class_weight, num_classes, wide, logits, op, "class_weight");
  if (num_rows == 0 || num_classes == 0) return;
  with_type(dtype_of(logits, op), [&](auto type) {
    using S = decltype(type);
    using A = Wide<S>;
    const GradArguments<S, A> arguments{static_cast<const S*>(logits.data_ptr()),
                                        logits.stride(0),
                                        num_classes,
                                        first_class,
                                        static_cast<const int64_t*>(targets.data_ptr()),
                                        static_cast<const A*>(lses.data_ptr()),
                                        static_cast<const A*>(softmax.data_ptr()),
                                        static_cast<const A*>(of_target.data_ptr()),
                                        typed<A>(smooth),
                                        typed<A>(weight),
                                        rows_aligned(logits.data_ptr(), logits.stride(0), sizeof(S)) &&
                                            rows_aligned(grad.data_ptr(), grad.stride(0), sizeof(S)),
                                        static_cast<S*>(grad.data_ptr()),
                                        grad.stride(0)};
    const int64_t vectors = std::max<int64_t>(1, num_classes * int64_t(sizeof(S)) / 16);
    const int threads = threads_for(vectors);
    const dim3 blocks(unsigned(num_rows), unsigned(std::min<int64_t>(64, (vectors + 4 * threads - 1) / (4 * threads))));
    grad_kernel<S, A><<<blocks, threads, 0, current_stream(logits)>>>(arguments);
    check_launch(op);
  });
}

Tensor grad(Tensor logits, const Tensor& lse, const Tensor& target, int64_t first_class, const Tensor& softmax_coef,
            const Tensor& target_coef, const std::optional<Tensor>& smooth_coef,
            const std::optional<Tensor>& class_weight) {
  check_logits(logits, target, "softmax_grad");
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  Tensor result = torch::stable::new_empty(logits, logits.sizes());
  write_grad(logits, result, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
  return result;
}

void grad_inplace(Tensor logits, const Tensor& lse, const Tensor& target, int64_t first_class, const Tensor& softmax_coef,
                  const Tensor& target_coef, const std::optional<Tensor>& smooth_coef,
                  const std::optional<Tensor>& class_weight) {
  check_logits(logits, target, "softmax_grad_");
  if (rows_are_dense(logits)) {
    write_grad(logits, logits, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
    return;
  }
  const Tensor result = grad(logits, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
  torch::stable::copy_(logits, result);
}

}  // namespace
}  // namespace whale::cuda

STABLE_TORCH_LIBRARY_IMPL(whale, CUDA, library) {
  library.impl("softmax_stats", TORCH_BOX(&whale::cuda::stats));
  library.impl("softmax_grad", TORCH_BOX(&whale::cuda::grad));
  library.impl("softmax_grad_", TORCH_BOX(&whale::cuda::grad_inplace));
}
