// moe_permute, moe_combine, moe_combine_backward, moe_chunk_sort on CUDA: a block for each token or row, 16 bytes a thread,
// sums in a fixed order.
#include "../common/cast.h"

#include <algorithm>

#include "launch.h"

namespace whale::cuda {
namespace {

constexpr int kMaxThreads = 256;

// A matrix by its rows, whose elements are adjacent.
template <class T>
struct Rows {
  T* data;
  int64_t num_rows, num_features, row_stride;

  __device__ __forceinline__ T* at(int64_t row) const { return data + row * row_stride; }
};

template <class T>
Rows<T> rows_of(const Tensor& tensor) {
  return {static_cast<T*>(tensor.data_ptr()), tensor.size(0), tensor.size(1), tensor.stride(0)};
}

// Which rows each token has routes to, -1 being none.
struct Routes {
  const int32_t* position;
  int64_t k;

  __device__ __forceinline__ int64_t row(int64_t route, int64_t num_rows) const {
    const int64_t row = position[route];
    if (row >= num_rows) __trap();
    return row;
  }
};

// Calls vector(i) for every i that begins N elements of a row of count and single(i) for the rest, by the threads of a
// block; all are single where an address is not aligned.
template <int N, class OfVector, class OfSingle>
__device__ __forceinline__ void for_each_element(int64_t count, bool aligned, const OfVector& vector,
                                                 const OfSingle& single) {
  const int64_t whole = aligned ? count / N * N : 0;
  for (int64_t i = int64_t(threadIdx.x) * N; i < whole; i += int64_t(blockDim.x) * N) vector(i);
  for (int64_t i = whole + threadIdx.x; i < count; i += blockDim.x) single(i);
}

template <class T, int N>
__device__ __forceinline__ const Vector<T, N>& vector_at(const T* pointer) {
  return *reinterpret_cast<const Vector<T, N>*>(pointer);
}
template <class T, int N>
__device__ __forceinline__ Vector<T, N>& vector_at(T* pointer) {
  return *reinterpret_cast<Vector<T, N>*>(pointer);
}

template <class From, class To>
__global__ void __launch_bounds__(kMaxThreads)
    permute_kernel(const Rows<From> from, const Rows<To> to, const Routes routes, uint8_t* named) {
  constexpr int N = kVector<From, To>;
  using Cast = ScaledCast<To, From>;
  const Cast cast = Cast::with(1.0);
  const int64_t token = blockIdx.x;
  const From* x = from.at(token);
  for (int64_t route = token * routes.k; route < (token + 1) * routes.k; ++route) {
    const int64_t row = routes.row(route, to.num_rows);
    if (row < 0) continue;
    if (threadIdx.x == 0) named[row] = 1;
    To* out = to.at(row);
    for_each_element<N>(
        to.num_features, aligned<From, N>(x) && aligned<To, N>(out),
        [&](int64_t i) {
          const Vector<From, N> in = vector_at<From, N>(x + i);
          Vector<To, N> result;
#pragma unroll
          for (int e = 0; e < N; ++e) result.at[e] = Cast::apply(cast, in.at[e]);
          vector_at<To, N>(out + i) = result;
        },
        [&](int64_t i) { out[i] = Cast::apply(cast, x[i]); });
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) zero_others_kernel(const Rows<T> rows, const uint8_t* named) {
  constexpr int N = 16 / sizeof(T);
  const int64_t row = blockIdx.x;
  if (named[row]) return;
  T* out = rows.at(row);
  for_each_element<N>(
      rows.num_features, aligned<T, N>(out), [&](int64_t i) { vector_at<T, N>(out + i) = Vector<T, N>{}; },
      [&](int64_t i) { out[i] = T{}; });
}

template <class S, class T, class A>
__global__ void __launch_bounds__(kMaxThreads, kNoSpills)
    combine_kernel(const Rows<S> from, const Rows<T> to, const Routes routes, const A* weights, bool rows_aligned) {
  constexpr int N = kVector<S, T>;
  const int64_t token = blockIdx.x, begin = token * routes.k, end = begin + routes.k;
  T* out = to.at(token);
  for_each_element<N>(
      to.num_features, rows_aligned && aligned<T, N>(out),
      [&](int64_t i) {
        A sum[N] = {};
        for (int64_t route = begin; route < end; ++route) {
          const int64_t row = routes.row(route, from.num_rows);
          if (row < 0) continue;
          const A weight = weights ? weights[route] : A(1);
          const Vector<S, N> in = vector_at<S, N>(from.at(row) + i);
#pragma unroll
          for (int e = 0; e < N; ++e) sum[e] += weight * A(widen(in.at[e]));
        }
        Vector<T, N> result;
#pragma unroll
        for (int e = 0; e < N; ++e) result.at[e] = Narrow<T>::from(sum[e]);
        vector_at<T, N>(out + i) = result;
      },
      [&](int64_t i) {
        A sum = 0;
        for (int64_t route = begin; route < end; ++route) {
          const int64_t row = routes.row(route, from.num_rows);
          if (row >= 0) sum += (weights ? weights[route] : A(1)) * A(widen(from.at(row)[i]));
        }
        out[i] = Narrow<T>::from(sum);
      });
}

template <class A>
__device__ __forceinline__ A block_sum(A value, A* of_warp) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  __syncthreads();  // of_warp may still be read from the sum before
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  A sum = 0;
  for (int warp = 0; warp < int(blockDim.x) / kWarp; ++warp) sum += of_warp[warp];
  return sum;
}

template <class G, class S, class A>
__global__ void __launch_bounds__(kMaxThreads)
    combine_backward_kernel(const Rows<G> grads, const Rows<S> from, const Rows<S> to, const Routes routes,
                            const A* weights, A* dweights, uint8_t* named) {
  constexpr int N = kVector<G, S>;
  __shared__ A of_warp[kMaxThreads / kWarp];
  const int64_t token = blockIdx.x;
  const G* dy = grads.at(token);
  for (int64_t route = token * routes.k; route < (token + 1) * routes.k; ++route) {
    const int64_t row = routes.row(route, to.num_rows);
    if (row < 0) {
      if (threadIdx.x == 0) dweights[route] = A(0);
      continue;
    }
    const A weight = weights[route];
    const S* y = from.at(row);
    S* out = to.at(row);
    A dot = 0;
    for_each_element<N>(
        to.num_features, aligned<G, N>(dy) && aligned<S, N>(y) && aligned<S, N>(out),
        [&](int64_t i) {
          const Vector<G, N> g = vector_at<G, N>(dy + i);
          const Vector<S, N> in = vector_at<S, N>(y + i);
          Vector<S, N> result;
#pragma unroll
          for (int e = 0; e < N; ++e) {
            dot += A(widen(g.at[e])) * A(widen(in.at[e]));
            result.at[e] = Narrow<S>::from(weight * A(widen(g.at[e])));
          }
          vector_at<S, N>(out + i) = result;
        },
        [&](int64_t i) {
          dot += A(widen(dy[i])) * A(widen(y[i]));
          out[i] = Narrow<S>::from(weight * A(widen(dy[i])));
        });
    dot = block_sum(dot, of_warp);
    if (threadIdx.x == 0) {
      dweights[route] = dot;
      named[row] = 1;
    }
  }
}

// Where each chunk begins before and after, in the order of the result; one entry more holds the number of rows.
struct Chunks {
  int64_t *from, *to;
  int64_t outer, inner;  // `outer` runs of `inner` chunks are stored; the result has `inner` runs of `outer`

