// What both devices check before a kernel of activations sees a pointer.
#pragma once

#include "activation.h"
#include "arguments.h"

namespace whale {

inline void check_activation(const Tensor& h, const Tensor& out, const std::optional<Tensor>& u, int64_t function,
                             const char* op) {
  STD_TORCH_CHECK(function >= 0 && function < kNumActivations, op, ": function ", function, " of ", kNumActivations);
  STD_TORCH_CHECK(h.is_contiguous(), op, ": rows are not contiguous");
  for (const Tensor& one : {out, u.value_or(out)}) {
    check_rows(h, one, op);
    check_same_rows(h, one, op);
  }
}

inline void check_sums(const std::optional<Tensor>& sums, const Tensor& grad, ScalarType wide, const char* op) {
  STD_TORCH_CHECK(!sums.has_value() || (sums->dim() == 1 && sums->size(0) == grad.size(1) && sums->is_contiguous() &&
                                        sums->scalar_type() == wide),
                  op, ": sums are no vector of the type that is summed in");
}

// Returns the type that is summed in.
inline ScalarType check_activation_backward(const Tensor& grad, const Tensor& h, const std::optional<Tensor>& u,
                                            int64_t function, const std::optional<Tensor>& du,
                                            const std::optional<Tensor>& dbias, const std::optional<Tensor>& du_bias,
                                            const char* op) {
  const ScalarType wide = statistics_type(h);
  check_activation(grad, h, u, function, op);
  check_activation(grad, h, du, function, op);
  STD_TORCH_CHECK(u.has_value() == du.has_value(), op, ": u and its gradient come together");
  check_sums(dbias, grad, wide, op);
  check_sums(du_bias, grad, wide, op);
  return wide;
}

}  // namespace whale
