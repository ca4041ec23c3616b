// What every launch needs: the current stream, a check of the launch, the element type, 16-byte accesses.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../common/arguments.h"
#include "../common/numeric.h"

// Lives in libtorch_cuda, which a CPU torch does not have: weak, so that this library links and loads against either.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace whale::cuda {

constexpr int kWarp = 32;
constexpr int kNoSpills = 1;  // blocks a multiprocessor holds at least: without it ptxas spills to fit more

inline cudaStream_t current_stream(const Tensor& tensor) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// Calls call(T()) with the element type of a dtype.
template <class Call>
void with_type(Dtype dtype, Call call) {
  switch (dtype) {
    case kFloat: return call(float());
    case kBf16: return call(Bf16());
    case kFp16: return call(Fp16());
    case kDouble: return call(double());
  }
}

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

// Elements in a 16-byte access of the wider of two types.
template <class A, class B>
constexpr int kVector = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

template <class T, int N>
__device__ __forceinline__ bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * N) == 0;
}

}  // namespace whale::cuda
