// What both devices check before a kernel sees a pointer. Python repeats none of this until a check fails.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "numeric.h"

namespace whale {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// By torch's own number for it: a bucket asks this of hundreds of tensors.
inline Dtype dtype_of(const Tensor& tensor, const char* op) {
  static const int32_t codes[kNumDtypes] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                            aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};
  int32_t code = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  for (int dtype = 0; dtype < kNumDtypes; ++dtype) {
    if (codes[dtype] == code) return Dtype(dtype);
  }
  STD_TORCH_CHECK(false, op, ": a tensor is not float32, bfloat16, float16 or float64");
}

inline void check_device(const Tensor& tensor, const Tensor& as, const char* op) {
  STD_TORCH_CHECK(tensor.device() == as.device(), op, ": tensors on two devices");
}

inline void check_bucket(const Tensor& flat, size_t num_tensors, const std::vector<int64_t>& offsets, const char* op) {
  STD_TORCH_CHECK(flat.dim() == 1 && flat.is_contiguous(), op, ": flat is not 1-D contiguous");
  STD_TORCH_CHECK(num_tensors == offsets.size(), op, ": ", num_tensors, " tensors, ", offsets.size(), " offsets");
}

inline void check_place(size_t tensor, int64_t numel, int64_t offset, int64_t length, const char* op) {
  STD_TORCH_CHECK(offset >= 0 && offset <= length - numel, op, ": tensor ", tensor, " of ", numel, " elements at ", offset,
                  " does not fit a bucket of ", length);
}

inline ScalarType statistics_type(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A 1-D argument of a given length, contiguous and of the dtype that the kernel reads.
inline Tensor vector_argument(const Tensor& tensor, int64_t length, ScalarType type, const Tensor& logits, const char* op,
                              const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == length, op, ": ", name, " is not a vector of ", length);
  check_device(tensor, logits, op);
  Tensor typed = tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  return typed.is_contiguous() ? typed : torch::stable::contiguous(typed);
}

inline std::optional<Tensor> vector_argument(const std::optional<Tensor>& tensor, int64_t length, ScalarType type,
                                             const Tensor& logits, const char* op, const char* name) {
  if (!tensor.has_value()) return std::nullopt;
  return vector_argument(*tensor, length, type, logits, op, name);
}

// A matrix of given sizes (-1 is any), contiguous and of the dtype that the kernel reads.
inline Tensor matrix_argument(const Tensor& tensor, int64_t num_rows, int64_t num_columns, ScalarType type,
                              const Tensor& as, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && (num_rows < 0 || tensor.size(0) == num_rows) &&
                      (num_columns < 0 || tensor.size(1) == num_columns),
                  op, ": ", name, " is not a matrix of ", num_rows, " x ", num_columns);
  check_device(tensor, as, op);
  Tensor typed = tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  return typed.is_contiguous() ? typed : torch::stable::contiguous(typed);
}

inline std::optional<Tensor> matrix_argument(const std::optional<Tensor>& tensor, int64_t num_rows, int64_t num_columns,
                                             ScalarType type, const Tensor& as, const char* op, const char* name) {
  if (!tensor.has_value()) return std::nullopt;
  return matrix_argument(*tensor, num_rows, num_columns, type, as, op, name);
}

inline const void* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

template <class T>
T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// Rows may have any stride; elements of a row are adjacent.
inline bool rows_are_dense(const Tensor& logits) { return logits.size(1) <= 1 || logits.stride(1) == 1; }

inline void check_logits(const Tensor& logits, const Tensor& target, const char* op) {
  STD_TORCH_CHECK(logits.dim() == 2, op, ": logits have ", logits.dim(), " dims, not 2");
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, op, ": target is not int64");
}

inline void check_route(const Tensor& logits, int64_t k, int64_t groups, const char* op) {
  STD_TORCH_CHECK(logits.dim() == 2, op, ": logits or probs have ", logits.dim(), " dims, not 2");
  const int64_t num_experts = logits.size(1);
  STD_TORCH_CHECK(groups >= 1 && k >= 1 && k <= num_experts && num_experts % groups == 0 && k % groups == 0, op, ": ", k,
                  " of ", num_experts, " experts in ", groups, " groups");
}

inline void check_experts(const Tensor& experts, int64_t num_experts, std::optional<int64_t> slots, const char* op) {
  STD_TORCH_CHECK(experts.dim() == 2 && experts.scalar_type() == ScalarType::Int, op, ": experts are no int32 matrix");
  STD_TORCH_CHECK(num_experts >= 1 && slots.value_or(0) >= 0, op, ": ", num_experts, " experts");
  STD_TORCH_CHECK(experts.numel() <= INT32_MAX && slots.value_or(0) <= INT32_MAX / num_experts, op,
                  ": rows are numbered in int32");
}

// A matrix and the contiguous one that its rows, or sums of them, are written to.
inline void check_rows(const Tensor& from, const Tensor& to, const char* op) {
  STD_TORCH_CHECK(from.dim() == 2 && to.dim() == 2 && from.size(1) == to.size(1) && to.is_contiguous(), op,
                  ": out is no contiguous matrix with the features of what goes there");
  check_device(to, from, op);
}

inline void check_same_rows(const Tensor& from, const Tensor& to, const char* op) {
  STD_TORCH_CHECK(from.size(0) == to.size(0) && from.scalar_type() == to.scalar_type(), op,
                  ": out has not the rows and dtype of what goes there");
}

// The type that arithmetic between two tensors is done in.
inline ScalarType wider_type(const Tensor& one, const Tensor& two) {
  const bool is_double = one.scalar_type() == ScalarType::Double || two.scalar_type() == ScalarType::Double;
  return is_double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace whale