  __host__ __device__ int64_t count() const { return outer * inner; }
};

// One warp; lengths are [sources, experts] in either direction.
__global__ void __launch_bounds__(kWarp)
    place_chunks_kernel(const int64_t* lengths, const Chunks chunks, bool inverse, int64_t num_rows) {
  for (int pass = 0; pass < 2; ++pass) {
    int64_t row = 0;
    for (int64_t begin = 0; begin < chunks.count(); begin += kWarp) {
      const int64_t at = begin + threadIdx.x;
      const bool inside = at < chunks.count();
      // The place in storage and in the result of the chunk at this place of storage, or of the result.
      const int64_t outer = pass == 0 ? at / chunks.inner : at % chunks.outer;
      const int64_t inner = pass == 0 ? at % chunks.inner : at / chunks.outer;
      const int64_t length = inside ? lengths[inverse ? inner * chunks.outer + outer : outer * chunks.inner + inner] : 0;
      if (length < 0) __trap();
      int64_t up_to = length;
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int64_t lower = __shfl_up_sync(0xffffffffu, up_to, distance);
        if (int(threadIdx.x) >= distance) up_to += lower;
      }
      if (inside) (pass == 0 ? chunks.from : chunks.to)[inner * chunks.outer + outer] = row + up_to - length;
      row += __shfl_sync(0xffffffffu, up_to, kWarp - 1);
    }
    if (row > num_rows) __trap();
    if (threadIdx.x == 0) (pass == 0 ? chunks.from : chunks.to)[chunks.count()] = row;
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) chunk_sort_kernel(const Rows<T> from, const Rows<T> to, const Chunks chunks) {
  constexpr int N = 16 / sizeof(T);
  const int64_t row = blockIdx.x;
  T* out = to.at(row);
  const T* in = nullptr;
  if (row < chunks.to[chunks.count()]) {
    int64_t low = 0, high = chunks.count() - 1;  // the last chunk that begins at this row or before
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (chunks.to[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    in = from.at(chunks.from[low] + row - chunks.to[low]);
  }
  for_each_element<N>(
      to.num_features, aligned<T, N>(out) && aligned<T, N>(in),
      [&](int64_t i) { vector_at<T, N>(out + i) = in ? vector_at<T, N>(in + i) : Vector<T, N>{}; },
      [&](int64_t i) { out[i] = in ? in[i] : T{}; });
}

int threads_for(int64_t num_features, int elements) {
  const int64_t wanted = (num_features + elements - 1) / elements;
  return int(std::clamp<int64_t>((wanted + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
}

template <class T>
void zero_others(const Rows<T>& rows, const Tensor& named, cudaStream_t stream, const char* op) {
  zero_others_kernel<T><<<unsigned(rows.num_rows), threads_for(rows.num_features, 16 / sizeof(T)), 0, stream>>>(
      rows, static_cast<const uint8_t*>(named.data_ptr()));
  check_launch(op);
}

void permute(Tensor x, const Tensor& positions, const Tensor& out) {
  const char* op = "moe_permute";
  check_rows(x, out, op);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  if (!rows_are_dense(x)) x = torch::stable::contiguous(x);
  const Tensor rows = matrix_argument(positions, x.size(0), -1, ScalarType::Int, x, op, "positions");
  if (out.numel() == 0) return;
  const Tensor named = torch::stable::new_zeros(x, {out.size(0)}, ScalarType::Byte);
  const Routes routes{static_cast<const int32_t*>(rows.data_ptr()), rows.size(1)};
  with_type(dtype_of(x, op), [&](auto from) {
    using From = decltype(from);
    with_type(dtype_of(out, op), [&](auto to) {
      using To = decltype(to);
      if (x.size(0) > 0) {
        permute_kernel<From, To>
            <<<unsigned(x.size(0)), threads_for(x.size(1), kVector<From, To>), 0, stream>>>(
                rows_of<From>(x), rows_of<To>(out), routes, static_cast<uint8_t*>(named.data_ptr()));
        check_launch(op);
      }
      zero_others(rows_of<To>(out), named, stream, op);
    });
  });
}

void combine(Tensor y, const Tensor& positions, const std::optional<Tensor>& weights, const Tensor& out) {
  const char* op = "moe_combine";
  check_rows(y, out, op);
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  if (!rows_are_dense(y)) y = torch::stable::contiguous(y);
  const Tensor rows = matrix_argument(positions, out.size(0), -1, ScalarType::Int, y, op, "positions");
  const auto weight = matrix_argument(weights, out.size(0), rows.size(1), wider_type(y, out), y, op, "weights");
  if (out.numel() == 0) return;
  const Routes routes{static_cast<const int32_t*>(rows.data_ptr()), rows.size(1)};
  with_type(dtype_of(y, op), [&](auto from) {
    using S = decltype(from);
    with_type(dtype_of(out, op), [&](auto to) {
      using T = decltype(to);
      using A = typename WiderOf<S, T>::type;
      constexpr int N = kVector<S, T>;
      const bool rows_aligned = reinterpret_cast<uintptr_t>(y.data_ptr()) % (N * sizeof(S)) == 0 && y.stride(0) % N == 0;
      combine_kernel<S, T, A><<<unsigned(out.size(0)), threads_for(y.size(1), N), 0, current_stream(y)>>>(
          rows_of<S>(y), rows_of<T>(out), routes, static_cast<const A*>(pointer_or_null(weight)), rows_aligned);
      check_launch(op);
    });
  });
}

Tensor combine_backward(Tensor dy, Tensor y, const Tensor& positions, const Tensor& weights, const Tensor& drows) {
  const char* op = "moe_combine_backward";
  check_rows(y, drows, op);
  check_same_rows(y, drows, op);
  STD_TORCH_CHECK(dy.dim() == 2 && dy.size(1) == y.size(1), op, ": dy has not the features of y");
  check_device(dy, y, op);
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const cudaStream_t stream = current_stream(y);
  if (!rows_are_dense(y)) y = torch::stable::contiguous(y);
  if (!rows_are_dense(dy)) dy = torch::stable::contiguous(dy);
  const ScalarType wide = wider_type(y, dy);
  const Tensor rows = matrix_argument(positions, dy.size(0), -1, ScalarType::Int, y, op, "positions");
  const Tensor weight = matrix_argument(weights, dy.size(0), rows.size(1), wide, y, op, "weights");
  Tensor dweights = torch::stable::new_zeros(y, {dy.size(0), rows.size(1)}, wide);
  if (drows.numel() == 0) return dweights;
  const Tensor named = torch::stable::new_zeros(y, {y.size(0)}, ScalarType::Byte);
  const Routes routes{static_cast<const int32_t*>(rows.data_ptr()), rows.size(1)};
  with_type(dtype_of(dy, op), [&](auto grad) {
    using G = decltype(grad);
    with_type(dtype_of(y, op), [&](auto from) {
      using S = decltype(from);
      using A = typename WiderOf<S, G>::type;
      if (dy.size(0) > 0) {
        combine_backward_kernel<G, S, A><<<unsigned(dy.size(0)), threads_for(y.size(1), kVector<G, S>), 0, stream>>>(
            rows_of<G>(dy), rows_of<S>(y), rows_of<S>(drows), routes, static_cast<const A*>(weight.data_ptr()),
            static_cast<A*>(dweights.data_ptr()), static_cast<uint8_t*>(named.data_ptr()));
        check_launch(op);
      }
      zero_others(rows_of<S>(drows), named, stream, op);
    });
  });
  return dweights;
}

void chunk_sort(Tensor x, const Tensor& lengths, bool inverse, const Tensor& out) {
  const char* op = "moe_chunk_sort";
  check_rows(x, out, op);
  check_same_rows(x, out, op);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  if (!rows_are_dense(x)) x = torch::stable::contiguous(x);
  const Tensor length = matrix_argument(lengths, -1, -1, ScalarType::Long, x, op, "lengths");
  if (out.numel() == 0) return;
  const int64_t sources = length.size(0), experts = length.size(1), count = sources * experts;
  const Tensor begins = torch::stable::new_empty(length, {2, count + 1});
  int64_t* begin = static_cast<int64_t*>(begins.data_ptr());
  const Chunks chunks{begin, begin + count + 1, inverse ? experts : sources, inverse ? sources : experts};
  place_chunks_kernel<<<1, kWarp, 0, stream>>>(static_cast<const int64_t*>(length.data_ptr()), chunks, inverse, x.size(0));
  check_launch(op);
  with_type(dtype_of(x, op), [&](auto type) {
    using T = decltype(type);
    chunk_sort_kernel<T><<<unsigned(out.size(0)), threads_for(x.size(1), 16 / sizeof(T)), 0, stream>>>(
        rows_of<T>(x), rows_of<T>(out), chunks);
    check_launch(op);
  });
}

}  // namespace
}  // namespace whale::cuda

STABLE_TORCH_LIBRARY_IMPL(whale, CUDA, library) {
  library.impl("moe_permute", TORCH_BOX(&whale::cuda::permute));
  library.impl("moe_combine", TORCH_BOX(&whale::cuda::combine));
  library.impl("moe_combine_backward", TORCH_BOX(&whale::cuda::combine_backward));
  library.impl("moe_chunk_sort", TORCH_BOX(&whale::cuda::chunk_sort));
}
