// bucket_pack, bucket_unpack, bucket_amax on CUDA: one launch for up to kMaxTensors tensors of a dtype, their addresses in
// the kernel's arguments.
#include "../common/cast.h"
#include "launch.h"

namespace whale::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxTensors = 96;          // 3.4 KB of the 4 KB that arguments may take
constexpr int64_t kBlockElements = 8192;  // elements of one tensor that a block takes

struct Table {
  void* tensor[kMaxTensors];
  int64_t offset[kMaxTensors];  // in the bucket
  int64_t numel[kMaxTensors];
  int32_t first_block[kMaxTensors + 1];
  int32_t num_tensors;
};

struct Piece {
  int tensor;
  int64_t begin, count;
};

__device__ __forceinline__ Piece piece_of_block(const Table& table) {
  const int block = blockIdx.x;
  int low = 0, high = table.num_tensors - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = int64_t(block - table.first_block[low]) * kBlockElements;
  const int64_t left = table.numel[low] - begin;
  return {low, begin, left < kBlockElements ? left : kBlockElements};
}

// to[i] = cast(from[i] * scale) by the threads of a block, in 16-byte accesses where both sides allow. Returns whether an
// element that this thread read was not finite.
template <class From, class To>
__device__ __forceinline__ bool cast_piece(const From* from, To* to, int64_t count, ScaledCast<To, From> operation) {
  constexpr int N = kVector<From, To>;
  bool found = false;
  int64_t done = 0;
  if (aligned<From, N>(from) && aligned<To, N>(to)) {
    const int64_t vectors = count / N;
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const Vector<From, N> in = reinterpret_cast<const Vector<From, N>*>(from)[v];
      Vector<To, N> out;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        found |= is_non_finite(in.at[e]);
        out.at[e] = ScaledCast<To, From>::apply(operation, in.at[e]);
      }
      reinterpret_cast<Vector<To, N>*>(to)[v] = out;
    }
    done = vectors * N;
  }
  for (int64_t i = done + threadIdx.x; i < count; i += kThreads) {
    found |= is_non_finite(from[i]);
    to[i] = ScaledCast<To, From>::apply(operation, from[i]);
  }
  return found;
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Table table, To* flat, double scale) {
  const Piece piece = piece_of_block(table);
  const From* from = static_cast<const From*>(table.tensor[piece.tensor]) + piece.begin;
  To* to = flat + table.offset[piece.tensor] + piece.begin;
  cast_piece<From, To>(from, to, piece.count, ScaledCast<To, From>::with(scale));
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ Table table, const From* flat, double scale, float* non_finite) {
  const Piece piece = piece_of_block(table);
  const From* from = flat + table.offset[piece.tensor] + piece.begin;
  To* to = static_cast<To*>(table.tensor[piece.tensor]) + piece.begin;
  const bool found = cast_piece<From, To>(from, to, piece.count, ScaledCast<To, From>::with(scale));
  if (found) *non_finite = 1.0f;  // every writer writes the same
}

template <class From>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ Table table, int* largest) {
  const Piece piece = piece_of_block(table);
  const From* from = static_cast<const From*>(table.tensor[piece.tensor]) + piece.begin;
  uint32_t most = 0;
  for (int64_t i = threadIdx.x; i < piece.count; i += kThreads) {
    const uint32_t bits = magnitude_bits(from[i]);
    most = bits > most ? bits : most;
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) atomicMax(largest, int(most));
}

// Launches launch(table, blocks) for tensors of one dtype at a time, kMaxTensors at a time.
template <class Launch>
void for_each_table(const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, Dtype dtype, const char* op,
                    Launch launch) {
  Table table{};
  const auto flush = [&] {
    if (table.num_tensors > 0) launch(table, table.first_block[table.num_tensors]);
    table.num_tensors = 0;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    if (numel == 0 || dtype_of(tensors[i], op) != dtype) continue;
    if (table.num_tensors == kMaxTensors) flush();
    const int32_t at = table.num_tensors++;
    table.tensor[at] = tensors[i].data_ptr();
    table.offset[at] = offsets.empty() ? 0 : offsets[i];
    table.numel[at] = numel;
    table.first_block[at + 1] = table.first_block[at] + int32_t((numel + kBlockElements - 1) / kBlockElements);
  }
  flush();
}

