// moe_activate and moe_activate_backward on CPU. Threads share columns, so that a sum over rows is one thread's.
#include <algorithm>

#include "../common/activation_arguments.h"
#include "dispatch.h"

namespace whale::cpu {
namespace {

// A thread takes whole cache lines of every row, and enough elements.
template <class Loop>
void for_each_column(int64_t num_rows, int64_t num_columns, const Loop& loop) {
  constexpr int64_t kColumns = 64, kGrain = 32768;
  const int64_t parts = (num_columns + kColumns - 1) / kColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, num_rows * kColumns));
  torch::stable::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
    loop(begin * kColumns, std::min(end * kColumns, num_columns));
  });
}

void activate(Tensor h, std::optional<Tensor> u, int64_t function, Tensor out) {
  const char* op = "moe_activate";
  check_activation(h, out, u, function, op);
  const ActivationRows rows{h.const_data_ptr(), pointer_or_null(u), out.data_ptr(), h.size(0), h.size(1)};
  const auto loop = isa().activation->forward[function][dtype_of(h, op)];
  for_each_column(rows.num_rows, rows.num_columns, [&](int64_t begin, int64_t end) { loop(rows, begin, end); });
}

void activate_backward(Tensor grad, Tensor h, std::optional<Tensor> u, int64_t function, std::optional<Tensor> du,
                       std::optional<Tensor> dbias, std::optional<Tensor> du_bias) {
  const char* op = "moe_activate_backward";
  const ScalarType wide = check_activation_backward(grad, h, u, function, du, dbias, du_bias, op);
  const Tensor scratch = torch::stable::new_zeros(grad, {2, grad.size(1)}, wide);
  const ActivationGradRows rows{grad.data_ptr(), h.data_ptr(), data_or_null<void>(u), data_or_null<void>(du),
                                data_or_null<void>(dbias), data_or_null<void>(du_bias), scratch.data_ptr(), grad.size(0),
                                grad.size(1)};
  const auto loop = isa().activation->backward[function][dtype_of(grad, op)];
  for_each_column(rows.num_rows, rows.num_columns, [&](int64_t begin, int64_t end) { loop(rows, begin, end); });
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("moe_activate", TORCH_BOX(&whale::cpu::activate));
  library.impl("moe_activate_backward", TORCH_BOX(&whale::cpu::activate_backward));
}