void check(const Tensor& flat, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, const char* op) {
  check_bucket(flat, tensors.size(), offsets, op);
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_device(tensors[i], flat, op);
    check_place(i, tensors[i].numel(), offsets[i], flat.numel(), op);
  }
}

std::vector<Tensor> contiguous_all(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> dense;
  dense.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    dense.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
  }
  return dense;
}

void pack(const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, const Tensor& flat, double scale) {
  check(flat, tensors, offsets, "bucket_pack");
  const torch::stable::accelerator::DeviceGuard guard(flat.get_device_index());
  const cudaStream_t stream = current_stream(flat);
  const std::vector<Tensor> dense = contiguous_all(tensors);
  with_type(dtype_of(flat, "bucket_pack"), [&](auto to) {
    using To = decltype(to);
    for (const Dtype dtype : {kFloat, kBf16, kFp16, kDouble}) {
      with_type(dtype, [&](auto from) {
        using From = decltype(from);
        for_each_table(dense, offsets, dtype, "bucket_pack", [&](const Table& table, int blocks) {
          pack_kernel<From, To><<<blocks, kThreads, 0, stream>>>(table, static_cast<To*>(flat.data_ptr()), scale);
          check_launch("bucket_pack");
        });
      });
    }
  });
}

Tensor unpack(const Tensor& flat, const std::vector<int64_t>& offsets, const std::vector<Tensor>& tensors, double scale) {
  check(flat, tensors, offsets, "bucket_unpack");
  const torch::stable::accelerator::DeviceGuard guard(flat.get_device_index());
  const cudaStream_t stream = current_stream(flat);
  std::vector<Tensor> dense;
  dense.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    dense.push_back(tensor.is_contiguous() ? tensor : torch::stable::new_empty(tensor, tensor.sizes()));
  }
  Tensor result = torch::stable::new_zeros(flat, {}, ScalarType::Float);
  float* non_finite = static_cast<float*>(result.data_ptr());
  with_type(dtype_of(flat, "bucket_unpack"), [&](auto from) {
    using From = decltype(from);
    for (const Dtype dtype : {kFloat, kBf16, kFp16, kDouble}) {
      with_type(dtype, [&](auto to) {
        using To = decltype(to);
        for_each_table(dense, offsets, dtype, "bucket_unpack", [&](const Table& table, int blocks) {
          const From* bucket = static_cast<const From*>(flat.data_ptr());
          unpack_kernel<From, To><<<blocks, kThreads, 0, stream>>>(table, bucket, scale, non_finite);
          check_launch("bucket_unpack");
        });
      });
    }
  });
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_contiguous()) continue;
    Tensor destination = tensors[i];
    torch::stable::copy_(destination, dense[i]);
  }
  return result;
}

Tensor amax(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) check_device(tensor, tensors[0], "bucket_amax");
  const torch::stable::accelerator::DeviceGuard guard(tensors[0].get_device_index());
  const cudaStream_t stream = current_stream(tensors[0]);
  const std::vector<Tensor> dense = contiguous_all(tensors);
  Tensor result = torch::stable::new_zeros(tensors[0], {}, ScalarType::Float);
  for (const Dtype dtype : {kFloat, kBf16, kFp16, kDouble}) {
    with_type(dtype, [&](auto from) {
      using From = decltype(from);
      for_each_table(dense, {}, dtype, "bucket_amax", [&](const Table& table, int blocks) {
        amax_kernel<From><<<blocks, kThreads, 0, stream>>>(table, static_cast<int*>(result.data_ptr()));
        check_launch("bucket_amax");
      });
    });
  }
  return result;
}

}  // namespace
}  // namespace whale::cuda

STABLE_TORCH_LIBRARY_IMPL(whale, CUDA, library) {
  library.impl("bucket_pack", TORCH_BOX(&whale::cuda::pack));
  library.impl("bucket_unpack", TORCH_BOX(&whale::cuda::unpack));
  library.impl("bucket_amax", TORCH_BOX(&whale::cuda::amax));
}
